"""Triton's interpreter with loads and stores that are checked.

Each address is one of a tensor of the launch, and what a program stores no other program of the launch stores or loads.

The interpreter reads and writes memory by plain addresses. One beyond a tensor is mostly of other memory of the
process, so a test sees no fault, where a GPU may end with one. compute-sanitizer checks the same on a GPU. And it runs
the programs one after another, where a GPU runs them in any order, some at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor
from triton.runtime import interpreter

_plain: Any = interpreter._interpreter
_plain_arguments = interpreter.GridExecutor._init_args_hst
_plain_end = interpreter.GridExecutor._restore_args_dev
_names: list[str] = []  # of the tensors of the launch in progress, in the order of their addresses
_starts: Any = np.empty(0, np.uint64)
_ends: Any = np.empty(0, np.uint64)  # of the tensors up to each one, the largest: they may share memory
_loads: list[tuple[int, Any]] = []  # of the launch: the number of a program, and addresses
_stores: list[tuple[int, Any]] = []
_kept = 0  # addresses in both
MOST = 2**22  # addresses that are kept, 32 MB: what a launch loads and stores after them is not checked for its order


class _Checked:
    """Triton's module of loads and stores."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_plain, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        _keep(_loads, _used("a load", addresses, mask, np.dtype(dtype).itemsize))
        return _plain.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        _keep(_stores, _used("a store", addresses, mask, values.dtype.itemsize))
        return _plain.store(addresses, values, mask)

    def atomic_rmw(self, operation: Any, addresses: Any, values: Any, mask: Any, semantic: Any) -> Any:
        _used("an atomic operation", addresses, mask, values.dtype.itemsize)
        return _plain.atomic_rmw(operation, addresses, values, mask, semantic)


def _keep(accesses: list[tuple[int, Any]], used: Any) -> None:
    global _kept
    if _kept < MOST:
        _kept += used.size
        accesses.append((_program(), used))


def _program() -> int:
    """Return the number of the program that runs."""
    (x, y, z), (_, of_y, of_z) = interpreter.interpreter_builder.grid_idx, interpreter.interpreter_builder.grid_dim
    return (x * of_y + y) * of_z + z


def _used(what: str, addresses: Any, mask: Any, size: int) -> Any:
    """Return the addresses that are not masked. Raise AssertionError where one is of no tensor of the launch."""
    used = addresses[mask] if addresses.shape == mask.shape else np.broadcast_to(addresses, mask.shape)[mask]
    if not used.size:
        return used
    lowest, highest = used.min(), used.max() + np.uint64(size)
    at = int(_starts.searchsorted(lowest, "right")) - 1
    if at >= 0 and highest <= _ends[at]:
        return used
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
    return used


def _check_order() -> None:
    """Raise AssertionError where the order of the programs of a launch may matter."""
    addresses, programs = _all(_stores)
    at = np.argsort(addresses, kind="stable")
    addresses, programs = addresses[at], programs[at]
    again = (addresses[1:] == addresses[:-1]) & (programs[1:] != programs[:-1])
    if again.any():
        raise AssertionError(
            f"got {again.sum()} elements that two programs of a launch store, of {_owner(addresses[1:][again][0])}, "
            f"expected one"
        )
    read, readers = _all(_loads)
    place = addresses.searchsorted(read).clip(max=len(addresses) - 1)
    crossed = (addresses[place] == read) & (programs[place] != readers) if len(addresses) else np.zeros(0, bool)
    if crossed.any():
        raise AssertionError(
            f"got {crossed.sum()} elements that a program of a launch loads and another stores, of "
            f"{_owner(read[crossed][0])}, expected no such one"
        )


def _all(accesses: list[tuple[int, Any]]) -> tuple[Any, Any]:
    """Return the addresses of all accesses, and the programs that had them."""
    if not accesses:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    programs = np.repeat([program for program, _ in accesses], [used.size for _, used in accesses])
    return np.concatenate([used.reshape(-1) for _, used in accesses]), programs


def _owner(address: Any) -> str:
    """Return the name of the tensor that has an address."""
    return _names[int(_starts.searchsorted(address, "right")) - 1]


def _end(self: Any, *args: Any) -> None:
    try:
        _check_order()
    finally:
        _plain_end(self, *args)


def _arguments(self: Any, args: Any, kwargs: Any) -> Any:
    global _names, _starts, _ends, _kept
    on_host, named = _plain_arguments(self, args, kwargs)
    _loads.clear()
    _stores.clear()
    _kept = 0
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
    interpreter.GridExecutor._init_args_hst, interpreter.GridExecutor._restore_args_dev = _arguments, _end
