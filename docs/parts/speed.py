"""The blocks of the pages that are made of the committed runs, benchmarks/results/: each number is of a file there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import headline, packed_linear, packed_peers, picture, report, shared_ops
from benchmarks.cpu_cases import CASES, limit

DOCS = Path(__file__).parents[1]
CPU = report.RESULTS / "cpu"
GPU = report.RESULTS / "nvidia-h200"
#: The run of the first table and of the picture, and the numbers of elements of the table's columns.
SHOWN = CPU / "sizes" / "tuned-2.jsonl"
COLUMNS = (2**10, 2**20, 2**25)
#: The run of the table of packed weights.
PACKED = CPU / "packed.jsonl"
DTYPE = "float32"
DIRECTIONS = ("forward", "backward")

SPEED_TABLE = """Columns 2 to 4: the time of plain torch divided by the time of the call, for COLUMNS elements;
bold: below SLOW, torch is faster. Last column: the fewest bytes that the op must move divided by its time, in percent
of the speed of `y.copy_(x)`, for LARGEST elements. MACHINE.
"""

PACKED_TABLE = """Torch's time for `linear` with the unpacked float32 weight divided by the time of
[quantized_linear](ops.md#quantized_linear); bold: below SLOW, torch is faster. A token of generation is one row, a
prompt is many. Medians of TURNS paired turns (`python -m benchmarks.packed_linear`). MACHINE.
"""

Rows = report.Rows


def by_call(rows: Rows) -> dict[tuple[str, str, str, str], dict[int, dict[str, Any]]]:
    """Return the records of the public call by op, form, direction and dtype, and by number of elements."""
    calls: dict[tuple[str, str, str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["provider"] == "fusedops":
            key = (row["op"], row["form"], row["direction"], row["dtype"])
            calls.setdefault(key, {})[row["elements"]] = row
    return calls


def shown_forms() -> dict[str, str]:
    """Return the form of each measured op that the first table has."""
    forms: dict[str, str] = {}
    for op, _, form in CASES:
        forms.setdefault(op, form)
    return forms


def percent(row: Mapping[str, Any]) -> float:
    """Return the fewest bytes of a call divided by its time, in percent of the speed of a copy."""
    dtype = getattr(torch, row["dtype"])
    return 100 * limit(row["op"], row["form"], row["elements"], dtype)[row["direction"]] / row["copies"]


def first_table(rows: Rows) -> Iterator[str]:
    """Yield the table of the speed-up of each op at a few sizes, and of its speed against a copy."""
    calls = by_call(rows)
    yield f"| op | {' | '.join(map(report.size_name, COLUMNS))} | % of copy |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    for op, form in shown_forms().items():
        for direction in DIRECTIONS:
            call = calls[op, form, direction, DTYPE]
            ratios = [report.marked(call[size]["speedup"]) for size in COLUMNS]
            yield f"| [{op}](ops.md#{op}), {direction} | {' | '.join(ratios)} | {percent(call[COLUMNS[-1]]):.0f} |"


def slow_calls(rows: Rows) -> dict[str, list[dict[str, Any]]]:
    """Return the records that are slower than torch, by call: its op, form and direction."""
    below: dict[str, list[dict[str, Any]]] = {}
    for (op, form, direction, _), call in by_call(rows).items():
        slow = [row for row in call.values() if row["speedup"] < report.SLOW]
        if slow:
            below.setdefault(f"{op}, {form}, {direction}", []).extend(slow)
    return below


def lowest(rows: Rows) -> dict[str, float]:
    """Return the lowest ratio of each call that is slower than torch somewhere."""
    return {call: min(row["speedup"] for row in slow) for call, slow in slow_calls(rows).items()}


def slow_table(rows: Rows, where: str) -> Iterator[str]:
    """Yield the calls that are slower than torch somewhere in the run."""
    below, count = slow_calls(rows), sum(map(len, by_call(rows).values()))
    slow = sum(map(len, below.values()))
    yield f"{slow} of the {count} ratios in {where} are below {report.SLOW}. Per op, form and direction:"
    yield ""
    yield "| call | lowest | elements of the ratios |"
    yield "|---|---|---|"
    for call, found in below.items():
        sizes = sorted({row["elements"] for row in found})
        span = report.size_name(sizes[0])
        if len(sizes) > 1:
            span += f" to {report.size_name(sizes[-1])}"
        dtypes = ", ".join(sorted({row["dtype"] for row in found}))
        yield f"| {call} | {min(row['speedup'] for row in found):.2f} | {span}; {dtypes} |"


def machine(rows: Rows) -> str:
    """Return where a run was measured."""
    first = rows[0]
    commits = " and ".join(f"`{commit[:12]}`" for commit in dict.fromkeys(row["commit"] for row in rows))
    return (
        f"{first['machine']}, {first['capability']}, torch {first['torch']}, Python {first['python']}, commit {commits}"
    )


def _packed_weights(rows: Rows) -> str:
    first = rows[0]
    lines: list[str] = []
    for weight in dict.fromkeys(tuple(row["weight"]) for row in rows):
        table = packed_linear.table([row for row in rows if tuple(row["weight"]) == weight])
        lines += ["A weight of {} x {}:".format(*weight), "", *table, ""]
    about = PACKED_TABLE
    for word, value in {
        "TURNS": first["turns"],
        "SLOW": report.SLOW,
        "MACHINE": machine([{**row, "machine": row["device"]} for row in rows]) + f"; {link(PACKED)}",
    }.items():
        about = about.replace(word, str(value))
    return "\n".join([*lines, about])


def setting(rows: Rows) -> str:
    """Return the threads and the allocator of a run."""
    first = rows[0]
    return f"{first['threads']} thread{'s' * (first['threads'] != 1)}, {first['allocator']} allocator"


def link(path: Path) -> str:
    """Return a link to a result file, for a page of docs/."""
    return f"[{path.name}](../{path.relative_to(DOCS.parent).as_posix()})"


def speedups(rows: Rows) -> dict[str, tuple[float, float]]:
    """Return the speed-up of each op in the first table at the largest size: forward, backward."""
    calls, largest = by_call(rows), COLUMNS[-1]
    forms = shown_forms().items()
    each = {
        op: [calls[op, form, direction, DTYPE][largest]["speedup"] for direction in DIRECTIONS] for op, form in forms
    }
    return {op: (forward, backward) for op, (forward, backward) in each.items()}


def drawn() -> str:
    """Return the picture of the speed-ups."""
    rows = report.read(SHOWN)
    title = f"{DTYPE}, {report.size_name(COLUMNS[-1])} elements, {setting(rows)}, {rows[0]['machine']}"
    return picture.drawn(speedups(rows), title, lowest(rows))


# ------------------------------------------------------------------------------------------------------- the blocks


def speed(_: str = "") -> str:
    """Return the table of the speed-ups at a few sizes."""
    rows = report.read(SHOWN)
    *smaller, largest = map(report.size_name, COLUMNS)
    about = SPEED_TABLE.replace("COLUMNS", f"{', '.join(smaller)} and {largest}").replace("LARGEST", largest)
    about = about.replace("SLOW", str(report.SLOW))
    about = about.replace("MACHINE", f"{DTYPE}, {setting(rows)}, {machine(rows)}; {link(SHOWN)}")
    return "\n".join([*first_table(rows), "", about])


def slower(_: str = "") -> str:
    """Return the calls for which torch is faster."""
    return "\n".join(slow_table(report.read(SHOWN), f"the run, {link(SHOWN)},"))


def packed_weights(_: str = "") -> str:
    """Return the tables of quantized_linear."""
    return _packed_weights(report.read(PACKED))


def shared_ops_block(_: str = "") -> str:
    """Return the times of the ops that several backends have on a CPU."""
    records = shared_ops.read(CPU / "shared.jsonl")
    won = f"The fastest backend that accepts the call, or within 5 % of it: {shared_ops.wins(records)}."
    return "\n".join([*shared_ops.table(records), "", won])


def packed_peers_block(_: str = "") -> str:
    """Return the times of torch's own packed products."""
    return "\n".join(packed_peers.table(shared_ops.read(CPU / "packed-peers.jsonl")))


def gpu_headline(_: str = "") -> str:
    """Return the headline calls on a GPU."""
    path = GPU / "headline.jsonl"
    rows = report.read(path)
    return "\n".join([report.machine(path, rows[0]), "", *headline.table(rows)])


def gpu_runs(_: str = "") -> str:
    """Return the experts, the calls of ops that the headline lacks, and the host time of a launch."""
    had = {(row["op"], row["case"]) for row in report.read(GPU / "headline.jsonl")}
    ops, lines = {op for op, _ in had}, list[str]()
    for name in ("experts", "large"):
        path = GPU / f"{name}.jsonl"
        rows = [row for row in report.read(path) if row["op"] not in ops]
        lines += [report.machine(path, rows[0]), "", *report.table(rows)[2:], ""]
    path = GPU / "launch.jsonl"
    ratios = sorted(row["launcher_us"] / row["bare_us"] for row in report.read(path))
    times = sorted(row["launcher_us"] for row in report.read(path))
    lines.append(
        f"The host's part of a launch is {times[0]:.0f} to {times[-1]:.0f} us, {ratios[0]:.2f} to {ratios[-1]:.2f} of "
        f"the time of Triton's own launch: {link(path)}."
    )
    return "\n".join(lines)
