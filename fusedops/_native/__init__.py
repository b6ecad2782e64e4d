"""The compiled library of the core: checks and launchers that remember calls (``remembered.cpp``, ``packed.cpp``), and
the range of a tensor's numbers (``within.cpp``).

It is built with the package where there is a compiler. Without it, and on a Python without the global interpreter lock,
every call is checked and packed in Python: layer_norm of 64 elements takes 9 us instead of 3.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

# in the order of python.h
PYTHON = (
    "PyObject_GetAttr",
    "PyLong_AsVoidPtr",
    "PyLong_AsLongLong",
    "PyFloat_AsDouble",
    "PyLong_FromLongLong",
    "PyBytes_AsString",
    "PyObject_Type",
    "PyObject_RichCompareBool",
    "Py_IncRef",
    "Py_DecRef",
    "PyErr_Occurred",
    "PyErr_Clear",
    "PyErr_NoMemory",
    "PyObject_VectorcallDict",  # not PyObject_Vectorcall, which Python 3.10 does not export
    "PyTuple_New",
    "PyTuple_SetItem",
    "PyTuple_GetItem",
    "PyTuple_Size",
    "PyCapsule_New",
    "PyCapsule_GetPointer",
    "PyCFunction_NewEx",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)
TORCH = ("dtype", "layout", "device_type", "device_index", "dim", "sizes", "strides", "data_ptr")
_TYPES = (torch.Tensor, torch.nn.Parameter, tuple, float)
_ATTRIBUTES = ("_cdata", "dtype", "device")
_VALUES = (type(None), bool, int, float, str, torch.dtype)
_kept: list[Any] = []  # objects whose addresses the library has
_SUFFIXES = {"win32": "dll", "darwin": "dylib"}
_TORCH_LIBRARIES = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}


def remembered(check: F) -> F:
    """Return a check that is not called for a call like one of the last eight that it took.

    Args:
        check: returns None for a call that it takes. It reads nothing but the metadata of tensors (type, dtype, layout,
            device, shape, strides) and the values of other arguments.

    Returns:
        A function of the same positional arguments; ``check`` itself where there is no library.
    """
    loaded = library()
    return check if isinstance(loaded, str) else loaded.fusedops_remembered(check)


def packed(launcher: F, packed_call: type[Any]) -> F | None:
    """Return a function of the launcher's arguments that runs what it packs, or None where there is no library.

    Args:
        launcher: returns a ``packed_call`` or the results, as :class:`fusedops.packed_call.PackedCall` has it.
        packed_call: the type.
    """
    loaded = library()
    return None if isinstance(loaded, str) else loaded.fusedops_packed(launcher, packed_call)


def within() -> Callable[[torch.Tensor, int], bool]:
    """Return a function that is True for a tensor on a CPU whose numbers are all in [0, end).

    It is False where one is not, and for a tensor that it does not read: of another dtype than int64, on another
    device, with gaps between its numbers, of many numbers, or where there is no library.
    """
    loaded = library()
    return (lambda tensor, end: False) if isinstance(loaded, str) else loaded.fusedops_within()


@cache
def library() -> ctypes.PyDLL | str:
    """Load the library, once; or return why it cannot be used."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it needs CPython with the global interpreter lock"
    path = library_path()
    if not path.exists():
        return f"this installation has no compiled library {path.name}"
    try:
        loaded = _set_up(ctypes.PyDLL(str(path)))
    except (OSError, AttributeError) as error:  # AttributeError: of another version than this torch
        return f"the compiled library does not load: {error}"
    return loaded if _reads_as_torch(loaded) else "the compiled library does not read tensors as this torch"


def library_path() -> Path:
    """Return the file for this machine."""
    machine = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return Path(__file__).parent / f"libfusedops-{machine}.{_SUFFIXES.get(sys.platform, 'so')}"


def _set_up(loaded: ctypes.PyDLL) -> ctypes.PyDLL:
    folder = Path(torch.__file__).parent / "lib"
    torch_cpu = ctypes.CDLL(str(folder / _TORCH_LIBRARIES.get(sys.platform, "libtorch_cpu.so")))
    loaded.fusedops_read.argtypes = [ctypes.py_object, ctypes.c_void_p]
    loaded.fusedops_remembered.argtypes = [ctypes.py_object]
    loaded.fusedops_remembered.restype = ctypes.py_object
    loaded.fusedops_packed.argtypes = [ctypes.py_object, ctypes.py_object]
    loaded.fusedops_packed.restype = ctypes.py_object
    loaded.fusedops_within.argtypes = []
    loaded.fusedops_within.restype = ctypes.py_object
    torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    empty_on_cpu = torch_c._dynamo.guards._empty_strided_cpu  # of compiled models: 0.4 us instead of 0.8
    functions = torch.Tensor.is_neg, _empty, empty_on_cpu
    names: list[Any] = [None, False, True, *_TYPES, *map(sys.intern, _ATTRIBUTES), *functions, *_VALUES]
    _kept.extend(names)
    loaded.fusedops_set_up(
        _addresses(getattr(ctypes.pythonapi, name) for name in PYTHON),
        _addresses(getattr(torch_cpu, f"aoti_torch_get_{name}") for name in TORCH),
        (ctypes.py_object * len(names))(*names),
    )
    return loaded


def _empty(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor on any device, its elements not set."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _addresses(functions: Any) -> Any:
    """Return an array of the addresses of functions."""
    values = [ctypes.cast(function, ctypes.c_void_p) for function in functions]
    return (ctypes.c_void_p * len(values))(*values)


def _reads_as_torch(loaded: ctypes.PyDLL) -> bool:
    """Return True where the library reads the sizes and strides that torch has."""
    tensors = torch.empty(()), torch.empty(0, 3), torch.empty(2, 3, 5).transpose(0, 2)
    out = (ctypes.c_int64 * 20)()
    for each in tensors:
        facts = [each.dim(), *each.shape, *each.stride()]
        if not loaded.fusedops_read(each, out) or list(out[: len(facts)]) != facts:
            return False
    return True
