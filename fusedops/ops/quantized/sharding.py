"""The rule of linear layers for DTensors: rows of x, or rows of the packed weight, the columns of the output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Sharding


def _shape_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the output."""
    if "grad" in given:
        return tuple(given["grad"].shape)
    return (*given["x"].shape[:-1], given["packed" if "packed" in given else "weight"].shape[0])


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of the output that each tensor's dims correspond to; None for K and the bytes of a row."""
    rows = tuple(range(-len(_shape_of(given)), -1))
    dims = {"x": (*rows, None), "packed": (-1, None), "bias": (-1,), "grad": (*rows, -1), "global_scale": ()}
    scales = given.get("scales")
    if scales is None:
        return dims
    if scales.shape[0] == given["packed"].shape[0]:
        return {**dims, "scales": (-1, None), "zeros": (-1, None)}
    if scales.shape[0] == 1:
        return {**dims, "scales": (None, None)}
    # blocks of 128 rows, which a part of the rows may cut
    return {**dims, "scales": (None, None), "packed": (None, None), "bias": (None,), "grad": (*rows, None)}


def _int8_dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the same for int8_linear."""
    dims = _dims_of(given)
    rows = dims["x"][:-1]
    return {**dims, "x_scale": rows, "weight": (-1, None), "weight_scale": (-1,), "smooth": (None,)}


SHARDING = Sharding(
    dims_of=_dims_of,
    shape_of=_shape_of,
    reason="the sum is over whole rows",
)
INT8_SHARDING = SHARDING._replace(dims_of=_int8_dims_of)
