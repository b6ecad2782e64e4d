"""The table of ``fusedops matrix --features``: what each backend's kernels of an op have, from their declarations."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._contract.kernel import Kernel
from fusedops._contract.op import Op
from fusedops._plugins.record import Record
from fusedops.constraints import DType, Offsets, Present, When

HEADS = ("op", "backend", "dtypes", "forward", "backward", "packed", "rows independent")
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


def features(op: Op, record: Record, device_type: str | None = None) -> dict[str, Any] | None:
    """Return what a backend's kernels of an op have; None where it has none.

    ``dtypes`` are those of the op's first argument that forward accepts. ``packed``: sequences by their bounds; None
    for an op without them. ``rows_independent``: by direction, True or the reason why not, on ``device_type``, else on
    the first that the kernel serves.
    """
    assert record.backend is not None
    of_op = [item for item in record.backend.kernels if item.op == op.name]
    own = [item for item in of_op if device_type is None or item.serves(device_type)]
    forward = next((item for item in own if item.direction == "forward"), None)
    if forward is None:
        return None
    where = device_type or (forward.device_types or record.backend.device_types)[0]
    where = "cpu" if where == "*" else where
    served = [forward, *(item for item in own if item.direction == "backward" and item.serves(where))]
    conditions = [each.then if isinstance(each, When) else each for each in op.constraints]
    # of sequences: ends of groups of whole rows, as grouped_matmul has, are none
    bounds = {each.name for each in conditions if isinstance(each, Offsets) and (each.bounds or each.dim)}
    return {
        "op": op.name,
        "backend": record.name,
        "device": where,
        "dtypes": [
            _SHORT[dtype] for dtype in sorted(op.evidence.tolerance, key=[*_SHORT].index) if _has(forward, op, dtype)
        ],
        "forward": True,
        "backward": len(served) > 1,
        "packed": all(not _is_refused(forward, name) for name in bounds) if bounds else None,
        "rows_independent": {item.direction: item.why_rows_depend(where) or True for item in served},
    }


def _has(kernel: Kernel, op: Op, dtype: torch.dtype) -> bool:
    first = op.parameters[0]
    return all(dtype in each.dtypes for each in kernel.constraints if isinstance(each, DType) and each.name == first)


def _is_refused(kernel: Kernel, name: str) -> bool:
    """Return True where a kernel takes no call with an argument."""
    return any(isinstance(each, Present) and each.name == name and not each.present for each in kernel.constraints)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts of a row, in the order of ``HEADS``."""
    promised = [direction for direction, value in row["rows_independent"].items() if value is True]
    rows = "no" if not promised else "yes" if len(promised) == len(row["rows_independent"]) else " and ".join(promised)
    given = {True: "yes", False: "no", None: "-"}
    words = [given[row[name]] for name in ("forward", "backward", "packed")]
    return (row["op"], row["backend"], " ".join(row["dtypes"]) or "-", *words, rows)
