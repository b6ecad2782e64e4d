"""The blocks of docs/families.md: what `apply` replaces in each family, what fused kernels then serve on three devices,
and how exact the results are.

Processors have other kernels, and round differently: the table of accuracy is measured where it lacks a family, and
that of plans made again. Delete a row for that.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import transformers
from model_families import FAMILIES
from model_family import Family, accuracy

import fusedops
from fusedops.integrations.transformers import Applied, apply

HEAD = "| float32 | bfloat16 | bfloat16, plain | families |\n|---|---|---|---|\n"
_OF_TRL = "linear_log_probs"
PLANNED = (
    "| computed by functions of torch on an A2 | families, with the shares on a CPU, an H100 and an A2 |\n|---|---|\n"
)
DEVICES = ("cpu", "H100", "A2")
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


def _wide(name: str, value: object) -> object:
    """Return a size of a test's model times 16; other numbers as they are."""
    is_size = type(value) is int and value >= 8 and not any(part in name for part in ("num", "heads", "patch"))
    return value * 16 if is_size else value


def plans(family: Family, devices: Sequence[str] = DEVICES) -> list[fusedops.Plan]:
    """Return the plans of a training step in bfloat16 of the family's model, 16 times as wide and as long."""
    config = getattr(transformers, family.config)(**{name: _wide(name, each) for name, each in family.values.items()})
    with torch.device("meta"):
        model = getattr(transformers, family.model)._from_config(config, dtype=torch.bfloat16)
    inputs: dict[str, fusedops.TensorSpec] = {}
    for name, each in family.inputs().items():
        dtype = torch.bfloat16 if each.is_floating_point() else torch.int64
        kept = 2 if each.dim() > 2 else 1  # the batch, and the channels
        shape = *each.shape[:kept], *(16 * size for size in each.shape[kept:])
        if name != "attention_mask":  # a batch without padding
            inputs[name] = fusedops.TensorSpec(shape, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [fusedops.plan(model, inputs, device=device, train=True) for device in devices]


def unfused(plan: fusedops.Plan) -> dict[str, str]:
    """Return the ops that no fused kernel serves, each with the first reason."""
    reasons: dict[str, str] = {}
    for row in plan.rows:
        if not row.is_fused and row.direction == "forward":
            reasons.setdefault(row.op, row.refused[0].constraint if row.refused else "no kernel")
    return reasons


def planned(text: str) -> dict[str, tuple[str, str]]:
    """Return the ops and the cell of each family that the table of plans has."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    pairs = [(row[0], cell) for row in rows for cell in row[1].split(" · ")]
    return {match[1]: pair for pair in pairs if (match := re.match(r"(.+) \d+ \d+ \d+( \(|$)", pair[1]))}


def plans_block(old: str) -> str:
    """Return the table of plans: the one that is there, if it has every family."""
    if planned(old).keys() == FAMILIES.keys():
        return old
    groups: dict[str, list[str]] = {}
    reasons: dict[str, dict[str, None]] = {}
    for name, family in FAMILIES.items():
        made = plans(family)
        of_cpu, of_gpu, of_npu = map(unfused, made)
        cell = " ".join([name, *(f"{100 * plan.share['bytes']:.0f}" for plan in made)])
        for label, ops in (("CPU", of_cpu), ("H100", of_gpu)):
            cell += f" ({label}: {', '.join(ops)})" * bool(ops)
        groups.setdefault(", ".join(sorted(of_npu)) or "none", []).append(cell)
        for op, reason in of_npu.items():
            reasons.setdefault(op, {})[reason] = None
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    why = "; ".join(f"`{op}`: {', or '.join(each)}" for op, each in sorted(reasons.items()))
    return PLANNED + "\n".join(f"| {ops} | {' · '.join(cells)} |" for ops, cells in ordered) + f"\n\nWhy: {why}."
