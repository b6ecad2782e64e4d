"""Cross entropy in plain torch, on any device, by the formulas of linear_cross_entropy.

On a CPU some rows at a time: forward keeps no tensor of the size of the logits, and backward writes the gradient alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype
from fusedops.ops.losses import formulas
from fusedops.ops.losses.arguments import CrossEntropyArgs, CrossEntropyGradArgs, check_targets
from fusedops_eager._chunks import slabs_of
from fusedops_eager.losses._linear_cross_entropy import rows_in_place


def cross_entropy(a: CrossEntropyArgs, save: bool) -> tuple[Tensor, Tensor | None, None]:
    """Compute the op on any device, for any rank and dtype. log_prob is not kept: lse serves."""
    check_targets("cross_entropy", a.target, a.ignore_index, a.logits.shape[-1])
    flat, target, wide = a.logits.reshape(-1, a.logits.shape[-1]), a.target.reshape(-1), compute_dtype(a.logits.dtype)
    loss = a.logits.new_empty(target.shape, dtype=wide)
    lse = torch.empty_like(loss)
    for at in slabs_of(flat):
        loss[at], lse[at] = rows_in_place(flat[at].to(wide, copy=True), target[at], a.options, None, False)
    reduced = formulas.reduced(loss.view(a.target.shape), a.target, a.options)
    return reduced, lse.view(a.target.shape) if save else None, None


def cross_entropy_backward(a: CrossEntropyGradArgs) -> Tensor:
    """Compute the gradient of the logits, (..., V), contiguous, in their dtype."""
    scale = formulas.row_scales(a.grad, a.target, a.logits.shape[-1], a.options).reshape(-1)
    flat, target = a.logits.reshape(-1, a.logits.shape[-1]), a.target.reshape(-1)
    dx = torch.empty_like(flat, memory_format=torch.contiguous_format)
    for at in slabs_of(flat):
        z = flat[at].to(a.lse.dtype, copy=True)
        rows_in_place(z, target[at], a.options, scale[at], True)
        dx[at] = z
    return dx.view(a.logits.shape)
