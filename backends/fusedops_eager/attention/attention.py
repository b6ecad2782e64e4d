"""attention in plain torch, without constraints. The computation is in ``_attention.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.dtypes import no_autocast
from fusedops.ops.attention.arguments import AttentionArgs, AttentionGradArgs
from fusedops_eager._row_order import PRODUCTS
from fusedops_eager.attention._attention import attention_backward as compute_backward
from fusedops_eager.attention._attention import attention_forward


@kernel(
    ops.attention,
    source="fusedops_eager/attention/_attention.py",
    rows_independent=PRODUCTS,
)
def attention(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any sizes and masks, with the scores of some queries at a time."""
    with no_autocast(a.q.device.type):
        return attention_forward(a.q, a.k, a.v, a.mask, a.scale, a.causal, a.window)


@kernel(
    ops.attention,
    direction="backward",
    source="fusedops_eager/attention/_attention.py",
    rows_independent=PRODUCTS,
)
def attention_backward(a: AttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, with the probabilities of some queries at a time."""
    lse_grad = a.grad_lse if a.return_lse else None
    with no_autocast(a.q.device.type):
        return compute_backward(
            a.grad_out, lse_grad, a.q, a.k, a.v, a.mask, a.out, a.lse, a.scale, a.causal, a.window, a.needs
        )
