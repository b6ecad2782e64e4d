"""top_k_routing on Triton: the kernels with their constraints. The launchers are in ``_routing.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim
from fusedops_triton._constraints import supported

#: The most experts that one program holds.
_MOST = 4096


@kernel(
    ops.top_k_routing,
    *supported("logits"),
    Dim("logits", (-1,), at_most=_MOST),
    source="fusedops_triton/_routing.py",
    rows_independent="a program has fewer rows where there are few, and its sums another order",
)
def top_k_routing(
    logits: Tensor,
    k: int,
    score: str,
    bias: Tensor | None,
    groups: int,
    top_groups: int,
    group_score: str,
    normalize: bool,
    eps: float,
    scale: float,
    index: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Choose experts and compute their weights; logits of any rank and strides."""
    from fusedops_triton._routing import Routing, routing_forward  # imports triton, so not at module level

    options = Routing(k, score, groups, top_groups, group_score, normalize, eps, scale)
    return routing_forward(logits, bias, index, options)


@kernel(
    ops.top_k_routing,
    *supported("logits"),
    Dim("logits", (-1,), at_most=_MOST),
    direction="backward",
    source="fusedops_triton/_routing.py",
    rows_independent="a program has fewer rows where there are few, and its sums another order",
)
def top_k_routing_backward(
    grad_weights: Tensor, logits: Tensor, chosen: Tensor, k: int, score: str, normalize: bool, eps: float, scale: float
) -> Tensor:
    """Compute the gradient of the logits."""
    from fusedops_triton._routing import routing_backward

    return routing_backward(grad_weights, logits, chosen, k, score, normalize, eps, scale)
