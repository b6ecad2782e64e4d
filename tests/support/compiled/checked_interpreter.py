"""Triton's interpreter with loads and stores that are checked: each address is one of a tensor of the launch.

The interpreter reads and writes memory by plain addresses. One beyond a tensor is mostly of other memory of the
process, so a test sees no fault, where a GPU may end with one. compute-sanitizer checks the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

_plain: Any = interpreter._interpreter
_plain_arguments = interpreter.GridExecutor._init_args_hst
_names: list[str] = []  # of the tensors of the launch in progress, in the order of their addresses
_starts: Any = np.empty(0, np.uint64)
_ends: Any = np.empty(0, np.uint64)  # of the tensors up to each one, the largest: they may share memory


class _Checked:
    """Triton's module of loads and stores."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_plain, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        _check("a load", addresses, mask, np.dtype(dtype).itemsize)
        return _plain.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        _check("a store", addresses, mask, values.dtype.itemsize)
        return _plain.store(addresses, values, mask)

    def atomic_rmw(self, operation: Any, addresses: Any, values: Any, mask: Any, semantic: Any) -> Any:
        _check("an atomic operation", addresses, mask, values.dtype.itemsize)
        return _plain.atomic_rmw(operation, addresses, values, mask, semantic)


def _check(what: str, addresses: Any, mask: Any, size: int) -> None:
    """Raise AssertionError where an address that is not masked is of no tensor of the launch."""
    used = addresses[mask] if addresses.shape == mask.shape else np.broadcast_to(addresses, mask.shape)[mask]
    if not used.size:
        return
    lowest, highest = used.min(), used.max() + np.uint64(size)
    at = int(_starts.searchsorted(lowest, "right")) - 1
    if at >= 0 and highest <= _ends[at]:
        return
    at = _starts.searchsorted(used, "right") - 1
    outside = (at < 0) | (used + np.uint64(size) > _ends[at])
    if outside.any():
        address = int(used[outside][0])
        distances = [(abs(address - int(end)), name) for name, end in zip(_names, _ends)]
        distance, name = min(distances, default=(0, "no tensor"))
        raise AssertionError(
            f"got {what} of {size} bytes outside of all tensors of the launch, {distance} bytes from the end of "
            f"{name}, expected a mask that is False there ({outside.sum()} of {used.size} elements)"
        )


def _arguments(self: Any, args: Any, kwargs: Any) -> Any:
    global _names, _starts, _ends
    on_host, named = _plain_arguments(self, args, kwargs)
    found = sorted(_extents([*zip(self.arg_names, on_host), *named.items()]))
    _names = [name for *_, name in found]
    _starts = np.array([start for start, *_ in found], np.uint64)
    _ends = np.maximum.accumulate(np.array([end for _, end, _ in found], np.uint64))
    return on_host, named


def _extents(arguments: list[tuple[str, Any]]) -> Iterator[tuple[int, int, str]]:
    """Yield the first address of the storage of each tensor, the one after its last, and the tensor's name.

    A storage may be larger: rows of logits are padded, and their kernels read the padding.
    """
    for name, each in arguments:
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name


def install() -> None:
    """Check the loads and stores of this process."""
    interpreter._interpreter = _Checked()
    interpreter.GridExecutor._init_args_hst = _arguments


def uninstall() -> None:
    """Return to the interpreter as it is."""
    interpreter._interpreter, interpreter.GridExecutor._init_args_hst = _plain, _plain_arguments
