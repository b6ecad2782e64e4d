"""The rule of the causal convolution for DTensors: batches and channels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Sharding


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dim of x that each dim of the other tensors goes with; None for taps, states and bounds."""
    batch = -3 if given["cu_seqlens"] is None else None  # of packed sequences x has one batch
    state = (batch, -2, None)
    of_state = state if given["return_state"] else (None,)
    return {
        "weight": (-2, None),
        "bias": (-2,),
        "cu_seqlens": (None,),
        "initial_state": state,
        "state": of_state,
        "grad_state": of_state,
    }


SHARDING = Sharding(
    whole=(-1,),
    dims_of=_dims_of,
    reason="a position needs the inputs before it: sharded positions are context parallelism, which is not this op",
)
