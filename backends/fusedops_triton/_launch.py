"""What every launcher of this backend needs: the right device, and how many warps a program gets.

No autotuning: the settings follow from the width of a row and the size of an element by the rules below, so the first
call is not slower than the rest, the result does not depend on what was timed, and a reader can check each number.
"""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

#: Lanes of a warp: 64 on AMD's CDNA, 32 on NVIDIA. On RDNA, where a wave has 32, programs get half the threads they
#: could have: slower, still right.
LANES = 32 if torch.version.hip is None else 64

#: A program may not have more threads: the limit of a CUDA block and of a HIP workgroup.
MAX_THREADS = 1024

#: Launch options of every kernel. a * b + c in one instruction, with one rounding, is the default of Triton up to 3.9,
#: which warns that 3.10 will have another. Said here, results stay what they are and users see no warning.
OPTIONS = {"enable_fp_fusion": True}

_NO_SWITCH = nullcontext()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which a launch goes to the device of ``tensor``.

    Triton launches on the current device, whatever the tensors' own. Asking for the current one costs 0.3 us, switching
    several: so nothing is switched where nothing need be. On a CPU (the interpreter) there is nothing to switch.
    """
    if tensor.is_cuda and tensor.get_device() != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return _NO_SWITCH


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n`` (``n`` >= 1). Triton's blocks have no other sizes."""
    return 1 << (n - 1).bit_length()


def warps_for(elements: int, each: int) -> int:
    """Warps for a program of ``elements`` elements (a power of two) with ``each`` of them in every thread."""
    threads = min(max(elements // each, LANES), MAX_THREADS)
    return threads // LANES


def scalar_for(value: float, dtype: torch.dtype) -> float | int:
    """``value`` as a kernel argument that does not lose precision.

    Triton makes a Python float a float32 argument. That is what the float16, bfloat16 and float32 kernels want; the
    float64 kernels take the 64 bits of the double as an integer instead, and cast them back. The
    other ways are worse: an argument annotated as float64 puts float64 instructions in every kernel, a constexpr
    compiles anew for each value, a one-element tensor is a copy to the device.
    """
    return struct.unpack("<q", struct.pack("<d", value))[0] if dtype == torch.float64 else float(value)
