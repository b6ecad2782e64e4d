"""linear_attention in plain torch, without constraints. The computation is in ``_linear_attention.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.dtypes import no_autocast
from fusedops_eager._linear_attention import linear_attention_backward as compute_backward
from fusedops_eager._linear_attention import linear_attention_forward
from fusedops_eager._row_order import PRODUCTS


@kernel(
    ops.linear_attention,
    source="fusedops_eager/_linear_attention.py",
    rows_independent=PRODUCTS,
)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: bool,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any sizes, in chunks of 64 positions."""
    with no_autocast(q.device.type):
        return linear_attention_forward(q, k, v, decay, beta, scale, normalize, initial_state, cu_seqlens)


@kernel(
    ops.linear_attention,
    direction="backward",
    source="fusedops_eager/_linear_attention.py",
    rows_independent=PRODUCTS,
)
def linear_attention_backward(
    grad_out: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: bool,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients in chunks of 64 positions, from the state before each of them."""
    of_state = grad_state if return_state else None
    with no_autocast(q.device.type):
        return compute_backward(
            grad_out, of_state, q, k, v, decay, beta, scale, normalize, initial_state, cu_seqlens, needs
        )
