"""Write the tables of ops in README.md and docs/ from the ops and the backends. `--check` fails if one is stale.

Each table stands between two comments, and the text around it is kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # a backend may list other devices under an interpreter

import fusedops
from fusedops._plugins.registry import OWN_DISTRIBUTION, registry

ROOT = Path(__file__).parents[1]
OPS = [fusedops.ops.OPS[name] for name in fusedops.ops.__all__]
BEGIN, END = "made by docs/make_tables.py", "end of the table"


def own_backends() -> list[str]:
    """Return the names of the backends of this distribution, those that serve the most ops first."""
    records = [record for record in registry.records() if record.distribution == OWN_DISTRIBUTION]
    counts = {record.name: len(ops_of(record.name)) for record in records}
    return sorted(counts, key=lambda name: (-counts[name], name))


def ops_of(backend: str) -> set[str]:
    """Return the names of the ops for which a backend has a forward kernel."""
    record = next(record for record in registry.records() if record.name == backend)
    assert record.backend is not None, record.error
    return {kernel.op for kernel in record.backend.kernels if kernel.direction == "forward"}


def grid(cell: Callable[[fusedops.Op], str], meaning: bool) -> str:
    """Return a table with a row for each op and a column for each backend."""
    backends = own_backends()
    served = {name: ops_of(name) for name in backends}
    first = ["op", "meaning"] if meaning else ["op"]
    lines = [f"| {' | '.join([*first, *backends])} |", "|" + "---|" * (len(first) + len(backends))]
    for op in OPS:
        cells = [cell(op), f"`{op.evidence.formula}`"] if meaning else [cell(op)]
        cells += ["yes" if op.name in served[name] else "no" for name in backends]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def grouped(header: str, cells: Callable[[fusedops.Op], tuple[str, ...]]) -> str:
    """Return a table with a row for the ops whose cells are alike. The header is that of the whole table."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for op in OPS:
        each = cells(op)
        if not all(each):
            raise ValueError(f"{op.name}: got evidence without {header!r}, expected a text for each cell")
        rows.setdefault(each, []).append(f"`{op.name}`")
    lines = [header, "|" + "---|" * (header.count("|") - 1)]
    lines += [f"| {', '.join(names)} | {' | '.join(each)} |" for each, names in rows.items()]
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "README.md": lambda: grid(lambda op: f"`{op.name}`", meaning=True),
    "docs/ops.md": lambda: grid(lambda op: f"[{op.name}](#{op.name})", meaning=False),
    "docs/distributed.md": lambda: grouped(
        "| op | first tensor | other tensors | gradients |", lambda op: op.evidence.sharded or ("",)
    ),
    "docs/pytorch.md": lambda: grouped("| op | dtype of the result |", lambda op: (op.evidence.result_dtype,)),
}


def with_table(name: str, text: str) -> str:
    """Return the text of a page with its table written again."""
    marks = [f"<!-- {mark} -->" for mark in (BEGIN, END)]
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{name}: got no comments {marks[0].strip()!r} and {marks[1].strip()!r}, expected both")
    return f"{before}{begin}\n{TABLES[name]()}\n{end}{after}"


def main() -> int:
    """Write the tables, or check them."""
    stale: list[str] = []
    for name in TABLES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        fresh = with_table(name, text)
        if text != fresh and "--check" in sys.argv:
            stale.append(name)
        elif text != fresh:
            path.write_text(fresh, encoding="utf-8")
    print(
        f"{', '.join(stale)}: the table of ops is stale: run `make docs`"
        if stale
        else "the tables of ops are up to date"
    )
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
