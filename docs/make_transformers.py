"""Write the table of docs/transformers.md from models of transformers. `--check` fails if the file is stale."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from model_families import FAMILIES, Family

import fusedops
from fusedops.integrations.transformers import Applied, apply

PAGE = Path(__file__).parent / "transformers.md"
START, END = "<!-- the table: docs/make_transformers.py -->\n", "<!-- end of the table -->\n"
HEADER = """| model | replaced | left, because |
|---|---|---|
"""


def row(family: Family, applied: Applied) -> str:
    """Return the line of a family."""
    replaced = ", ".join(f"{count} {op}" for op, count in sorted(applied.ops.items()))
    left = "; ".join(f"{row.module} ({row.count}): {row.left}" for row in applied.rows if not row.op)
    return f"| {family.name}, `{family.model}` | {replaced or 'nothing'} | {left} |\n"


def page(table: str) -> str:
    """Return the page with another table."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(START)[0], text.partition(END)[2]
    return f"{before}{START}{table}{END}{after}"


def table() -> str:
    """Return the table, from a model of each family."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusedops.FusedOpsWarning)  # a family where nothing is replaced has its line
        return HEADER + "".join(row(family, apply(family.build())) for family in FAMILIES.values())


def main() -> int:
    """Write the page, or check it."""
    fresh = page(table())
    if "--check" not in sys.argv:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    same = PAGE.read_text(encoding="utf-8") == fresh
    print("docs/transformers.md is up to date" if same else "docs/transformers.md is stale: run `make docs`")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
