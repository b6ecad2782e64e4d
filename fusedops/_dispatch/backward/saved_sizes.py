"""The sizes of saved tensors, compared between forward and backward.

Kernels read memory by the sizes of one argument. ``x.data = other`` puts other memory and other sizes below a tensor
that autograd has saved, without a new version, which is what autograd checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedops._contract.comparison import comparison_with
from fusedops._contract.constraint import plain
from fusedops._contract.op import Op
from fusedops.errors import InvalidInputError


class Saved(NamedTuple):
    """The sizes of the tensors that a forward saved.

    Attributes:
        sizes: the shape and the dtype of each, in a tuple.
        is_like: True for tensors like them, in half of the time of comparing the sizes; or None.
    """

    sizes: list[Any]
    is_like: Callable[..., bool] | None = None


class SavedMetadata:
    """The sizes of the tensors that a remembered call saved, to compare with later calls like it."""

    __slots__ = ("_saved",)

    def __init__(self) -> None:
        self._saved: Saved | None = None

    def sizes_of(self, names: tuple[str, ...], tensors: Sequence[Tensor | None]) -> Saved:
        """Return the sizes of tensors of these names."""
        saved = self._saved
        if saved is None:
            saved = self._saved = sizes_of(tensors)._replace(is_like=comparison_with(names, tensors))
        return saved if are_like(tensors, saved) else sizes_of(tensors)


def sizes_of(tensors: Sequence[Tensor | None]) -> Saved:
    """Return the sizes of tensors."""
    return Saved([None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors])


def are_like(tensors: Sequence[Tensor | None], saved: Saved) -> bool:
    """Return True for tensors in backward that are like forward's; False also where that is not known."""
    try:
        return saved.is_like is not None and saved.is_like(*tensors)
    except (AttributeError, TypeError):  # None in place of a tensor
        return False


def differ(tensors: Sequence[Tensor | None], saved: Saved, grad: Tensor) -> bool:
    """Return True where a tensor differs from forward's, or is not where the gradient is, which autograd checks.

    Args:
        tensors: in backward.
        saved: of forward.
        grad: the gradient of an output.
    """
    on_cpu = grad.is_cpu
    for tensor, of_forward in zip(tensors, saved.sizes):
        if tensor is not None:
            shape, dtype = of_forward  # devices are compared where there may be several
            if tensor.shape != shape or tensor.dtype is not dtype or tensor.is_cpu is not on_cpu:
                return True
            if not on_cpu and tensor.device != grad.device:
                return True
    return False


def changed_error(op: Op, tensors: Sequence[Tensor | None], saved: Saved, grad: Tensor) -> InvalidInputError:
    """Return the exception for the first saved tensor that differs from forward's."""
    for name, tensor, of_forward in zip(op.backward_call.kept_tensors, tensors, saved.sizes):
        if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) != (*of_forward, grad.device):
            shape, dtype = of_forward
            return InvalidInputError(
                f"{op.name} backward: got {name} of shape {tuple(tensor.shape)}, {plain(tensor.dtype)}, on "
                f"{tensor.device}, expected {tuple(shape)}, {plain(dtype)}, on {grad.device} as in forward; to fix: "
                f"leave {name} as it is until backward has run: assign no other tensor to {name}.data"
            )
    raise AssertionError(f"no saved tensor of {op.name} differs from forward's")
