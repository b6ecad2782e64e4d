"""The rule of experts for DTensors: tokens may be sharded; each rank has all the weights of its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Sharding


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dim of x that each dim of the other tensors goes with."""
    whole = {name: (None,) * rank for name, rank in (("up", 3), ("down", 3), ("up_bias", 2), ("down_bias", 2))}
    return {"index": (-2, None), "weights": (-2, None), "hidden": (-2, None), **whole}


SHARDING = Sharding(whole=(-1,), dims_of=_dims_of)
