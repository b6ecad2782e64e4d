"""The rules for DTensors. experts: tokens may be sharded; each rank has all the weights of its experts. grouped_matmul:
offsets count the rows of the whole, so that the columns of the output may be sharded, and no rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Sharding


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dim of x that each dim of the other tensors goes with."""
    whole = {name: (None,) * rank for name, rank in (("up", 3), ("down", 3), ("up_bias", 2), ("down_bias", 2))}
    return {"index": (-2, None), "weights": (-2, None), "hidden": (-2, None), **whole}


SHARDING = Sharding(whole=(-1,), dims_of=_dims_of)


def _shape_of_product(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the output."""
    return (given["x"].shape[0], given["weight"].shape[2 if given["transposed"] else 1])


def _dims_of_product(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of the output that each tensor's dims correspond to; None for experts, K and the rows of x."""
    weight = (None, None, -1) if given["transposed"] else (None, -1, None)
    return {"x": (None, None), "weight": weight, "offsets": (None,), "bias": (None, -1)}


GROUPED_MATMUL = Sharding(
    whole=(-2,),
    dims_of=_dims_of_product,
    shape_of=_shape_of_product,
    reason="offsets count the rows of the whole",
)
