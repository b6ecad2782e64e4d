"""A model with one norm, and what a test does with its result."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Odd(nn.Module):
    """A norm, and what a test does with its result."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.norm, self.then = nn.LayerNorm(64), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.norm(x))
