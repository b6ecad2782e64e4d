"""The roles of an op's arguments, read from its constraints: no check depends on an argument's name."""

from __future__ import annotations

from functools import lru_cache

import torch

from fusedops._contract.constraint import Constraint
from fusedops._contract.op import Op
from fusedops.constraints import (
    Alignment,
    Between,
    Broadcasts,
    Classes,
    DType,
    Finite,
    Flag,
    Indices,
    Int8,
    Lengths,
    LogSums,
    Mask,
    Offsets,
    OneElement,
    OneOf,
    PackedPart,
    PackedRows,
    Probability,
    Slots,
    When,
)

_SMALL = 1e-3
_ALIGNED = "lower_right"
_cached = lru_cache(maxsize=256)  # each call of a check asks for several roles of its op


@_cached
def masks(op: Op) -> tuple[str, ...]:
    """Return the arguments that mask positions out."""
    return _named(op, Mask)


@_cached
def masked_tensor(op: Op, mask: str) -> str | None:
    """Return the tensor that a mask broadcasts to, or None where no constraint names one."""
    tensors = [c.other for c in _constraints(op) if isinstance(c, Broadcasts) and c.name == mask]
    return tensors[0] if tensors else None


@_cached
def one_elements(op: Op) -> tuple[str, ...]:
    """Return the tensors of one element, whose shape does not follow the others'."""
    return _named(op, OneElement)


@_cached
def seeds(op: Op) -> tuple[str, ...]:
    """Return the seeds: tensors of one int64."""
    kinds = (c for c in _constraints(op) if isinstance(c, OneElement) and torch.int64 in c.dtypes)
    return tuple(dict.fromkeys(c.name for c in kinds))


@_cached
def classes(op: Op) -> tuple[Classes, ...]:
    """Return the constraints on arguments that hold indices of classes."""
    return tuple(c for c in _constraints(op) if isinstance(c, Classes))


@_cached
def offsets(op: Op) -> tuple[Offsets, ...]:
    """Return the constraints on arguments that hold the ends of groups of rows."""
    return tuple(c for c in _constraints(op) if isinstance(c, Offsets))


@_cached
def lengths(op: Op) -> tuple[Lengths, ...]:
    """Return the constraints on arguments that hold numbers of rows."""
    return tuple(c for c in _constraints(op) if isinstance(c, Lengths))


@_cached
def slots(op: Op) -> tuple[Slots, ...]:
    """Return the constraints on arguments that hold the places of tokens in pages."""
    return tuple(c for c in _constraints(op) if isinstance(c, Slots))


@_cached
def indices(op: Op) -> tuple[Indices, ...]:
    """Return the constraints on arguments that hold places of rows, each at most once in a row."""
    return tuple(c for c in _constraints(op) if isinstance(c, Indices))


@_cached
def between(op: Op) -> tuple[Between, ...]:
    """Return the constraints on tensors whose numbers are usually between two bounds."""
    return tuple(c for c in _constraints(op) if isinstance(c, Between))


@_cached
def log_sums(op: Op) -> tuple[str, ...]:
    """Return the arguments that are logarithms of sums of exponentials."""
    return _named(op, LogSums)


@_cached
def packed_rows(op: Op) -> tuple[PackedRows, ...]:
    """Return the constraints on packed weights."""
    return tuple(c for c in _constraints(op) if isinstance(c, PackedRows))


@_cached
def packed_parts(op: Op) -> tuple[PackedPart, ...]:
    """Return the constraints on what packed weights have beside their codes."""
    return tuple(c for c in _constraints(op) if isinstance(c, PackedPart))


@_cached
def rounded(op: Op) -> tuple[str, ...]:
    """Return the arguments that the op rounds to 8 bits."""
    found = (c for c in _constraints(op) if isinstance(c, Int8))
    return tuple(dict.fromkeys(c.name for c in found if torch.float32 in c.dtypes))


@_cached
def probabilities(op: Op) -> tuple[str, ...]:
    """Return the arguments that are probabilities."""
    return _named(op, Probability)


@_cached
def flags(op: Op) -> tuple[str, ...]:
    """Return the arguments that are True or False."""
    return _named(op, Flag)


@_cached
def numbers(op: Op) -> tuple[str, ...]:
    """Return the arguments that are finite numbers."""
    return _named(op, Finite)


@_cached
def alignments(op: Op) -> tuple[str, ...]:
    """Return the arguments that place the diagonal of a causal mask, or name no mask: "none"."""
    found = (
        c for c in _constraints(op) if isinstance(c, Alignment) or (isinstance(c, OneOf) and _ALIGNED in c.choices)
    )
    return tuple(dict.fromkeys(c.name for c in found))


@_cached
def added(op: Op) -> tuple[str, ...]:
    """Return the small numbers that are added to others, such as eps: their effect is on small ones."""
    defaults = dict(zip(op.parameters, op.defaults))
    kinds = (c for c in _constraints(op) if isinstance(c, Finite) and c.at_least == 0.0)
    return tuple(dict.fromkeys(c.name for c in kinds if 0 < (defaults.get(c.name) or 0) <= _SMALL))


@_cached
def dtype_of(op: Op, name: str, wanted: torch.dtype) -> torch.dtype:
    """Return the wanted dtype where the op accepts it for an argument, else the first that it accepts."""
    for constraint in _constraints(op):
        if isinstance(constraint, DType) and constraint.name == name and wanted not in constraint.dtypes:
            return constraint.dtypes[0]
    return wanted


def _named(op: Op, kind: type[Constraint]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(c.name for c in _constraints(op) if isinstance(c, kind)))


def _constraints(op: Op) -> tuple[Constraint, ...]:
    return tuple(each.then if isinstance(each, When) else each for each in op.constraints)
