"""The compiled library: its file, its functions, and the layout of their arguments.

Each function takes the address of one struct of 8-byte fields, packed here into bytes (``src/api.h`` declares the
structs). With ctypes such a call costs 0.3 us, masked softmax with its shapes 0.4 us; one argument for each field costs
1.2 us and 2.3 us (2 cores of Zen 4, Python 3.11). ctypes releases the GIL for the time of the call.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError

Function = Callable[[bytes], int]

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

MAX_DIMS = 16
# SoftmaxForward for 0 to 3 * MAX_DIMS sizes and strides after it; the index is their number
SOFTMAX_FORWARD = [Struct(f"3P5qd2q{count}q").pack for count in range(3 * MAX_DIMS + 1)]
SOFTMAX_BACKWARD = Struct("3P5qd").pack
GELU_FORWARD = Struct("3P4q").pack
GELU_BACKWARD = Struct("5P4q").pack
DROPOUT_FORWARD = Struct("5P4qd").pack
DROPOUT_BACKWARD = Struct("4P4qd").pack
NORM_FORWARD = Struct("8P6q2d").pack
NORM_BACKWARD = Struct("10P5qd").pack
GATED_FORWARD = Struct("3P6q3d").pack
GATED_BACKWARD = Struct("5P7q3d").pack
CROSS_ENTROPY_FORWARD = Struct("4P8q4d").pack
CROSS_ENTROPY_BACKWARD = Struct("5P8q4d").pack
ROTARY = Struct("2P11qd2P8q2P8q").pack

_SUFFIXES = {"win32": "dll", "darwin": "dylib"}
_TORCH_LIBRARIES = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}
_X86_LEVELS = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}


class Library:
    """The functions of one library file; each takes a packed struct and returns a status, 0 for success."""

    def __init__(self, path: Path) -> None:
        self.path = path
        loaded = ctypes.CDLL(str(path))
        torch_cpu = ctypes.CDLL(
            str(Path(torch.__file__).parent / "lib" / _TORCH_LIBRARIES.get(sys.platform, "libtorch_cpu.so"))
        )
        loaded.fusedops_use_threads(
            ctypes.cast(torch_cpu.torch_parallel_for, ctypes.c_void_p),
            ctypes.cast(torch_cpu.torch_get_num_threads, ctypes.c_void_p),
        )

        def function(name: str) -> Function:
            exported = getattr(loaded, f"fusedops_{name}")
            exported.argtypes = [ctypes.c_char_p]
            return exported

        self.softmax_forward = function("softmax_forward")
        self.softmax_backward = function("softmax_backward")
        self.gelu_forward = function("gelu_forward")
        self.gelu_backward = function("gelu_backward")
        self.dropout_forward = function("dropout_forward")
        self.dropout_backward = function("dropout_backward")
        self.norm_forward = function("norm_forward")
        self.norm_backward = function("norm_backward")
        self.gated_forward = function("gated_forward")
        self.gated_backward = function("gated_backward")
        self.cross_entropy_forward = function("cross_entropy_forward")
        self.cross_entropy_backward = function("cross_entropy_backward")
        self.rotary = function("rotary")


def library_path() -> Path:
    """Return the file for this processor, by torch's CPU capability (``ATEN_CPU_CAPABILITY`` lowers it)."""
    machine = platform.machine().lower()
    level = {"amd64": "x86-64", "arm64": "aarch64"}.get(machine, machine.replace("_", "-"))
    if level == "x86-64":
        level = _X86_LEVELS.get(torch.backends.cpu.get_cpu_capability(), "x86-64-v2")
    return Path(__file__).parent / f"libfusedops_cpu-{level}.{_SUFFIXES.get(sys.platform, 'so')}"


@cache
def library() -> Library:
    """Load the library, once.

    Raises:
        OSError: there is no library for this processor, or it does not load.
        AttributeError: torch does not export its thread pool (before 2.10), or the library is of another version.
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
    return InvalidInputError(
        "fusedops_cpu: got a tensor without memory, or shapes that do not fit each other, expected tensors with memory "
        "and the shapes of one call; to fix: pass tensors whose storage was not freed"
    )
