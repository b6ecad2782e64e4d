"""The rules for DTensors. experts: tokens may be sharded, or experts: a rank then computes its own for all tokens, and
the output is the sum over the ranks. grouped_matmul: offsets count the rows of the whole, so that the columns of the
output may be sharded, and no rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Shard, Sharding
from fusedops.ops.experts.arguments import LORA, PACKED_PARTS

_PARTS = [f"{name}_{part}" for name in ("up", "down") for part in PACKED_PARTS]  # of packed weights


def _shape_of_experts(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return (E, T, H): each expert's term for each token, of which the output is the sum."""
    return (given["up"].shape[0], *given["x"].shape)


def _dims_of_experts(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dim of (E, T, H) that each dim of the other tensors goes with."""
    of_experts = {
        name: (-3, *(None,) * rank) for name, rank in (("up", 2), ("down", 2), ("up_bias", 1), ("down_bias", 1))
    }
    parts = [(name, given.get(name)) for name in _PARTS]
    of_parts = {name: (-3, *(None,) * (each.dim() - 1)) for name, each in parts if each is not None}
    of_experts |= dict.fromkeys(LORA, (-3, None, None))
    tokens = {"index": (-2, None), "weights": (-2, None), "hidden": (None, None)}
    return {**tokens, **of_experts, **of_parts}


def _of_own_experts(given: dict[str, Any], shard: Shard) -> dict[str, Any]:
    """Return a rank's arguments, with the index counted from its first expert: those of others are sentinels."""
    first = shard.start[0]
    return {**given, "index": given["index"] - first} if first else given


EXPERTS = Sharding(
    whole=(-1,), dims_of=_dims_of_experts, shape_of=_shape_of_experts, adjust=_of_own_experts, summed=True
)


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
