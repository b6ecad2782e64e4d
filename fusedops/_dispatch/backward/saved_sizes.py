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
    """Return the shape and the dtype of each tensor."""
    return [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]


def differ(tensors: Sequence[Tensor | None], saved: list[Any], grad: Tensor) -> bool:
    """Return True where a tensor differs from forward's, or is not where the gradient is, which autograd checks.

    Args:
        tensors: in backward.
        saved: the sizes of forward's.
        grad: the gradient of an output.
    """
    on_cpu = grad.is_cpu
    for tensor, of_forward in zip(tensors, saved):
        if tensor is not None:
            shape, dtype = of_forward  # devices are compared where there may be several
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.is_cpu is not on_cpu:
                return True
            if not on_cpu and tensor.device != grad.device:
                return True
    return False


def changed_error(op: Op, tensors: Sequence[Tensor | None], saved: list[Any], grad: Tensor) -> InvalidInputError:
    """Return the exception for the first saved tensor that differs from forward's."""
    for name, tensor, of_forward in zip(op.backward_call.kept_tensors, tensors, saved):
        if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) != (*of_forward, grad.device):
            shape, dtype = of_forward
            return InvalidInputError(
                f"{op.name} backward: got {name} of shape {tuple(tensor.shape)}, {plain(tensor.dtype)}, on "
                f"{tensor.device}, expected {tuple(shape)}, {plain(dtype)}, on {grad.device} as in forward; to fix: "
                f"leave {name} as it is until backward has run: assign no other tensor to {name}.data"
            )
    raise AssertionError(f"no saved tensor of {op.name} differs from forward's")
