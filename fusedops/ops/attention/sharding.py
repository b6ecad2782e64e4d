"""The rules of attention for DTensors: batch and heads; for parts of one, all dims but the last; for packed sequences,
heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fusedops._contract.constraint import is_tensor
from fusedops._contract.values import Sharding


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of q that the dims of lse and of its gradient correspond to."""
    return dict.fromkeys(("lse", "grad_lse"), (-4, -3, -2))


def _whole_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dim of the heads if a rank's part would split a group: a group's query heads share a key head."""
    heads = given["k"].shape[1]
    if heads <= 1:
        return ()  # it is whole on each rank
    # a mask or a gradient that is sharded alone cuts the other tensors too
    dims = {name: _dims_of(given).get(name, range(-each.ndim, 0)) for name, each in given.items() if is_tensor(each)}
    mesh = given["k"].device_mesh
    placements = {name: given[name].placements for name in dims}
    ranks = math.prod(
        mesh.size(at)
        for at in range(mesh.ndim)
        if any(-3 in dims[name] and each[at].is_shard(dims[name].index(-3)) for name, each in placements.items())
    )
    return (-3,) if heads % ranks else ()


SHARDING = Sharding(
    whole=(-2, -1),
    whole_of=_whole_of,
    dims_of=_dims_of,
    reason="a row needs all its keys, and a group all its query heads: sharded keys are context parallelism, which "
    "is not this op",
)


def _dims_of_lse(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of out_a that the dims of each lse and of its gradient correspond to."""
    rows = tuple(range(-given["out_a"].ndim, -1))
    return dict.fromkeys(("lse_a", "lse_b", "lse", "grad_lse"), rows)


MERGE = Sharding(whole=(-1,), dims_of=_dims_of_lse, reason="a row needs all its columns")


def _dims_of_packed(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of q that the dims of lse and of its gradient correspond to."""
    return dict.fromkeys(("lse", "grad_lse"), (-3, -2))


def _whole_of_packed(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dim of the heads if a rank's part would split a group: a group's query heads share a key head."""
    heads = given["k"].shape[1]
    if heads <= 1:
        return ()
    mesh = given["k"].device_mesh
    cut = [each.placements for name, each in given.items() if is_tensor(each) and not name.startswith("cu_seqlens")]
    ranks = math.prod(mesh.size(at) for at in range(mesh.ndim) if any(each[at].is_shard(1) for each in cut))
    return (-2,) if heads % ranks else ()


PACKED = Sharding(
    whole=(-3, -1),
    whole_of=_whole_of_packed,
    dims_of=_dims_of_packed,
    replicated=("cu_seqlens_q", "cu_seqlens_k"),
    reason="a sequence needs all its keys, and a group all its query heads",
)
