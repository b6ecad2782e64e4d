"""Products of 32 bits that do not fit in them, found in the Triton IR of a launch by the bounds of its integers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Bounds = tuple[int, int]

_VALUE = r"%[\w#]+"
_STATEMENT = re.compile(rf"\s*({_VALUE}) = ([\w.]+) (.*) loc\(")
_LOOP = re.compile(rf"\s*(?:{_VALUE}(?::\d+)? = )?scf\.for (?:unsigned )?({_VALUE}) = ({_VALUE}) to ({_VALUE}) step")
_CARRIED = re.compile(rf"({_VALUE}) = ({_VALUE})")
_CONSTANT = re.compile(r"(?:dense<)?(-?\d+)>? : (?:tensor<[\dx]+x)?i\d+")
_RANGE = re.compile(r"\{end = (\d+) : i32, start = (\d+) : i32\}")
#: Operations that have the values of their operands.
_SAME = ("extsi", "splat", "expand_dims", "broadcast", "reshape", "trans", "trunci", "convert_layout")
#: The bounds of an operation lie among its values for the bounds of its operands.
_AT_CORNERS = {
    "muli": lambda a, b: a * b,
    "addi": lambda a, b: a + b,
    "subi": lambda a, b: a - b,
    "divsi": lambda a, b: abs(a) // b * (1 if a > 0 else -1),
    "minsi": min,
    "maxsi": max,
}


def overflows(ttir: str, arguments: Sequence[int | None], grid: tuple[int, ...]) -> list[str]:
    """Return the products of 32 bits that may be 2**31 and more, and that an address depends on.

    A value that depends on memory has no bounds, nor has one that a loop changes: products of these are not judged.

    Args:
        ttir: of one kernel.
        arguments: of the compiled function in its order: integers, or None for what is none.
        grid: of the launch.
    """
    function = ttir.index("tt.func")
    names = re.findall(rf"({_VALUE}): [^ ,)]+", ttir[function : ttir.index("\n", function)])
    known: dict[str, Bounds] = {
        name: (value, value) for name, value in zip(names, arguments, strict=True) if value is not None
    }
    wrapped: dict[str, str] = {}  # by value: the product in it
    found: dict[str, None] = {}
    for line in ttir[function:].splitlines():
        if loop := _LOOP.match(line):
            induction, first, end = loop.groups()
            if first in known and end in known:
                known[induction] = (known[first][0], max(known[end][1] - 1, known[first][0]))
            wrapped |= {name: wrapped[value] for name, value in _CARRIED.findall(line) if value in wrapped}
        statement = _STATEMENT.match(line)
        if statement is None:
            continue
        name, operation, rest = statement.groups()
        products = [wrapped[operand] for operand in re.findall(_VALUE, rest) if operand in wrapped]
        if products:
            wrapped[name] = products[0]
        if operation == "tt.addptr":
            found |= dict.fromkeys(products)
        bounds = _bounds(operation.rpartition(".")[2], rest, known, grid)
        if bounds is None:
            continue
        narrow = re.fullmatch(r"(?:tensor<[\dx]+x)?i32>?", rest.rpartition(" ")[2])
        if not narrow or -(2**31) <= bounds[0] <= bounds[1] < 2**31:
            known[name] = bounds
        elif operation == "arith.muli":
            wrapped[name] = f"{name} = {operation} {rest}"
    return [*found]


def _bounds(operation: str, rest: str, known: Mapping[str, Bounds], grid: tuple[int, ...]) -> Bounds | None:
    """Return the bounds of a statement's value, or None."""
    if operation == "constant":
        constant = _CONSTANT.match(rest)
        return None if constant is None else (int(constant[1]), int(constant[1]))
    if operation == "get_program_id":
        return 0, (*grid, 1, 1)["xyz".index(rest[0])] - 1
    if operation == "make_range" and (ends := _RANGE.match(rest)):
        return int(ends[2]), int(ends[1]) - 1
    operands = [known.get(operand) for operand in re.findall(_VALUE, rest)]
    if operation == "select":
        operands = operands[1:]
    if not operands or None in operands:
        return None
    (low, high), *others = [bounds for bounds in operands if bounds is not None]
    if operation in _SAME or (operation == "extui" and low >= 0):
        return low, high
    if len(others) != 1:
        return None
    ((other_low, other_high),) = others
    if operation == "select":
        return min(low, other_low), max(high, other_high)
    if operation == "remsi" and low >= 0 and other_low > 0:
        return 0, min(high, other_high - 1)
    if operation not in _AT_CORNERS or (operation == "divsi" and other_low <= 0):
        return None
    corners = [_AT_CORNERS[operation](a, b) for a in (low, high) for b in (other_low, other_high)]
    return min(corners), max(corners)
