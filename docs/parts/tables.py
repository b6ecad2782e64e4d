"""The blocks with a row for each op, or for the ops that are alike."""

from __future__ import annotations

from collections.abc import Callable

import fusedops
from fusedops._plugins.discovery import OWN_DISTRIBUTION
from fusedops._plugins.registry import registry

OPS = [fusedops.ops.OPS[name] for name in fusedops.ops.__all__]


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


def ops(_: str = "") -> str:
    """Return a table of the ops by the backends that have a forward kernel."""
    served = {name: ops_of(name) for name in own_backends()}
    rows: dict[str, list[str]] = {}
    for op in OPS:
        backends = ", ".join(name for name, names in served.items() if op.name in names)
        rows.setdefault(backends, []).append(f"[{op.name}](#{op.name})")
    return "\n".join(["| backends | ops |", "|---|---|", *(f"| {key} | {', '.join(rows[key])} |" for key in rows)])


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


def sharding(_: str = "") -> str:
    """Return the dims that a call shards, by op."""
    return grouped("| op | first tensor | other tensors | gradients |", lambda op: op.evidence.sharded or ("",))
