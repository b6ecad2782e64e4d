"""Write the lists of families of docs/transformers.md. `--check` fails if the file is stale.

The table of accuracy is measured where it lacks a family; with `--accuracy` for each, as processors round differently.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "makers"))

from model_families import FAMILIES
from model_family import accuracy

import fusedops
from fusedops.integrations.transformers import Applied, apply

PAGE = Path(__file__).parent / "transformers.md"
START, END = "<!-- the lists: docs/make_transformers.py -->\n", "<!-- end of the lists -->\n"
ROWS, END_OF_ROWS = "<!-- the table: docs/make_transformers.py --accuracy -->\n", "<!-- end of the table -->\n"
HEAD = "\n| family | float32 | bfloat16 | bfloat16, plain |\n|---|---|---|---|\n"
WHOLE, PARTS = "Everything that `apply` looks for is replaced:\n\n", "\nSomething is left in these:\n\n"


class Outcome(NamedTuple):
    """What `apply` did with a model: the ops that replace something, and what is left with the reason."""

    ops: tuple[str, ...]
    left: tuple[str, ...]


def outcome(applied: Applied) -> Outcome:
    """Return what `apply` did."""
    left = [f"`{row.module}`: {row.left}" for row in applied.rows if not row.op]
    return Outcome(tuple(sorted(applied.ops)), tuple(left))


def lists(outcomes: Mapping[str, Outcome]) -> str:
    """Return the lists: families by what is replaced, then those with something left. Keys are names of families."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, (ops, left) in outcomes.items():
        if not left:
            groups.setdefault(ops, []).append(name)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    whole = [f"- **{', '.join(names)}**: {', '.join(ops)}\n" for ops, names in ordered]
    parts = [
        f"- **{name}**: {', '.join(ops) or 'nothing'} replaced. Left: {'; '.join(left)}\n"
        for name, (ops, left) in outcomes.items()
        if left
    ]
    return f"\n{WHOLE}{''.join(whole)}{PARTS}{''.join(parts)}\n"


def listed(page: str) -> dict[str, Outcome]:
    """Return the outcomes that the lists of a page have."""
    text = page.partition(START)[2].partition(END)[0]
    whole, _, parts = text.partition(PARTS)
    found: dict[str, Outcome] = {}
    for names, ops in re.findall(r"^- \*\*(.+)\*\*: (.+)$", whole, re.M):
        found |= {name: Outcome(tuple(ops.split(", ")), ()) for name in names.split(", ")}
    for name, ops, left in re.findall(r"^- \*\*(.+?)\*\*: (.+?) replaced\. Left: (.+)$", parts, re.M):
        found[name] = Outcome(tuple(ops.split(", ")) if ops != "nothing" else (), tuple(left.split("; ")))
    return found


def table(rows: Mapping[str, str]) -> str:
    """Return the table of accuracy. Keys are names of families."""
    return f"{HEAD}{''.join(f'| {name} | {row} |' + chr(10) for name, row in rows.items())}\n"


def tabled(page: str) -> dict[str, str]:
    """Return the rows that the table of a page has."""
    text = page.partition(ROWS)[2].partition(END_OF_ROWS)[0]
    return dict(re.findall(r"^\| ([^|]+) \| (\d.*) \|$", text, re.M))


def measured(kept: Mapping[str, str]) -> dict[str, str]:
    """Return the row of each family, measured where none is kept."""
    return {name: kept.get(name) or _row(name) for name in FAMILIES}


def _row(name: str) -> str:
    family = FAMILIES[name]
    found = accuracy(family.build(), family, apply)
    return " | ".join(f"{value:.0e}".replace("e-0", "e-") if value else "0" for value in found[:3])


def page(text: str, rows: Mapping[str, str]) -> str:
    """Return the page with other lists and another table."""
    old = PAGE.read_text("utf-8")
    for start, end, fresh in ((START, END, text), (ROWS, END_OF_ROWS, table(rows))):
        old = f"{old.partition(start)[0]}{start}{fresh}{end}{old.partition(end)[2]}"
    return old


def made() -> str:
    """Return the lists, from a model of each family."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusedops.FusedOpsWarning)  # a family where nothing is replaced has its line
        return lists({family.name: outcome(apply(family.build())) for family in FAMILIES.values()})


def main() -> int:
    """Write the page, or check it."""
    kept = {} if "--accuracy" in sys.argv else tabled(PAGE.read_text("utf-8"))
    fresh = page(made(), measured(kept))
    if "--check" not in sys.argv:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    same = PAGE.read_text(encoding="utf-8") == fresh
    print("docs/transformers.md is up to date" if same else "docs/transformers.md is stale: run `make docs`")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
