"""The blocks of docs/families.md: what `apply` replaces in each family, and how exact the results are.

The table of accuracy is measured where it lacks a family: processors round differently. Delete a row to measure it
again.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import NamedTuple

from model_families import FAMILIES
from model_family import accuracy

import fusedops
from fusedops.integrations.transformers import Applied, apply

HEAD = "| float32 | bfloat16 | bfloat16, plain | families |\n|---|---|---|---|\n"
_OF_TRL = "linear_log_probs"
WHOLE, PARTS = "Everything that `apply` looks for is replaced:\n\n", "\nSomething is left in these:\n\n"


class Outcome(NamedTuple):
    """What `apply` did with a model: the ops that replace something, and what is left with the reason."""

    ops: tuple[str, ...]
    left: tuple[str, ...]


def outcome(applied: Applied) -> Outcome:
    """Return what `apply` did, but for the heads of trl's trainers, which depends on whether trl is imported."""
    rows = [row for row in applied.rows if _OF_TRL not in (row.op, row.family)]
    left = [f"`{row.module}`: {row.left}" for row in rows if not row.op]
    return Outcome(tuple(sorted({row.op for row in rows if row.op})), tuple(left))


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
    return f"{WHOLE}{''.join(whole)}{PARTS}{''.join(parts)}".strip()


def listed(text: str) -> dict[str, Outcome]:
    """Return the outcomes that the lists have."""
    whole, _, parts = text.partition(PARTS)
    found: dict[str, Outcome] = {}
    for names, ops in re.findall(r"^- \*\*(.+)\*\*: (.+)$", whole, re.M):
        found |= {name: Outcome(tuple(ops.split(", ")), ()) for name in names.split(", ")}
    for name, ops, left in re.findall(r"^- \*\*(.+?)\*\*: (.+?) replaced\. Left: (.+)$", parts, re.M):
        found[name] = Outcome(tuple(ops.split(", ")) if ops != "nothing" else (), tuple(left.split("; ")))
    return found


def table(rows: Mapping[str, str]) -> str:
    """Return the table of accuracy, with a row for the families of the same numbers. Keys are names of families."""
    alike: dict[str, list[str]] = {}
    for name, row in rows.items():
        alike.setdefault(row, []).append(name)
    ordered = sorted(alike.items(), key=lambda item: [float(number) for number in item[0].split(" | ")])
    return HEAD + "\n".join(f"| {row} | {', '.join(names)} |" for row, names in ordered)


def tabled(text: str) -> dict[str, str]:
    """Return the row of each family that the table has."""
    rows = re.findall(r"^\| (\d[^|]*(?: \| \d[^|]*){2}) \| ([^|]+) \|$", text, re.M)
    return {name: row for row, names in rows for name in names.split(", ")}


def _row(name: str) -> str:
    family = FAMILIES[name]
    found = accuracy(family.build(), family, apply)
    return " | ".join(f"{value:.0e}".replace("e-0", "e-") if value else "0" for value in found[:3])


def lists_block(_: str = "") -> str:
    """Return the lists, from a model of each family."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusedops.FusedOpsWarning)  # a family where nothing is replaced has its line
        return lists({family.name: outcome(apply(family.build())) for family in FAMILIES.values()})


def accuracy_block(old: str) -> str:
    """Return the table, with each family that it lacks measured."""
    kept = tabled(old)
    return table({name: kept.get(name) or _row(name) for name in FAMILIES})
