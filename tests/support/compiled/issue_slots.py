"""A model of how much of an sm_90 multiprocessor's issue capacity a compiled kernel needs at copy speed.

A kernel that is bound by memory reaches the speed of a copy only if its instructions are issued faster than its bytes
arrive. Copy speed of an H200, 4.3 TB/s over 132 multiprocessors at 1.98 GHz, is 16.5 bytes a clock. In a clock, a
multiprocessor issues the instructions of 4 warps. ``issue`` is the time that the instructions of a program take to
issue, divided by the time that its bytes take. It is a model, not a measurement: kernels of Liger, compiled, have an
issue of 130, 80, 55 and 43 % where the H100 plot of QuACK shows them at 41, 69, 89 and 96 % of copy speed.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from assembly import TOOLS, resources

BYTES_PER_CLOCK = 4.3e12 / 132 / 1.98e9
INSTRUCTION = 16  # bytes
REGISTERS, WARPS, PROGRAMS, SHARED = 65536, 64, 32, 228 * 1024  # of a multiprocessor


class Cost(NamedTuple):
    """The cost of one compiled kernel."""

    issue: float  # percent of the time that the bytes take
    instructions: float  # that a warp issues
    registers: int  # of a thread
    spilled: int  # bytes of a thread
    threads: float  # percent of the 2048 threads of a multiprocessor that are resident
    loops: bool  # the kernel has a loop on its way


class Instruction(NamedTuple):
    """An instruction of a listing."""

    address: int
    predicated: bool
    opcode: str
    target: int | None


def listings(cubins: Sequence[bytes]) -> list[list[Instruction]]:
    """Return the instructions of each kernel. Kernels of one target share a process: nvdisasm takes 0.3 s to start."""
    kernels: dict[str, list[int]] = {}  # by target
    machine_code: list[bytes] = []
    for at, cubin in enumerate(cubins):
        target, code = _machine_code(cubin)
        kernels.setdefault(target, []).append(at)
        machine_code.append(code)
    found: list[list[Instruction]] = [[] for _ in cubins]
    for target, each in kernels.items():
        code = b"".join(machine_code[at] for at in each)
        listing = _listing(_disassembled(code, target))
        assert INSTRUCTION * len(listing) == len(code), (target, len(listing), len(code))
        instructions = iter(listing)
        for at in each:
            found[at] = list(itertools.islice(instructions, len(machine_code[at]) // INSTRUCTION))
    return found


def cost(cubin: bytes, listing: list[Instruction], nbytes: float, warps: int, shared: int, steps: int) -> Cost:
    """Return the cost of a kernel.

    Args:
        cubin: compiled for sm_90 or sm_100.
        listing: of it, by ``listings``.
        nbytes: that one program must load and store.
        warps: of a program.
        shared: bytes of shared memory of a program.
        steps: trips of its loops.
    """
    used = resources(cubin)
    instructions, loops = _issued(listing, steps)
    clocks = instructions * warps / 4
    threads = _resident(used["REG"], warps, shared) * warps / WARPS
    issue, spilled = 100 * clocks * BYTES_PER_CLOCK / nbytes, used["STACK"] + used["LOCAL"]
    return Cost(issue, instructions, used["REG"], spilled, 100 * threads, loops)


def _machine_code(cubin: bytes) -> tuple[str, bytes]:
    """Return the target as nvdisasm has it, SM90a, and the instructions."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        subprocess.run([TOOLS / "cuobjdump", "-xtext", "all", path], cwd=folder, capture_output=True, check=True)
        (text,) = Path(folder).glob("*.elf.bin")
        return text.name.split(".")[-3].replace("sm_", "SM"), text.read_bytes()


def _disassembled(code: bytes, target: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = [TOOLS / "nvdisasm", "--binary", target, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resident(registers: int, warps: int, shared: int) -> int:
    """Return the number of programs that a multiprocessor holds. Registers are allocated in 256 a warp, 4 warps."""
    warps_by_registers = REGISTERS // (math.ceil(registers / 8) * 256) // 4 * 4
    return max(1, min(WARPS // warps, PROGRAMS, warps_by_registers // warps, SHARED // (shared + 1024)))


def _listing(sass: str) -> list[Instruction]:
    found: list[Instruction] = []
    for address, predicate, opcode, operands in re.findall(
        r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", sass, re.MULTILINE
    ):
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
        conditional = bool(predicate) or bool(target and "P" in operands)  # BRA.U UP0, 0x..., BRA !UP0, ...
        found.append(Instruction(int(address, 16), conditional, opcode, int(target[1], 16) if target else None))
    return found


def _issued(listing: list[Instruction], steps: int) -> tuple[float, bool]:
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


def _successors(listing: list[Instruction], at: int, index: dict[int, int]) -> list[int]:
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
