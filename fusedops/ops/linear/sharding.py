"""The rule of linear for DTensors: rows of x, or rows of the weight, which are the columns of the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Sharding


def _shape_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the output."""
    return (*given["x"].shape[:-1], given["weight"].shape[0])


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of the output that each tensor's dims correspond to; None for K."""
    rows = tuple(range(-len(_shape_of(given)), -1))
    return {"x": (*rows, None), "weight": (-1, None), "bias": (-1,), "grad": (*rows, -1)}


SHARDING = Sharding(
    dims_of=_dims_of,
    shape_of=_shape_of,
    reason="the sum is over whole rows",
)
