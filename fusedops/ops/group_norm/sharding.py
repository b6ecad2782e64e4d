"""The rule of group_norm for DTensors: samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Sharding


def _whole_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return all dims of x but the first."""
    return tuple(range(1 - given["x"].ndim, 0))


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the channels as the dim of weight and bias, and the samples as that of the saved values."""
    rank = given["x"].ndim
    channels = (1 - rank,)
    saved = (-rank, None)
    return {"weight": channels, "bias": channels, "mean": saved, "rstd": saved}


SHARDING = Sharding(
    whole_of=_whole_of,
    dims_of=_dims_of,
    reason="the mean and the variance of a group are those of a whole sample",
)
