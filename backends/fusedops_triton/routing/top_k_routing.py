"""top_k_routing on Triton: the kernels with their constraints. The launchers are in ``_routing.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim
from fusedops.ops.routing.arguments import TopKRoutingArgs, TopKRoutingGradArgs
from fusedops_triton._constraints import supported

#: The most experts that one program holds.
_MOST = 4096


@kernel(
    ops.top_k_routing,
    *supported("logits"),
    Dim("logits", (-1,), at_most=_MOST),
    source="fusedops_triton/routing/_routing.py",
    rows_independent="a program has fewer rows where there are few, and its sums another order",
)
def top_k_routing(a: TopKRoutingArgs) -> tuple[Tensor, Tensor]:
    """Choose experts and compute their weights; logits of any rank and strides."""
    from fusedops_triton.routing._routing import Routing, routing_forward  # imports triton, so not at module level

    options = Routing(a.k, a.score, a.groups, a.top_groups, a.group_score, a.normalize, a.eps, a.scale)
    return routing_forward(a.logits, a.bias, a.index, options)


@kernel(
    ops.top_k_routing,
    *supported("logits"),
    Dim("logits", (-1,), at_most=_MOST),
    direction="backward",
    source="fusedops_triton/routing/_routing.py",
    rows_independent="a program has fewer rows where there are few, and its sums another order",
)
def top_k_routing_backward(a: TopKRoutingGradArgs) -> Tensor:
    """Compute the gradient of the logits."""
    from fusedops_triton.routing._routing import routing_backward

    return routing_backward(*a)
