"""Calls shared by the tests of policies."""

from __future__ import annotations

from typing import Any

import torch

import fusedops

OP = "scaled_masked_softmax"

OTHER = "bias_gelu"

X = torch.ones(2, 4)


def who() -> str | None:
    return fusedops.explain(OP, X).backend


def preferences(*args: Any, **kwargs: Any) -> list[tuple[str, str, bool]]:
    return [(w.channel, w.text, w.in_effect) for w in fusedops.explain(OP, X, *args, **kwargs).preferences]
