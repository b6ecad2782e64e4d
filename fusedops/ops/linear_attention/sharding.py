"""The rule of linear_attention for DTensors: batch and heads. A position needs the state of those before it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fusedops._contract.constraint import is_tensor
from fusedops._contract.values import Sharding

_HEADS = -2


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of q that the dims of the other tensors correspond to: value heads to their key heads."""
    batch = -4 if given.get("cu_seqlens") is None else None  # the states of packed sequences have no batch
    states = dict.fromkeys(("initial_state", "state", "grad_state"), (batch, _HEADS, None, None))
    values = dict.fromkeys(("v", "out", "grad_out"), (-4, -3, _HEADS, None))
    decay = given.get("decay")
    of_decay = (-4, -3, _HEADS) if decay is None or decay.dim() == 3 else (-4, -3, _HEADS, -1)
    return {**states, **values, "decay": of_decay, "beta": (-4, -3, _HEADS), "cu_seqlens": (None,)}


def _whole_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dim of the heads if a rank's part would split a key head from its value heads."""
    heads, dims_of = given["q"].shape[2], _dims_of(given)
    dims = {name: dims_of.get(name, range(-each.ndim, 0)) for name, each in given.items() if is_tensor(each)}
    mesh = getattr(given["q"], "device_mesh", None)
    if mesh is None:
        return ()
    ranks = math.prod(
        mesh.size(at)
        for at in range(mesh.ndim)
        if any(
            _HEADS in dims[name] and given[name].placements[at].is_shard([*dims[name]].index(_HEADS)) for name in dims
        )
    )
    return (_HEADS,) if heads % ranks else ()


LINEAR_ATTENTION = Sharding(
    whole=(-3, -1),
    whole_of=_whole_of,
    dims_of=_dims_of,
    reason="a position needs the state after those before it, and a value head its key head: sharded positions are "
    "context parallelism, which is not this op",
)
