"""Layouts: the same shape and dtype in other strides, at another offset, or as a negative view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from fusedops._contract.tensor_spec import TensorSpec
from fusedops._torch import negative_view

Form = Callable[[Tensor], Tensor]  # gives a tensor another layout
_CACHED = 2**12  # specs


def transposed(tensor: Tensor) -> Tensor:
    """Return the same values with the last two dimensions exchanged in memory."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def cut(tensor: Tensor) -> Tensor:
    """Return the same values as every second column of a wider tensor."""
    if tensor.dim() == 0:
        return tensor
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    wide[..., ::2] = tensor
    return wide[..., ::2]


def expanded(tensor: Tensor) -> Tensor:
    """Return the first row for every row, in the memory of one: stride 0."""
    return tensor[..., :1, :].expand(tensor.shape) if tensor.dim() > 1 else tensor


def repeated(tensor: Tensor) -> Tensor:
    """Return the first column for every column: stride 0 in the last dimension."""
    return tensor[..., :1].expand(tensor.shape) if tensor.dim() > 0 else tensor


def offset(tensor: Tensor) -> Tensor:
    """Return the same values one element after the start of their memory, where vectors of them are not aligned."""
    memory = tensor.new_zeros(tensor.numel() + 2)
    inner = memory[1:-1].view(tensor.shape)
    return inner.copy_(tensor)


def negative(tensor: Tensor) -> Tensor:
    """Return the same values as the negative view of their negatives: torch keeps the sign as a bit."""
    view = negative_view(-tensor)
    # a device outside torch may not know the bit
    return view if torch.equal(view.signbit(), tensor.signbit()) else tensor


@lru_cache(maxsize=_CACHED)
def layouts(spec: TensorSpec) -> Mapping[str, Form]:
    """Return the layouts that a tensor of this spec can have besides a contiguous one, by name."""
    forms: dict[str, Form] = {"offset": offset}
    if spec.dtype is torch.int64:  # a seed, targets
        forms["negative"] = negative
    if spec.numel() == 1:
        return forms
    if spec.dim() > 0:
        forms |= {"cut": cut, "repeated": repeated}
    if spec.dim() > 1:
        forms |= {"transposed": transposed, "expanded": expanded}
    if spec.is_floating_point():
        forms["negative"] = negative
    return forms
