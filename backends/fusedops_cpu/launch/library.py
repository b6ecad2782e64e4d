"""The compiled library: its file, its functions, and the layout of their arguments.

Each function takes the address of one struct of 8-byte fields, which ``src/api.h`` declares. The GIL is released for
the time of the call.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError
from fusedops_cpu.launch.struct_call import LibraryFunction, library_function
from fusedops_cpu.launch.structs import kinds_of_functions, number_of_header

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: As ``src/api.h`` has them.
ACTIVATION_CODES = {
    **{"swiglu": 0, "geglu_tanh": 1, "geglu": 2},
    **{"silu": 3, "gelu_tanh": 4, "gelu": 5, "relu": 6, "relu2": 7},
}

MAX_DIMS = 16  # of a masked softmax

_SUFFIXES = {"win32": "dll", "darwin": "dylib"}
_TORCH_LIBRARIES = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}
_X86_LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}


class Library:
    """The functions of one library file, by their names in ``src/api.h`` without ``fusedops_``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        loaded = ctypes.CDLL(str(path))
        torch_cpu = torch_library()
        loaded.fusedops_use_threads(
            ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p),
            ctypes.cast(torch_cpu.torch_get_num_threads, ctypes.c_void_p),
        )
        header = (Path(__file__).parents[1] / "src" / "api.h").read_text("utf-8")
        loaded.fusedops_header.restype = ctypes.c_int64
        if loaded.fusedops_header() != number_of_header(header):
            raise OSError(f"{path.name} was compiled with another src/api.h than the one beside it")
        kinds = kinds_of_functions(header)
        self.multiplies_bfloat16 = bool(loaded.fusedops_multiplies_bfloat16())
        # measured on AMD's processors alone
        self.is_ahead_of_mkl = bool(loaded.fusedops_is_amd()) and torch.backends.mkl.is_available()

        def function(name: str, after: int = 0) -> LibraryFunction:
            return library_function(getattr(loaded, f"fusedops_{name}"), kinds[name] + b"q" * after, failure)

        # by the number of sizes and strides after the struct
        self.softmax_forward = [function("softmax_forward", after) for after in range(3 * MAX_DIMS + 1)]
        for name in kinds.keys() - {"softmax_forward"}:
            setattr(self, name, function(name))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> LibraryFunction: ...


def torch_library() -> ctypes.CDLL:
    """Return torch's own library, which exports its thread pool and its C functions of tensors."""
    folder = Path(torch.__file__).parent / "lib"
    return ctypes.CDLL(str(folder / _TORCH_LIBRARIES.get(sys.platform, "libtorch_cpu.so")))


def library_path() -> Path:
    """Return the file for this processor, by torch's CPU capability (``ATEN_CPU_CAPABILITY`` lowers it)."""
    machine = platform.machine().lower()
    level = {"amd64": "x86-64", "arm64": "aarch64"}.get(machine, machine.replace("_", "-"))
    if level == "x86-64":
        level = _X86_LEVELS.get(torch.backends.cpu.get_cpu_capability(), "x86-64-v2")
    return Path(__file__).parents[1] / f"libfusedops_cpu-{level}.{_SUFFIXES.get(sys.platform, 'so')}"


@cache
def library() -> Library:
    """Load the library, once.

    Raises:
        OSError: there is no library for this processor, it does not load, or it was compiled with another header.
        AttributeError: torch does not export its thread pool (before 2.10), or the library has no number of a header.
    """
    return Library(library_path())


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a contiguous copy where its memory does not hold its values in order."""
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.resolve_neg().contiguous()


def failure(status: int) -> Exception:
    """Return the exception for a status other than 0."""
    if status == 1:
        return MemoryError("fusedops_cpu: no memory for a temporary buffer")
    if status == 3:
        return InvalidInputError(
            "fusedops_cpu: got a target that is no class, expected one in [0, classes); to fix: pass the number that "
            "marks targets to leave out as ignore_index"
        )
    if status == 4:
        return InvalidInputError(
            "fusedops_cpu: got a page in block_table that is none of the cache, expected pages in [0, pages); to fix: "
            "pass the pages of the keys that seqused_k counts"
        )
    if status == 5:
        return InvalidInputError(
            "fusedops_cpu: got a slot that is none of the cache, expected -1, or from 0 to pages * size - 1; to fix: "
            "pass page * size + offset of each token"
        )
    if status == 6:
        return InvalidInputError(
            "fusedops_cpu: got indices of which one is no key, expected -1, or from 0 to Sk - 1; to fix: pass the "
            "indices of keys, as fusedops.select_keys returns them"
        )
    return InvalidInputError(
        "fusedops_cpu: got a tensor without memory, or shapes that do not fit each other, expected tensors with memory "
        "and the shapes of one call; to fix: pass tensors whose storage was not freed"
    )
