"""varlen_attention in plain torch, without constraints: each sequence alone, by the computation of attention.

So a sequence has the same bits beside others as alone, and the memory is that of the longest one, in chunks.
"""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.dtypes import no_autocast
from fusedops.ops.attention.arguments import sequences_of
from fusedops.ops.attention.formulas import by_sequence, gradients_by_sequence
from fusedops_eager._attention import attention_backward, attention_forward
from fusedops_eager._row_order import PRODUCTS

_SOURCE = "fusedops_eager/_attention.py"


@kernel(
    ops.varlen_attention,
    source=_SOURCE,
    rows_independent=PRODUCTS,
)
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any sizes: the lengths are read, for which an accelerator is waited for."""
    sequences = sequences_of(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    with no_autocast(q.device.type):
        return by_sequence(
            lambda *own: attention_forward(own[0], own[1], own[2], None, scale, causal, window), sequences, q, k, v
        )


@kernel(
    ops.varlen_attention,
    direction="backward",
    source=_SOURCE,
    rows_independent=PRODUCTS,
)
def varlen_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v."""
    sequences = sequences_of(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])

    def one(
        grad: Tensor, lse_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, kept_lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        of_lse = lse_grad if return_lse else None
        return attention_backward(grad, of_lse, q, k, v, None, kept, kept_lse, scale, causal, window, needs)

    with no_autocast(q.device.type):
        return gradients_by_sequence(one, sequences, grad_out, grad_lse, q, k, v, out, lse, needs)
