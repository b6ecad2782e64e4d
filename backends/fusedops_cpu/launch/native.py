"""Launchers that remember the calls they made (``src/launch.cpp``): the part of the library that reads Python objects.

It declares functions of Python and torch by hand, so that one file serves every version of both; docs/cpu.md has what
that saves. Where it cannot be used, as on a Python without the global interpreter lock, each launcher runs at each
call.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fusedops_cpu._torch import empty_strided_cpu
from fusedops_cpu.launch.library import library_path, torch_library
from fusedops_cpu.launch.struct_call import LibraryCall

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


def remembering(launcher: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function of the launcher's arguments that runs the call it returns, and remembers it.

    Args:
        launcher: returns a ``LibraryCall``, or the results.

    Returns:
        None where calls are not remembered here, see :func:`loaded`.
    """
    library = loaded()
    return None if isinstance(library, str) else library.fusedops_launcher(launcher, LibraryCall)


@cache
def loaded() -> ctypes.PyDLL | str:
    """Load the library, once; or return why calls are not remembered here."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it needs CPython with the global interpreter lock"
    try:
        library = _set_up(ctypes.PyDLL(str(library_path())))
    except (OSError, AttributeError) as error:  # AttributeError: of another version than this torch
        return f"the compiled library does not load: {error}"
    return library if _reads_as_torch(library) else "the compiled library does not read tensors as this torch"


def _set_up(library: ctypes.PyDLL) -> ctypes.PyDLL:
    torch_cpu = torch_library()
    library.fusedops_read.argtypes = [ctypes.py_object, ctypes.c_void_p]
    library.fusedops_launcher.argtypes = [ctypes.py_object, ctypes.py_object]
    library.fusedops_launcher.restype = ctypes.py_object
    functions = torch.Tensor.is_neg, _empty, empty_strided_cpu()
    names: list[Any] = [None, False, *_TYPES, *map(sys.intern, _ATTRIBUTES), *functions, *_VALUES]
    _kept.extend(names)
    library.fusedops_set_up_launchers(
        _addresses(getattr(ctypes.pythonapi, name) for name in PYTHON),
        _addresses(getattr(torch_cpu, f"aoti_torch_get_{name}") for name in TORCH),
        (ctypes.py_object * len(names))(*names),
    )
    return library


def _empty(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor on any device, its elements not set."""
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _addresses(functions: Any) -> Any:
    """Return an array of the addresses of functions."""
    values = [ctypes.cast(function, ctypes.c_void_p) for function in functions]
    return (ctypes.c_void_p * len(values))(*values)


def _reads_as_torch(library: ctypes.PyDLL) -> bool:
    """Return True where the library reads the sizes and strides that torch has."""
    tensors = torch.empty(()), torch.empty(0, 3), torch.empty(2, 3, 5).transpose(0, 2)
    out = (ctypes.c_int64 * 20)()
    for each in tensors:
        facts = [each.dim(), *each.shape, *each.stride()]
        if not library.fusedops_read(each, out) or list(out[: len(facts)]) != facts:
            return False
    return True
