"""A model of how much of an sm_90 multiprocessor's issue capacity a compiled kernel needs at copy speed.

A kernel that is bound by memory reaches the speed of a copy only if its instructions are issued faster than its bytes
arrive. Copy speed of an H200, 4.3 TB/s over 132 multiprocessors at 1.98 GHz, is 16.5 bytes a clock. In a clock, a
multiprocessor issues the instructions of 4 warps. ``issue`` is the time that the instructions of a program take to
issue, divided by the time that its bytes take. It is a model, not a measurement: kernels of Liger, compiled, have an
issue of 130, 80, 55 and 43 % where the H100 plot of QuACK shows them at 41, 69, 89 and 96 % of copy speed.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

BYTES_PER_CLOCK = 4.3e12 / 132 / 1.98e9
REGISTERS, WARPS, PROGRAMS, SHARED = 65536, 64, 32, 228 * 1024  # of a multiprocessor


class Cost(NamedTuple):
    """The cost of one compiled kernel."""

    issue: float  # percent of the time that the bytes take
    instructions: float  # that a warp issues
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    threads: float  # percent of the 2048 threads of a multiprocessor that are resident
    loops: bool  # the kernel has a loop on its way


class _Instruction(NamedTuple):
    address: int
    predicated: bool
    opcode: str
    target: int | None


def cost(cubin: bytes, nbytes: float, warps: int, shared: int, steps: int) -> Cost:
    """Return the cost of a kernel.

    Args:
        cubin: compiled for sm_90.
        nbytes: that one program must load and store.
        warps: of a program.
        shared: bytes of shared memory of a program.
        steps: trips of its loops.
    """
    usage, sass = _dump(cubin, "-res-usage"), _dump(cubin, "-sass")
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    instructions, loops = _issued(_listing(sass), steps)
    clocks = instructions * warps / 4
    threads = _resident(used["REG"], warps, shared) * warps / WARPS
    issue, spilled = 100 * clocks * BYTES_PER_CLOCK / nbytes, used["STACK"] + used["LOCAL"]
    return Cost(issue, instructions, used["REG"], spilled, 100 * threads, loops)


def _dump(cubin: bytes, flag: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout


def _resident(registers: int, warps: int, shared: int) -> int:
    """Return the number of programs that a multiprocessor holds. Registers are allocated in 256 a warp, 4 warps."""
    warps_by_registers = REGISTERS // (math.ceil(registers / 8) * 256) // 4 * 4
    return max(1, min(WARPS // warps, PROGRAMS, warps_by_registers // warps, SHARED // (shared + 1024)))


def _listing(sass: str) -> list[_Instruction]:
    found: list[_Instruction] = []
    for address, predicate, opcode, operands in re.findall(
        r"^\s+/\*([0-9a-f]{4,5})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", sass, re.MULTILINE
    ):
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
        conditional = bool(predicate) or bool(target and "P" in operands)  # BRA.U UP0, 0x..., BRA !UP0, ...
        found.append(_Instruction(int(address, 16), conditional, opcode, int(target[1], 16) if target else None))
    return found


def _issued(listing: list[_Instruction], steps: int) -> tuple[float, bool]:
    """Return the instructions of the shortest way to the end that passes by no loop: rare cases take longer ways.

    Beside them, True if it goes through a loop.
    """
    index = {instruction.address: at for at, instruction in enumerate(listing)}
    ways = [_successors(listing, at, index) for at in range(len(listing))]
    order, back = _order(ways)
    forward = [[to for to in each if (at, to) not in back] for at, each in enumerate(ways)]
    repeated = {at for source, head in back for at in _body(ways, source, head)}
    heads = {head for _, head in back}
    left: dict[int, float] = {}
    loops: dict[int, frozenset[int]] = {}  # the loops on the way from an instruction to the end
    for at in order:
        most = max((len(loops[to]) for to in forward[at]), default=0) if steps > 1 else 0
        longest = [to for to in forward[at] if steps == 1 or len(loops[to]) == most]
        weight = 0 if listing[at].opcode == "NOP" else steps if at in repeated else 1
        left[at] = weight + min((left[to] for to in longest), default=0)
        loops[at] = frozenset().union(*(loops[to] for to in longest)) | ({at} & heads)
    return left[0], bool(loops[0])


def _successors(listing: list[_Instruction], at: int, index: dict[int, int]) -> list[int]:
    instruction = listing[at]
    following = [at + 1] if at + 1 < len(listing) else []
    if instruction.opcode.startswith(("EXIT", "RET")):
        return following if instruction.predicated else []
    if instruction.target is None:
        return following
    return [index[instruction.target], *(following if instruction.predicated else [])]


def _order(ways: list[list[int]]) -> tuple[list[int], set[tuple[int, int]]]:
    """Return the instructions with each after those that follow it, and the branches back to the start of a loop."""
    order: list[int] = []
    back: set[tuple[int, int]] = set()
    path, seen, stack = {0}, {0}, [(0, iter(ways[0]))]
    while stack:
        at, rest = stack[-1]
        to = next(rest, None)
        if to is None:
            order.append(at)
            path.discard(at)
            stack.pop()
        elif to in path:
            back.add((at, to))
        elif to not in seen:
            seen.add(to)
            path.add(to)
            stack.append((to, iter(ways[to])))
    return order, back


def _body(ways: list[list[int]], source: int, head: int) -> set[int]:
    """Return the instructions of a loop from ``head`` to the branch ``source``."""
    before: dict[int, list[int]] = {}
    for at, each in enumerate(ways):
        for to in each:
            before.setdefault(to, []).append(at)
    body, stack = {head}, [source]
    while stack:
        at = stack.pop()
        if at not in body:
            body.add(at)
            stack += before.get(at, [])
    return body
