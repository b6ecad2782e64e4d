"""``fusedops matrix``: the kernels of each op by backend, with their constraints."""

from __future__ import annotations

import argparse
from typing import Any

from fusedops._cli.arguments import device
from fusedops._cli.output import print_fields, print_json, print_text
from fusedops._explain import find_op
from fusedops._plugins.registry import registry
from fusedops._report.suggestion import unknown_name
from fusedops.errors import PolicyError

HELP = "the kernels of each op by backend, with the constraints of each"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--op", metavar="OP", help="one op alone")
    parser.add_argument("--backend", metavar="NAME", help="one backend alone")
    parser.add_argument("--device", metavar="TYPE", help="the backends for one device type alone, such as npu")


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    kind = None if options.device is None else device(options.device).partition(":")[0]
    records = registry.records()
    if options.op is not None:
        find_op(options.op, "matrix")
    if options.backend is not None and options.backend not in registry.names():
        raise PolicyError(f"matrix: {unknown_name('backend', options.backend, registry.names())}")
    data: dict[str, list[dict[str, Any]]] = {
        name: [
            row
            for record in records
            if record.backend is not None and options.backend in (None, record.name)
            if kind is None or record.backend.serves(kind)
            for row in _rows(record, name)
        ]
        for name in registry.ops
        if options.op in (None, name)
    }
    if options.json:
        print_json(data)
        return 0
    for position, (name, rows) in enumerate(data.items()):
        if position:
            print_text()
        print_text(f"{name}: {registry.ops[name].evidence.formula}")
        lines: list[tuple[str, str, str]] = [] if rows else [("none", "", "no backend is left by these options")]
        for row in rows:
            state = "" if row["ready"] else ", not ready here"
            kernel = "" if row["direction"] else "no kernel: another backend serves "
            lines.append((row["backend"], row["direction"] or "none", f"{kernel}on {', '.join(row['devices'])}{state}"))
            lines += [("", "", f"- {text}") for text in row["constraints"]]
            lines += [("", "", f"deviation {text}") for text in row["deviations"]]
            lines += [("", "", f"adapts {text}") for text in row["adaptations"]]
        print_fields(lines, indent=2, least=(8, 8))
    return 0


def _rows(record: Any, op: str) -> list[dict[str, Any]]:
    """Return one row for each of a backend's kernels for an op, or one row without a direction where it has none."""
    about = {"devices": list(record.backend.device_types), "ready": record.refusal() is None}
    rows = [
        {
            "backend": record.name,
            "direction": item.direction,
            **about,
            "devices": list(item.device_types or record.backend.device_types),
            "constraints": [constraint.describe() for constraint in item.constraints],
            "deviations": [f"{deviation.name}: {deviation.sentence}" for deviation in item.deviations],
            "adaptations": [f"{adaptation.name}: {adaptation.sentence}" for adaptation in item.adaptations],
        }
        for item in record.backend.kernels
        if item.op == op
    ]
    nothing: dict[str, list[str]] = {"constraints": [], "deviations": [], "adaptations": []}
    return rows or [{"backend": record.name, "direction": None, **about, **nothing}]
