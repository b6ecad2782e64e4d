"""The rule of scaled_masked_softmax for DTensors: whole keys, and a causal mask that counts queries of the whole."""

from __future__ import annotations

from typing import Any

from fusedops._contract.values import Shard, Sharding
from fusedops.ops.softmax.formulas import causal_mask


def adjusted_to_shard(arguments: dict[str, Any], shard: Shard) -> dict[str, Any]:
    """Return the arguments of a part, with a causal mask that counts queries from the start of the whole."""
    first_query = shard.start[-2]
    if not arguments["causal"] or not first_query:
        return arguments
    if "x" not in arguments:
        return {**arguments, "causal": False}  # backward: y is 0 there, and the flag only saves work
    mask, later = arguments["mask"], causal_mask(arguments["x"], first_query)
    return {**arguments, "causal": False, "mask": later if mask is None else mask.bool() | later}


SHARDING = Sharding(whole=(-1,), adjust=adjusted_to_shard)
