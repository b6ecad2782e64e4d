"""Calls of the library that are made again one after another, without Python between them (``src/team.cpp``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

from torch import Tensor

from fusedops import Replay
from fusedops_cpu.launch.library import failure, library_path
from fusedops_cpu.launch.struct_call import LibraryCall


class LibraryReplay(Replay):
    """A call of a function of the library, with the addresses that it had."""

    def __init__(self, call: LibraryCall) -> None:
        self._call = call  # keeps its tensors
        self._struct = ctypes.create_string_buffer(call.function.packed(call))
        self.pair = (call.function.address, ctypes.addressof(self._struct))

    @classmethod
    def joined(cls, calls: Sequence[LibraryReplay]) -> Callable[[], object]:
        """Return a function that makes calls again, in order, as one call of the library."""
        pairs = [address for call in calls for address in call.pair]
        return partial(_run, (ctypes.c_void_p * len(pairs))(*pairs), len(calls), calls)

    @classmethod
    def begin(cls) -> bool:
        """Wake the threads that share the calls, until :meth:`end`."""
        return bool(_library().fusedops_begin_step())

    @classmethod
    def end(cls) -> None:
        """Let the threads sleep."""
        _library().fusedops_end_step()


def record(launcher: Callable[..., Any], *args: Any) -> tuple[Any, LibraryReplay | None]:
    """Make the call that a launcher returns, and return the results and the call, to be made again.

    None in place of the call where the launcher computed the results itself.
    """
    returned = launcher(*args)
    if type(returned) is not LibraryCall:
        return returned, None
    results = returned.function.run(returned)
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of((args, results))}
    if any(tensor.untyped_storage().data_ptr() not in known for tensor in tensors_of(returned.fields)):
        return results, None  # a copy of an argument, which would have to be made again
    return results, LibraryReplay(returned)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in nested tuples and lists."""
    if isinstance(values, Tensor):
        return [values]
    several = cast("Sequence[Any]", values if isinstance(values, (tuple, list)) else ())
    return [tensor for each in several for tensor in tensors_of(each)]


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path()))  # with the interpreter lock released


def _run(pairs: Any, count: int, kept: Sequence[LibraryReplay]) -> None:
    if status := _library().fusedops_run_calls(pairs, ctypes.c_int64(count)):
        raise failure(status)
