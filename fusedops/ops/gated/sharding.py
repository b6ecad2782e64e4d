"""The rule of the gated activations for DTensors: any shards, but of a dim in which gate and up are packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.values import Sharding


def _whole(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the last dim where gate and up are packed in it: a part of it would hold others than the output's."""
    return (-1,) if given["up"] is None else ()


SHARDING = Sharding(whole_of=_whole)
