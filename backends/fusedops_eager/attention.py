"""attention in plain torch, without constraints. The computation is in ``_attention.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.dtypes import no_autocast
from fusedops_eager._attention import attention_backward as compute_backward
from fusedops_eager._attention import attention_forward
from fusedops_eager._row_order import PRODUCTS


@kernel(
    ops.attention,
    source="fusedops_eager/_attention.py",
    rows_independent=PRODUCTS,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any sizes and masks, with the scores of some queries at a time."""
    with no_autocast(q.device.type):
        return attention_forward(q, k, v, mask, scale, causal, window)


@kernel(
    ops.attention,
    direction="backward",
    source="fusedops_eager/_attention.py",
    rows_independent=PRODUCTS,
)
def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, with the probabilities of some queries at a time."""
    lse_grad = grad_lse if return_lse else None
    with no_autocast(q.device.type):
        return compute_backward(grad_out, lse_grad, q, k, v, mask, out, lse, scale, causal, window, needs)
