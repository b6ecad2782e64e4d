"""Scaled masked softmax in plain torch, on any device.

``y = softmax(where(masked, -inf, scale * x), -1)``. Masked positions and fully masked rows are exactly 0. Backward
starts from the rounded y: ``dx = scale * y * (g - sum(g * y, -1))``. Computed in float32 (float64 for float64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype
from fusedops.ops.softmax.formulas import causal_mask
from fusedops_eager._torch import softmax as torch_softmax
from fusedops_eager._torch import softmax_backward as torch_softmax_backward


def softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the softmax of the scaled scores without the masked positions. No device is waited for.

    Args:
        x: (..., Sq, Sk), float16, bfloat16, float32 or float64, any strides.
        mask: broadcastable to x, bool or uint8, non-zero = masked; or None.
        scale: finite. It is never rounded to the dtype of x.
        causal: True also masks k > q (top-left aligned).

    Returns:
        (..., Sq, Sk), dtype of x, contiguous. A row without an unmasked position is 0.
    """
    masked = mask if mask is None or mask.dtype is torch.bool else mask.ne(0)
    if causal:
        masked = causal_mask(x) if masked is None else causal_mask(x).logical_or(masked)
    if masked is None and scale == 1.0 and (x.is_cpu or x.is_cuda):  # whose sums of 16 bits are wide
        return torch_softmax(x, -1, False).contiguous()
    scores = x.to(compute_dtype(x.dtype)) * scale
    if masked is None:
        return torch_softmax(scores, -1, False).to(x.dtype).contiguous()
    # filled before, for NaN and inf under the mask, and after, as a fully masked row is NaN
    y = torch_softmax(scores.masked_fill_(masked, -math.inf), -1, False)
    if not y.is_cpu or bool(y.isnan().any()):
        y.masked_fill_(masked, 0.0)
    return y.to(x.dtype).contiguous()


def softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the gradient of the scores, (..., Sq, Sk), contiguous, from the gradient of the probabilities.

    Args:
        grad: (..., Sq, Sk), dtype of y, any strides.
        y: (..., Sq, Sk), the result of ``softmax_forward``: 0 where masked.
        scale: as in the forward.
        causal: as in the forward; not used.
    """
    wide = compute_dtype(y.dtype)
    return torch_softmax_backward(grad.to(wide), y.to(wide), -1, wide).mul_(scale).to(y.dtype).contiguous()
