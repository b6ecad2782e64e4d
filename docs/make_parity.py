"""Write the table of docs/transformers.md that `compare_models` measures: `python docs/make_parity.py`, by hand.

Without names of families each is measured; with some, these alone, and the other rows are kept.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "makers"))

from model_families import FAMILIES
from model_parity import WAYS, has_tokens, parity

import fusedops

PAGE = Path(__file__).parent / "transformers.md"
START, END = "<!-- the table: docs/make_parity.py -->\n", "<!-- end of this table -->\n"
HEAD = f"\n| family | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}\n"
Row = tuple[tuple[float, float] | None, ...]  # of each way the largest difference and the mean


def measured(name: str) -> Row:
    """Return the row of a family."""
    return tuple(found and (found.largest, found.mean) for found in parity(FAMILIES[name]).values())


def listed(page: str) -> dict[str, Row]:
    """Return the rows that the table of a page has, by the name of the family."""
    found: dict[str, Row] = {}
    for line in page.partition(START)[2].partition(END)[0].splitlines()[3:]:
        if line:
            name, *cells = line.strip("| ").split(" | ")
            found[name] = tuple(_numbers(cell) for cell in cells)
    return found


def _numbers(cell: str) -> tuple[float, float] | None:
    if cell == "-":
        return None
    largest, mean = map(float, cell.split(", "))
    return largest, mean


def _cell(numbers: tuple[float, float] | None) -> str:
    if numbers is None:
        return "-"
    return ", ".join(re.sub(r"e-0", "e-", f"{value:.0e}") if value else "0" for value in numbers)


def with_table(page: str, rows: Mapping[str, Row]) -> str:
    """Return a page with other rows."""
    lines = "".join(f"| {name} | {' | '.join(map(_cell, row))} |\n" for name, row in rows.items())
    return f"{page.partition(START)[0]}{START}{HEAD}{lines}\n{END}{page.partition(END)[2]}"


def main() -> None:
    """Measure, and write the page."""
    warnings.simplefilter("ignore", fusedops.FusedOpsWarning)  # a family where nothing is replaced
    rows = listed(PAGE.read_text("utf-8"))
    for name, family in FAMILIES.items():
        if has_tokens(family) and (name in sys.argv[1:] or not sys.argv[1:]):
            rows[name] = measured(name)
            print(name, *map(_cell, rows[name]), sep=" | ", flush=True)
    ordered = {name: rows[name] for name in FAMILIES if name in rows}
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), ordered), encoding="utf-8")


if __name__ == "__main__":
    main()
