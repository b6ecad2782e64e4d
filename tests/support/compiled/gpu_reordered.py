"""A pytest plugin for tests/gpu on a CPU: sums of misaligned rows in another order, or a wrong result.

A GPU sums a misaligned row in another order than an aligned one. Triton's interpreter has one order, so the plugin
moves each result of a misaligned x by one last place; with GPU_PLANTED=wrong by 5 %.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fusedops_triton.softmax import _softmax

_forward = _softmax.softmax_forward


def _reordered(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    y = _forward(x, mask, scale, causal)
    if x.is_contiguous():
        return y
    if os.environ.get("GPU_PLANTED") == "wrong":
        return y * 1.05
    bits = y.view(torch.int16 if y.dtype == torch.bfloat16 else torch.int32)
    return torch.where(y > 0, bits + 1, bits).view(y.dtype)


_softmax.softmax_forward = _reordered
