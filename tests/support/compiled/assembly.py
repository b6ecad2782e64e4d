"""Facts of compiled Triton kernels, read off their assembly: registers, spills, the widths of accesses."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton

#: The folder of cuobjdump.
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def of_cuda(ptx: str, cubin: bytes) -> dict[str, Any]:
    """Return the facts of a kernel of an NVIDIA GPU."""
    code = re.sub(r"//.*", "", ptx)  # comments name files, and might hold anything
    used = resources(cubin)
    factors = re.findall(r"\bwgmma\.mma_async\S+\s+\{[^}]*\}\s*,\s*(\{|%)", code)
    return {
        "registers": used["REG"],
        "spilled": used["STACK"] + used["LOCAL"],  # these kernels have no arrays: what is on the stack was spilled
        "wgmma": len(factors),
        "wgmma_of_registers": factors.count("{"),  # the first factor is in registers, not in memory on the chip
        "loads": _widths(code, "ld"),
        "stores": _widths(code, "st"),
        "reads_first": code.rfind("ld.global") < code.find("st.global"),
        "float64": bool(re.search(r"\.f64\b", code)),
        "address_64": bool(re.search(r"\b(?:mul\.lo\.s64|mad\.lo\.s64|mul\.wide)", code)),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Return REG, STACK and LOCAL of a kernel of an NVIDIA GPU: registers, and bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}


def instructions(cubin: bytes) -> int:
    """Return the instructions of the longest loop of a kernel of an NVIDIA GPU, of all of it where it has none."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-sass", file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)]
    step = lines[1][0] - lines[0][0]
    jumps = [(at, int(to[1], 16)) for at, text in lines if (to := re.search(r"\bBRA (?:\S+, )?(0x[0-9a-f]+)", text))]
    loops = [(at - to) // step + 1 for at, to in jumps if to < at]
    # behind the code: a jump to itself, and nothing
    return max(loops, default=sum(not text.startswith("NOP") for _, text in lines) - 1)


def chained_products(ttir: str) -> int:
    """Count the products that are added to the result of another product."""
    results: set[str] = set()
    count = 0
    for name, value in re.findall(r"^\s*(%[\w#]+)\S* = (.*)$", ttir, re.MULTILINE):
        product = re.match(r"tt\.dot %\S+, %\S+, (%[\w#]+)", value)
        count += product is not None and product[1] in results
        # another branch may have the name again
        (results.discard if product is None else results.add)(name)
    return count


def _widths(code: str, which: str) -> dict[str, int]:
    """Count the accesses of global memory by width in bytes."""
    found: dict[str, int] = {}
    for vector, bits in re.findall(rf"\b{which}\.global(?:\.\w+|::\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\b", code):
        width = str(int(vector or 1) * int(bits) // 8)
        found[width] = found.get(width, 0) + 1
    return found


def of_amdgcn(code: str) -> dict[str, Any]:
    """Return the facts of a kernel of an AMD GPU."""

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", code)
        assert found is not None, key
        return int(found[1])

    def widths(which: str) -> dict[str, int]:
        bytes_of = {"x4": 16, "x3": 12, "x2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "byte": 1}
        found: dict[str, int] = {}
        for name in re.findall(
            rf"\b(?:global|buffer)_{which}_(?:dword(?=x))?(x\d|dword|ushort|short|ubyte|byte)", code
        ):
            width = str(bytes_of[name])
            found[width] = found.get(width, 0) + 1
        return found

    return {
        "registers": number("vgpr_count"),
        "spilled": 4 * number("vgpr_spill_count"),  # scalar registers spill into lanes of vector ones, not to memory
        "loads": widths("load"),
        "stores": widths("store"),
        "float64": bool(re.search(r"\bv_\w+_f64\b", code)),
        "address_64": True,
    }
