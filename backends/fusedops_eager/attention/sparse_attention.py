"""sparse_attention in plain torch: attention in chunks of queries, of which each hides the keys that are not chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import no_autocast
from fusedops.ops.attention.arguments import (
    AttentionArgs,
    AttentionGradArgs,
    SparseAttentionArgs,
    SparseAttentionGradArgs,
    check_indices,
)
from fusedops_eager.attention._attention import Call, Part, attention_forward, attention_gradients


class _ChosenCall(Call):
    """A call whose chunks hide the keys that a query does not choose."""

    def __init__(self, a: AttentionArgs | AttentionGradArgs, indices: Tensor) -> None:
        super().__init__(a)
        check_indices(indices, self.sk)
        self.indices, self.masks_some = indices, True

    def masked(self, part: Part) -> list[Tensor]:
        heads = part.n if self.indices.shape[1] > 1 else slice(None)
        columns = self.indices[part.b, heads, part.i].long()
        columns = columns.masked_fill((columns < 0) | (columns >= self.sk), self.sk)
        hidden = columns.new_ones((*columns.shape[:3], self.sk + 1), dtype=torch.bool).scatter_(-1, columns, False)
        return [*super().masked(part), hidden[:, :, None, :, part.j]]


def sparse_attention(a: SparseAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, with the scores of some queries and all keys at a time."""
    with no_autocast(a.q.device.type):
        dense = AttentionArgs(a.q, a.k, a.v, a.mask, a.scale, a.causal, a.window, a.return_lse)
        return attention_forward(dense, _ChosenCall(dense, a.indices))


def sparse_attention_backward(a: SparseAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v."""
    options = a.scale, a.causal, a.window, a.return_lse, a.needs
    with no_autocast(a.q.device.type):
        dense = AttentionGradArgs(a.grad_out, a.grad_lse, a.q, a.k, a.v, a.mask, a.out, a.lse, *options)
        return attention_gradients(dense, _ChosenCall(dense, a.indices))
