"""The two directions of an op, and how a call of one is named in messages."""

from __future__ import annotations

from typing import Literal

Direction = Literal["forward", "backward"]


def call_name(op: str, direction: Direction) -> str:
    """Return ``"rms_norm"`` for a forward call and ``"rms_norm backward"`` for a backward call."""
    return op if direction == "forward" else f"{op} {direction}"
