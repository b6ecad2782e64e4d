"""The blocks of what each backend takes and has, and of what other libraries take: from the constraints of kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import fusedops
from fusedops._plugins.discovery import OWN_DISTRIBUTION
from fusedops._plugins.record import Record
from fusedops._plugins.registry import registry

OPS = [fusedops.ops.OPS[name] for name in fusedops.ops.__all__]


def constraints(_: str = "") -> str:
    """Return a section for each backend, and the padding."""
    own = [record for record in registry.records() if record.distribution == OWN_DISTRIBUTION]
    lines: list[str] = []
    for record in sorted(own, key=lambda record: (-len(ops_of(record)), record.name)):
        lines += [f"## {record.name}", "", *section(record), ""]
    padded = [op for op in OPS if op.padding is not None]
    lines += ["## Padding", ""]
    for op in padded:
        dims = " and ".join(map(str, op.padding.dims)) if op.padding else ""
        lines.append(
            f'- `{op.name}` with `adapt="pad"`: `x` is padded in dims {dims} to a multiple that a kernel requires.'
        )
    return "\n".join(lines)


def ops_of(record: Record) -> set[str]:
    """Return the names of the ops that a backend has kernels for."""
    assert record.backend is not None, record.error
    return {kernel.op for kernel in record.backend.kernels}


def section(record: Record) -> Iterator[str]:
    """Yield the lines of a backend: its devices, one table of its ops, its deviations and adaptations."""
    assert record.backend is not None, record.error
    yield f"Devices: {_names(record.backend.device_types)}."
    served = ops_of(record)
    shared = common(record)
    if shared:
        yield from ("", f"Every kernel: {'; '.join(shared)}.")
    each = {op.name: _constraints(record, op.name, shared) for op in OPS if op.name in served}
    dtypes = usual_dtypes(list(each.values()))
    if dtypes:
        yield from (
            "",
            f"Tensors without a dtype below: {dtypes}; some may have float64 too, and `fusedops matrix --backend "
            f"{record.name}` names each.",
        )
    rows = [(op, kept) for op, lines in each.items() if (kept := [line for line in lines if not _has(line, dtypes)])]
    free = sorted(served - {name for name, _ in rows})
    if not rows:
        yield from ("", f"It accepts every {'other ' if shared else ''}call of its ops.")
    elif free:
        yield from ("", f"No other constraint: {', '.join(free)}.")
    if rows:
        yield from ("", "| op | accepts |", "|---|---|")
        yield from (f"| [{name}](ops.md#{name}) | {'<br>'.join(lines)} |" for name, lines in rows)
    notes = list(differences(record))
    if notes:
        yield from (
            "",
            "Deviations, differences from the op's contract, and adaptations, changes to the arguments:",
            "",
        )
        yield from notes


def common(record: Record) -> list[str]:
    """Return the constraints that all kernels of a backend of several ops have."""
    assert record.backend is not None, record.error
    if len(ops_of(record)) == 1:
        return []
    texts = [[each.describe() for each in item.constraints] for item in record.backend.kernels]
    return [text for text in texts[0] if all(text in other for other in texts)]


def usual_dtypes(lines: Sequence[Sequence[str]]) -> str:
    """Return the dtypes that the tensors of all ops of a backend may have, if most have no other ones, else ""."""
    found = Counter(line.rpartition(": ")[2] for each in lines for line in each if re.search(r"\bor float\d+$", line))
    dtypes, count = found.most_common(1)[0] if found else ("", 0)
    return dtypes if 2 * count > len(lines) else ""


def _has(line: str, dtypes: str) -> bool:
    """Return True for the line of tensors with these dtypes."""
    return bool(dtypes) and line.endswith(f": {dtypes}") and " if " not in line


def _constraints(record: Record, op: str, shared: Sequence[str]) -> list[str]:
    """Return a line for each condition of an op's kernels, with the arguments that it is about.

    An argument of one direction or device alone has that in parentheses.
    """
    kernels = _of(record, op)
    found: dict[str, dict[str, list[fusedops.Kernel]]] = {}
    for item in kernels:
        for each in item.constraints:
            if (text := each.describe()) not in shared:
                name, _, condition = text.partition(": ") if ": " in text else ("", "", text)
                found.setdefault(condition, {}).setdefault(name, []).append(item)
    lines: list[str] = []
    for condition, names in found.items():
        shown = [name + _where(items, kernels, " ({})") for name, items in names.items()]
        lines.append(condition + shown[0] if "" in names else f"{', '.join(shown)}: {condition}")
    return lines


def differences(record: Record) -> Iterator[str]:
    """Yield a line for each deviation and adaptation of a backend's kernels."""
    assert record.backend is not None, record.error
    seen: dict[tuple[str, str, str], dict[str, list[fusedops.Kernel]]] = {}
    for item in record.backend.kernels:
        for each in item.deviations:
            seen.setdefault(("deviation", each.name, each.sentence), {}).setdefault(item.op, []).append(item)
        for each in item.adaptations:
            seen.setdefault(("adaptation", each.name, each.sentence), {}).setdefault(item.op, []).append(item)
    for (kind, name, sentence), ops in seen.items():
        shown = [f"**{op}**" + _where(items, _of(record, op), " ({})") for op, items in ops.items()]
        yield f"- {', '.join(shown)}, {kind} `{name}`: {sentence}."


def _of(record: Record, op: str) -> list[fusedops.Kernel]:
    assert record.backend is not None, record.error
    return [item for item in record.backend.kernels if item.op == op]


def _where(items: Sequence[fusedops.Kernel], kernels: Sequence[fusedops.Kernel], form: str) -> str:
    """Return "forward", "on cuda" or the like in a form, or "" where all kernels of an op are meant."""
    directions = {item.direction for item in items}
    devices = {_names(item.device_types) for item in items}
    words: list[str] = []
    if devices != {_names(item.device_types) for item in kernels}:
        words.append(f"on {' and '.join(sorted(devices))}")
    if directions != {item.direction for item in kernels}:
        words.append(" and ".join(sorted(directions)))
    return form.format(", ".join(words)) if words else ""


def peers(_: str = "") -> str:
    """Return a section for each op that other libraries have."""
    lines: list[str] = []
    for op in OPS:
        if op.evidence.peers:
            lines += [f"### {op.name}", op.evidence.peers]
    return "\n".join(lines)


def _names(device_types: Sequence[str]) -> str:
    return ", ".join("any" if device == "*" else device for device in device_types)
