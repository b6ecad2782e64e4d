"""The rule of rotary_embedding for DTensors: heads are whole, and cos and sin are sharded with the positions of q."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Sharding


def dims_of_angles(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of q that the dims of cos and sin correspond to."""
    seq_dim, rank = given["seq_dim"], given["cos"].dim()
    dims = (*range(-rank - 1, -3), seq_dim, -1)
    return {"cos": dims, "sin": dims}


SHARDING = Sharding(whole=(-1,), dims_of=dims_of_angles)
