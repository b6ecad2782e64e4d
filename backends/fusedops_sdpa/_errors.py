"""The errors of torch's attention for a CPU in 16 bits, beside those that the op allows: see ``extra_error``.

Forward has a shorter exp for them. Backward adds up the gradients of k and v over blocks of queries, and those of the
query heads of a key head, in the dtype of the tensors: each time the sum so far is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.ops.attention.arguments import (
    AttentionGradArgs,
    VarlenAttentionGradArgs,
    sequences_of,
)
from fusedops.ops.attention.formulas import gradients_by_sequence

_SIGMAS = 2.0  # times the root of the sum of squares: roundings have no common sign


def forward_error(q: Tensor, *_: Any) -> tuple[None, float]:
    """Return the error of lse."""
    return None, 2e-4 if q.dtype.itemsize == 2 else 0.0


def backward_error(a: AttentionGradArgs) -> Sequence[Tensor | None]:
    """Return the errors of the gradients of k and v, from their sums after each block of queries."""
    if a.q.dtype.itemsize > 2 or not (a.q.numel() and a.k.numel()):
        return None, None, None
    info, rows, group = torch.finfo(a.q.dtype), a.q.shape[2], a.q.shape[1] // a.k.shape[1]
    size = 256 if rows >= 768 else 64 if rows >= 192 else 32  # of a block
    wide = {name: value.double() for name, value in zip(a._fields, a) if isinstance(value, Tensor) and name != "mask"}
    k, v = (wide[name].repeat_interleave(group, 1) for name in ("k", "v"))
    squares: list[Tensor] = [torch.zeros_like(k), torch.zeros_like(v)]
    for block in range(0, rows, size):
        grad = wide["grad_out"].clone()  # backward is linear in it
        grad[:, :, block + size :] = 0
        call = a._replace(**wide | {"grad_out": grad, "k": k, "v": v, "needs": (False, True, True)})
        so_far: Any = ops.OPS["attention"].backward(*call)
        for total, each in zip(squares, so_far[1:]):
            total += (info.eps / 2 * each.abs() + info.smallest_normal * info.eps).square()
    heads = a.k.shape[0], a.k.shape[1], group
    dk, dv = (_SIGMAS * each.view(*heads, *each.shape[2:]).sum(2).sqrt() for each in squares)
    return None, dk, dv


def packed_backward_error(a: VarlenAttentionGradArgs) -> Sequence[Tensor | None]:
    """Return the same of packed sequences."""
    if a.q.dtype.itemsize > 2:
        return None, None, None

    def one(grad: Tensor, lse_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Any:
        rest = None, out, lse, a.scale, a.causal, None, False, a.needs
        return backward_error(AttentionGradArgs(grad, lse_grad, q, k, v, *rest))

    sequences = sequences_of(a.cu_seqlens_q, a.cu_seqlens_k, a.q.shape[0], a.k.shape[0])
    needs = (False, True, True)
    return gradients_by_sequence(one, sequences, a.grad_out, a.grad_lse, a.q, a.k, a.v, a.out, a.lse, needs)
