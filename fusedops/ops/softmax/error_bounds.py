"""The error bounds of scaled_masked_softmax: the changes of the results where each score moves by ``absolute``
of its size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import upcast
from fusedops.ops.softmax.formulas import causal_mask


def error_bound(absolute: float, x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Return the largest change of each probability where each score moves by ``absolute`` of its size.

    The largest score of a row is subtracted from the others, so it moves the others, and not itself.
    """
    if not x.numel():
        return torch.zeros(())
    scores = upcast(x) * scale
    overflow = ~scores.isfinite() & x.isfinite()
    if causal or mask is not None:
        masked = torch.zeros((), dtype=torch.bool) if mask is None else mask.bool()
        masked = masked | causal_mask(x) if causal else masked
        scores, overflow = scores.masked_fill(masked, -math.inf), overflow & ~masked
    scores = scores.double()
    top = scores.amax(-1, keepdim=True)
    move = (absolute * (scores.abs() + top.abs())).masked_fill((scores == top) | scores.isinf(), 0.0)
    scores = scores - top
    least, most = torch.exp(scores - move), torch.exp((scores + move).clamp(max=300.0))
    y = torch.softmax(scores, -1)
    up = most / (most + (least.sum(-1, keepdim=True) - least)) - y
    down = y - least / (least + (most.sum(-1, keepdim=True) - most))
    change = torch.maximum(up, down).clamp(min=0.0).nan_to_num(nan=0.0)
    return change.masked_fill(~top.isfinite() & overflow.any(-1, keepdim=True), math.inf)


def gradient_error_bound(absolute: float, grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Return ``absolute`` times the terms of each gradient, and what y loses where it is below the normal numbers."""
    g, p = upcast(grad), upcast(y)
    finfo = torch.finfo(y.dtype)
    lost = max(finfo.smallest_normal * finfo.eps / 2, torch.finfo(p.dtype).smallest_normal)
    size, total = g.abs(), (g * p).abs().sum(-1, keepdim=True)
    terms = absolute * p * (size + total) + lost * (1 + size + total + p * size.sum(-1, keepdim=True))
    # 0 * inf: NaN by the formula, and 0 by a kernel that skips masked positions
    skipped, undefined = p == 0, ~(g * p).isfinite()
    unknown = (skipped & undefined).any(-1, keepdim=True) | (skipped & undefined.any(-1, keepdim=True))
    return (abs(scale) * terms).masked_fill(unknown, math.inf)
