"""A call of a function of the library: its fields, and how Python makes it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

from torch import Tensor

from fusedops.errors import InvalidInputError

#: A field of a struct: the address of a tensor, with an offset in bytes, or null; or a number.
Field = Tensor | tuple[Tensor, int] | int | float | None


class LibraryFunction(NamedTuple):
    """A function of one argument, the address of a struct of 8-byte fields. Made by :func:`library_function`."""

    address: int
    kinds: bytes
    run: Callable[[LibraryCall], Any]
    fail: Callable[[int], Any]
    packed: Callable[[LibraryCall], bytes]


class LibraryCall(NamedTuple):
    """A call of a function of the library, to be run.

    Args:
        function: the function.
        fields: of its struct, by the kinds of the function.
        results: what the kernel returns: a tensor, or a tuple of tensors and None.

    All other fields and the shapes of results follow from the metadata of the launcher's tensors and the values of its
    other arguments. A field never depends on the values in a tensor: the function reads those. A tensor that the
    function writes is new, and the function writes every element of it.
    """

    function: LibraryFunction
    fields: tuple[Field, ...]
    results: Tensor | tuple[Tensor | None, ...]


def library_function(function: Any, kinds: bytes, failure: Callable[[int], Exception]) -> LibraryFunction:
    """Return a function of the library as a :class:`LibraryCall` takes it.

    Args:
        function: of a library loaded by ctypes; it takes the address of a struct and returns a status, 0 for success.
        kinds: a character for each field, see :func:`fusedops_cpu.launch.structs.kinds_of_functions`.
        failure: returns the exception to raise for another status.
    """
    function.argtypes = [ctypes.c_char_p]

    def fail(status: int) -> None:
        raise failure(status)

    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    pack = partial(_packed, Struct(kinds.replace(b"r", b"P").replace(b"w", b"P").decode()).pack)
    return LibraryFunction(address, kinds, partial(_run, function, pack, fail), fail, pack)


def _packed(pack: Callable[..., bytes], call: LibraryCall) -> bytes:
    """Return the struct of a call."""
    return pack(*map(_value, call.fields))


def _run(function: Any, pack: Callable[[LibraryCall], bytes], fail: Callable[[int], None], call: LibraryCall) -> Any:
    """Run a call in Python."""
    status = function(pack(call))
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
    if not address and tensor.numel():  # null is what the function gets for None
        raise InvalidInputError(
            f"a compiled kernel: got a tensor of shape {tuple(tensor.shape)} without memory: its storage was freed, "
            f"expected a tensor with memory; to fix: call before it is freed"
        )
    return address + offset
