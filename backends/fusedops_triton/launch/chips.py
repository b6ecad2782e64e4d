"""The chips, as data: what launch settings (``settings.py``) follow from, and which chip a process has."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Chip(NamedTuple):
    """The properties of a chip that settings depend on. A processor is a multiprocessor (NVIDIA) or a CU (AMD)."""

    nvidia: bool
    lanes: int  # threads of a warp (NVIDIA) or a wave (AMD): a program has at least one
    threads: int  # maximum threads of a program, of a CUDA block or a HIP workgroup: the widest row on chip
    resident: int  # maximum threads of a processor
    registers: int  # of 32 bits, of a processor: with ``resident``, how many a thread may take
    shared: int  # bytes of shared memory of a processor: the reductions of a kernel take at most 16 KB
    processors: int  # how many programs fill the chip

    @property
    def fills(self) -> int:
        """Programs that fill the chip: at least three for each processor, a power of two, so that the sums of a bias's
        gradient have the same order, and the same bits, on every NVIDIA chip below.
        """
        return 1 << (3 * self.processors - 1).bit_length()


#: The chips that the tests compile the kernels for, by compilation target, from their vendors' data sheets. With 1024
#: threads, an NVIDIA thread has 64 registers on each of them. A lane of gfx942 has 128, so rows of twice the width
#: would fit there; this was not measured, so it is not used. Chips with another number of processors take
#: the same settings: an H100 PCIe has 114, an MI300A 228. On RDNA, where a wave has 32 lanes, programs get half the
#: possible threads: slower, with the same results.
CHIPS = {
    "sm_80": Chip(True, 32, 1024, 2048, 65536, 164 * 1024, 108),  # A100
    "sm_90": Chip(True, 32, 1024, 2048, 65536, 228 * 1024, 132),  # H100 and H200: the same chip, other memory
    "sm_100": Chip(True, 32, 1024, 2048, 65536, 228 * 1024, 148),  # B200
    "gfx942": Chip(False, 64, 1024, 2048, 131072, 64 * 1024, 304),  # MI300X
}


def target_of(capability: tuple[int, int] | None) -> str:
    """Return the entry of CHIPS for an NVIDIA compute capability; None is an AMD GPU.

    A capability without an entry takes the one of the next older chip. 12.x has the memory on chip of 8.6, 99 KB, and
    tensor cores that take operands from registers, as those of sm_80.
    """
    if capability is None:
        return "gfx942"
    if capability < (9, 0) or capability >= (12, 0):
        return "sm_80"
    return "sm_90" if capability < (10, 0) else "sm_100"


def this_target() -> str:
    """Return the target of this process. Where no CUDA context exists, as in the interpreter, sm_90."""
    if torch.version.hip is not None:
        return target_of(None)
    return target_of(torch.cuda.get_device_capability() if torch.cuda.is_initialized() else (9, 0))
