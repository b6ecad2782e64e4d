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
#: A warp's part of a product of a warp group on the tensor cores of sm_90: of 64 rows by N columns by K. K is 32 bytes.
TENSOR = re.compile(r"HGMMA\.64x(\d+)x\d+")
#: Columns that the tensor cores of a multiprocessor have in a clock, of 16 rows and 32 bytes: 2048 products of 16 bits
#: and their sums, 1024 of TF32. So 132 multiprocessors have the 989 TFLOP/s of NVIDIA's data sheet at 1.83 GHz.
TENSOR_COLUMNS = 8
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
    products: float  # clocks of a multiprocessor's tensor cores for a program
    loaded: float  # bytes that a program loads, from the caches where others have loaded them
    copied: float  # of these to shared memory, without waiting for them


class Way(NamedTuple):
    """The sums over the instructions of a warp on a way, in the order in which ways are compared."""

    instructions: float
    products: float  # clocks of the tensor cores
    loaded: float  # bytes
    copied: float  # bytes


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


def cost(
    cubin: bytes, listing: list[Instruction], nbytes: float, warps: int, shared: int, steps: int | Sequence[int]
) -> Cost:
    """Return the cost of a kernel.

    Args:
        cubin: compiled for sm_90 or sm_100.
        listing: of it, by ``listings``.
        nbytes: that one program must load and store.
        warps: of a program.
        shared: bytes of shared memory of a program.
        steps: trips of its loops: of all of them, or of each in the order of their addresses. The way goes through all
            loops if it is not 1.
    """
    used = resources(cubin)
    way, loops = _issued(listing, steps)
    instructions, clocks = way.instructions, way.instructions * warps / 4
    threads = _resident(used["REG"], warps, shared) * warps / WARPS
    issue, spilled = 100 * clocks * BYTES_PER_CLOCK / nbytes, used["STACK"] + used["LOCAL"]
    rest = (each * warps for each in way[1:])
    return Cost(issue, instructions, used["REG"], spilled, 100 * threads, loops, *rest)


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
        r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)([^;]*);", sass, re.MULTILINE
    ):
        target = re.search(r"0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
        conditional = bool(predicate) or bool(target and "P" in operands)  # BRA.U UP0, 0x..., BRA !UP0, ...
        found.append(Instruction(int(address, 16), conditional, opcode, int(target[1], 16) if target else None))
    return found


def _issued(listing: list[Instruction], steps: int | Sequence[int]) -> tuple[Way, bool]:
    """Return the sums over the shortest way to the end that passes by no loop: rare cases take longer ways.

    Beside them, True if it goes through a loop.
    """
    index = {instruction.address: at for at, instruction in enumerate(listing)}
    ways = [_successors(listing, at, index) for at in range(len(listing))]
    order, back = _order(ways)
    forward = [[to for to in each if (at, to) not in back] for at, each in enumerate(ways)]
    heads = sorted({head for _, head in back})
    bodies = [{at for source, to in back if to == head for at in _body(ways, source, head)} for head in heads]
    trips = _trips(len(listing), bodies, steps)
    left: dict[int, Way] = {}
    loops: dict[int, frozenset[int]] = {}  # the loops on the way from an instruction to the end
    for at in order:
        most = max((len(loops[to]) for to in forward[at]), default=0) if steps != 1 else 0
        longest = [to for to in forward[at] if steps == 1 or len(loops[to]) == most]
        own, rest = _sums(listing[at].opcode), min((left[to] for to in longest), default=Way(0, 0, 0, 0))
        left[at] = Way(*(trips[at] * one + other for one, other in zip(own, rest, strict=True)))
        loops[at] = frozenset().union(*(loops[to] for to in longest)) | ({at} & {*heads})
    return left[0], bool(loops[0])


def _trips(count: int, bodies: Sequence[set[int]], steps: int | Sequence[int]) -> list[int]:
    """Return how often each of ``count`` instructions is issued: once for each trip of the loops around it."""
    if isinstance(steps, int):
        repeated = {at for body in bodies for at in body}
        return [steps if at in repeated else 1 for at in range(count)]
    assert len(steps) == len(bodies), f"got {len(bodies)} loops, expected {len(steps)}, whose trips a case has"
    return [math.prod(n for n, body in zip(steps, bodies, strict=True) if at in body) for at in range(count)]


def _sums(opcode: str) -> Way:
    """Return what an instruction of a warp adds to the sums."""
    tensor, loaded = TENSOR.match(opcode), 0
    if opcode.startswith("LDG"):
        width = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
        loaded = 32 * (int(width[1]) if width else 32) // 8
    copied = loaded if opcode.startswith("LDGSTS") else 0
    return Way(opcode != "NOP", int(tensor[1]) / TENSOR_COLUMNS if tensor else 0, loaded, copied)


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
