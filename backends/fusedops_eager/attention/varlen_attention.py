"""varlen_attention in plain torch: each sequence alone, by the computation of attention.

So a sequence has the same bits beside others as alone, and the memory is that of the longest one, in chunks.
"""

from __future__ import annotations

from torch import Tensor

from fusedops.dtypes import no_autocast
from fusedops.ops.attention.arguments import (
    AttentionArgs,
    AttentionGradArgs,
    VarlenAttentionArgs,
    VarlenAttentionGradArgs,
    sequences_of,
)
from fusedops.ops.attention.formulas import by_sequence, gradients_by_sequence
from fusedops_eager.attention._attention import attention_forward, attention_gradients


def varlen_attention(a: VarlenAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any sizes: the lengths are read, for which an accelerator is waited for."""
    sequences = sequences_of(a.cu_seqlens_q, a.cu_seqlens_k, a.q.shape[0], a.k.shape[0])
    with no_autocast(a.q.device.type):
        return by_sequence(
            lambda *own: attention_forward(AttentionArgs(own[0], own[1], own[2], None, a.scale, a.causal, a.window)),
            sequences,
            a.q,
            a.k,
            a.v,
        )


def varlen_attention_backward(a: VarlenAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v."""
    sequences = sequences_of(a.cu_seqlens_q, a.cu_seqlens_k, a.q.shape[0], a.k.shape[0])

    def one(
        grad: Tensor, lse_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, kept_lse: Tensor
    ) -> tuple[Tensor | None, ...]:
        options = a.scale, a.causal, a.window, a.return_lse, a.needs
        return attention_gradients(AttentionGradArgs(grad, lse_grad, q, k, v, None, kept, kept_lse, *options))

    with no_autocast(a.q.device.type):
        return gradients_by_sequence(one, sequences, a.grad_out, a.grad_lse, a.q, a.k, a.v, a.out, a.lse, a.needs)
