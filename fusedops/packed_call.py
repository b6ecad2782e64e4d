"""Kernels that are one call of a C function: what a launcher returns, and how it is run.

A kernel that is declared with ``packed=True`` returns a :class:`PackedCall` instead of calling the library itself.
Where the compiled library of the core is present, such a call is remembered: the next one with arguments of the same
types, dtypes, devices, shapes, strides and values allocates its results, puts the addresses of its tensors into the
struct, and calls the C function, without the launcher.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from itertools import groupby
from struct import Struct
from typing import Any, NamedTuple

from torch import Tensor

from fusedops import _native
from fusedops._storages import check_storages, freed_error, is_freed

__all__ = ["PackedCall", "PackedFunction", "packed_function", "results_of", "runner"]

#: A field of a struct: the address of a tensor, with an offset in bytes, or null; or a number.
Field = Tensor | tuple[Tensor, int] | int | float | None


class PackedFunction(NamedTuple):
    """A C function of one argument, the address of a struct of 8-byte fields. Made by :func:`packed_function`."""

    address: int
    kinds: bytes
    run: Callable[[PackedCall], Any]
    fail: Callable[[int], Any]


class PackedCall(NamedTuple):
    """A call of a C function, to be run.

    Args:
        function: the C function.
        fields: of its struct, by the kinds of the function.
        results: what the kernel returns: a tensor, or a tuple of tensors and None.

    All other fields and the shapes of results follow from the metadata of the launcher's tensors and the values of its
    other arguments. A field never depends on the values in a tensor: the C function reads those. A tensor that the
    function writes is new, and the function writes every element of it.
    """

    function: PackedFunction
    fields: tuple[Field, ...]
    results: Tensor | tuple[Tensor | None, ...]


def packed_function(function: Any, kinds: str, failure: Callable[[int], Exception]) -> PackedFunction:
    """Return a C function as a launcher of packed calls takes it.

    Args:
        function: of a library loaded by ctypes; it takes the address of a struct and returns a status, 0 for success.
        kinds: of the fields of the struct, in order, each with an optional count before it: "r" the address of a tensor
            that is read, "w" of one that is written (null for None), "q" an int64, "d" a double. "2r1w3qd" has 7.
        failure: returns the exception to raise for another status.

    >>> import ctypes, torch
    >>> status = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(lambda struct: 0)
    >>> packed_function(status, "rw2q", lambda status: RuntimeError(f"status {status}")).kinds
    b'rwqq'
    """
    count, each = "", ""
    for kind in kinds:
        each += "" if kind.isdigit() else kind * int(count or 1)
        count = count + kind if kind.isdigit() else ""
    struct = "".join(f"{len([*group])}{kind}" for kind, group in groupby(each.replace("r", "P").replace("w", "P")))
    function.argtypes = [ctypes.c_char_p]

    def fail(status: int) -> None:
        raise failure(status)

    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return PackedFunction(address, each.encode(), partial(_run, function, Struct(struct).pack, fail), fail)


def _run(function: Any, pack: Callable[..., bytes], fail: Callable[[int], None], call: PackedCall) -> Any:
    """Run a call in Python."""
    status = function(pack(*map(_value, call.fields)))
    if status:
        fail(status)
    return call.results


def _value(field: Field) -> int | float:
    if isinstance(field, (int, float)):
        return field
    if field is None:
        return 0
    tensor, offset = field if isinstance(field, tuple) else (field, 0)
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        return tensor  # struct refuses what is no field
    address = tensor.data_ptr()
    if not address and is_freed(tensor):  # null is what the C function gets for None
        raise freed_error("a compiled kernel", f"a tensor of shape {tuple(tensor.shape)}")
    return address + offset


def runner(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the launcher's arguments that runs the call it packs, and returns the results."""
    function = getattr(launcher, "__wrapped__", launcher)
    names = getattr(getattr(function, "__code__", None), "co_varnames", ())
    guarded = partial(_guarded, launcher, getattr(function, "__name__", "a compiled kernel"), names)
    return _native.packed(guarded, PackedCall) or partial(_launch, guarded)


def _guarded(launcher: Callable[..., Any], what: str, names: tuple[str, ...], *args: Any) -> Any:
    """Call a launcher, which may copy its tensors: torch's copy of one whose storage was freed can end the process.

    A remembered call does not come here: its addresses are compared with null instead.
    """
    check_storages(what, names, args)
    return launcher(*args)


def _launch(launcher: Callable[..., Any], *args: Any) -> Any:
    return results_of(launcher(*args))


def results_of(returned: Any) -> Any:
    """Return the results of a launcher that returned them, or a packed call, which is run."""
    return returned.function.run(returned) if type(returned) is PackedCall else returned
