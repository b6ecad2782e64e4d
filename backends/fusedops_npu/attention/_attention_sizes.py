"""The sizes of the vendor's attention: values as wide as keys, and eight copies of each row's max and sum."""

from __future__ import annotations

import torch
from torch import Tensor

COPIES = 8  # of each row's max and sum


def as_wide(tensor: Tensor, k: Tensor) -> Tensor:
    """Return the tensor with the head size of k, padded with 0: products with it are the same."""
    missing = k.shape[-1] - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def cropped(tensor: Tensor, v: Tensor) -> Tensor:
    """Return the tensor with the head size of v, contiguous, in memory of its own size."""
    width = v.shape[-1]
    if tensor.shape[-1] == width:
        return tensor.contiguous()
    return tensor[..., :width].clone(memory_format=torch.contiguous_format)
