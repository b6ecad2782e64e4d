"""The rule of sample for DTensors: the rows of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Sharding
from fusedops.ops.sampling.arguments import OF_ROWS


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of the logits that each tensor's dims correspond to."""
    rows = tuple(range(-given["logits"].dim(), -1))
    return dict.fromkeys((*OF_ROWS, "token", "log_prob"), rows)


SHARDING = Sharding(whole=(-1,), dims_of=_dims_of, reason="the tokens of a row are compared with each other")
