"""``fusedops matrix``: which backend has kernels for which op; for one op or one backend, with the constraints."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fusedops._cli.arguments import device
from fusedops._cli.features import HEADS, cells, features
from fusedops._cli.output import print_fields, print_json, print_table, print_text, width
from fusedops._contract.kernel import Kernel
from fusedops._explain import find_op
from fusedops._plugins.record import Record
from fusedops._plugins.registry import registry
from fusedops.errors import PolicyError

HELP = "which backend has kernels for which op, and with --op or --backend what they take"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--op", metavar="OP", help="one op alone, with its kernels' constraints")
    parser.add_argument("--backend", metavar="NAME", help="one backend alone, with its kernels' constraints")
    parser.add_argument("--features", action="store_true", help="a row for each op and backend, by what it has")
    parser.add_argument("--device", metavar="TYPE", help="the backends for one device type alone, such as npu")


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    kind = None if options.device is None else device(options.device).partition(":")[0]
    records = registry.whole()
    if options.op is not None:
        find_op(options.op, "matrix")
    if options.backend is not None and options.backend not in registry.names():
        raise PolicyError(f"matrix: {registry.unknown_backend(options.backend)}")
    if options.features:
        return _run_features(options, kind, records)
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
    shown = [
        record for record in records if any(row["backend"] == record.name for rows in data.values() for row in rows)
    ]
    if options.op is None and options.backend is None:
        _print_grid(data, shown)
    else:
        _print_kernels(data)
    return 0


def _run_features(options: argparse.Namespace, kind: str | None, records: Sequence[Record]) -> int:
    """Print the table of features."""
    rows = [
        row
        for op in registry.ops.values()
        if options.op in (None, op.name)
        for record in records
        if record.backend is not None and options.backend in (None, record.name)
        if kind is None or record.backend.serves(kind)
        if (row := features(op, record, kind)) is not None
    ]
    if options.json:
        print_json(rows)
    else:
        print_table(HEADS, [cells(row) for row in rows])
    return 0


def _print_grid(data: dict[str, list[dict[str, Any]]], records: list[Record]) -> None:
    """Print a row for each op and a column for each backend, in blocks of columns that fit, then the backends."""
    columns = {
        record.name: [_cell([row for row in rows if row["backend"] == record.name]) for rows in data.values()]
        for record in records
    }
    left = width() - max(map(len, data), default=0)
    while columns:
        widths = (max(map(len, [name, *cells])) + 2 for name, cells in columns.items())
        fitting = max(1, sum(end <= left for end in itertools.accumulate(widths)))
        block = {name: columns.pop(name) for name in list(columns)[:fitting]}
        print_table(("op", *block), list(zip(data, *block.values())))
        print_text()
    print_text("both: forward and backward; (both): not ready here; -: no kernel, the next backend serves the call")
    print_text()
    fields: list[tuple[str, str, str]] = []
    for record in records:
        assert record.backend is not None
        refusal = record.refusal()
        state = "ready" if refusal is None else f"{refusal.detail}; to fix: {refusal.fix}"
        fields.append((record.name, ", ".join(record.backend.device_types), state))
    print_fields(fields or [("none", "", "no backend is left by these options")], least=(9, 3))
    print_text()
    print_text("What the kernels take: fusedops matrix --op OP, or --backend NAME")


def _cell(rows: Sequence[dict[str, Any]]) -> str:
    """Return the directions of one backend's kernels for an op, in brackets where it is not ready here."""
    there = sorted({row["direction"] for row in rows if row["direction"]})
    if not there:
        return "-"
    text = "both" if len(there) == 2 else there[0]
    return text if rows[0]["ready"] else f"({text})"


def _print_kernels(data: dict[str, list[dict[str, Any]]]) -> None:
    """Print each op's kernels by backend: where they run, what they take, how they deviate, what they adapt."""
    without: list[str] = []
    position = 0
    for name, rows in data.items():
        lines: list[tuple[str, str, str]] = []
        kernels = [row for row in rows if row["direction"]]
        for (backend, devices), group in itertools.groupby(kernels, key=lambda row: (row["backend"], row["devices"])):
            lines += _kernel_lines(backend, devices, list(group))
        if not lines and len(data) > 1:
            without.append(name)
            continue
        if position:
            print_text()
        position += 1
        print_text(f"{name}: {registry.ops[name].evidence.formula}")
        print_fields(lines, indent=2, least=(8, 8))
        absent = [row["backend"] for row in rows if not row["direction"]]
        if absent or not rows:
            text = f"no kernel: {', '.join(absent)}" if absent else "none: no backend is left by these options"
            print_fields([(text,)], indent=2)
    if without:
        print_text()
        print_text(f"without a kernel: {', '.join(without)}")


def _kernel_lines(
    backend: str, devices: Sequence[str], kernels: Sequence[dict[str, Any]]
) -> list[tuple[str, str, str]]:
    """Return the lines of one backend's kernels for an op; what only one of two directions has is marked."""
    directions = " and ".join(row["direction"] for row in kernels)
    state = "" if kernels[0]["ready"] else "; not ready here"
    lines = [(backend, "serves", f"{directions} on {', '.join(devices)}{state}")]
    labels = {"constraints": "takes", "deviations": "deviates", "adaptations": "adapts", "rows": "rows"}
    for key, label in labels.items():
        texts: list[str] = []
        for text in dict.fromkeys(text for row in kernels for text in row[key]):
            having = [row["direction"] for row in kernels if text in row[key]]
            texts.append(text if len(having) == len(kernels) else f"{text} ({having[0]})")
        if key == "constraints" and not texts:
            texts.append("every call")
        lines += [("", "" if at else label, text) for at, text in enumerate(texts)]
    return lines


def _rows_texts(item: Kernel) -> list[str]:
    """Return whether a row of a result may depend on other rows, by device type where that differs."""
    devices = list(item.rows_independent) if isinstance(item.rows_independent, Mapping) else [""]
    reasons = {device: item.why_rows_depend(device) for device in devices}
    texts = {device: "independent" if why is None else f"depend on others: {why}" for device, why in reasons.items()}
    names = {"*": "elsewhere: ", "": ""}
    return [f"{names.get(device, f'on {device}: ')}{text}" for device, text in texts.items()]


def _rows(record: Record, op: str) -> list[dict[str, Any]]:
    """Return one row for each of a backend's kernels for an op, or one row without a direction where it has none."""
    assert record.backend is not None
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
            "rows": _rows_texts(item),
        }
        for item in record.backend.kernels
        if item.op == op
    ]
    nothing: dict[str, list[str]] = {"constraints": [], "deviations": [], "adaptations": [], "rows": []}
    return rows or [{"backend": record.name, "direction": None, **about, **nothing}]
