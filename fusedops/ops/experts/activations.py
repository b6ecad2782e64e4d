"""The activations of experts: gated ones take a packed up-projection, of twice the width of the result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.ops.gated import geglu, swiglu

GATED = ("swiglu", "geglu", "geglu_tanh")
PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


class Activation(NamedTuple):
    """An activation and its options. The docstring of the op has their meaning."""

    name: str
    limit: float | None
    alpha: float
    offset: float
    interleaved: bool

    @property
    def gated(self) -> bool:
        """True where the activation takes gate and up, packed in the last dim."""
        return self.name in GATED

    def __call__(self, h: Tensor) -> Tensor:
        """Return the activation of h (..., 2I) or (..., I): (..., I), in the dtype of h."""
        if self.name == "swiglu":
            return swiglu.reference(h, None, self.limit, self.alpha, self.offset, self.interleaved)
        if self.name.startswith("ge"):
            one = None if self.gated else torch.ones_like(h)
            return geglu.reference(h, one, self._approximate, self.interleaved)
        if self.name == "silu":
            return swiglu.reference(h, torch.ones_like(h), None, 1.0, 0.0, False)
        positive = h.relu()
        return positive if self.name == "relu" else positive.square()

    def gradient(self, grad: Tensor, h: Tensor) -> Tensor:
        """Return the gradient of h from the gradient of the activation, (..., I)."""
        wanted = (True, False)
        if self.name == "swiglu":
            options = (self.limit, self.alpha, self.offset, self.interleaved)
            result = swiglu.backward(grad, h, None, *options, wanted)[0]
        elif self.name.startswith("ge"):
            one = None if self.gated else torch.ones_like(h)
            result = geglu.backward(grad, h, one, self._approximate, self.interleaved, wanted)[0]
        elif self.name == "silu":
            result = swiglu.backward(grad, h, torch.ones_like(h), None, 1.0, 0.0, False, wanted)[0]
        else:
            slope = (h > 0).to(h.dtype) if self.name == "relu" else 2.0 * h.relu()
            result = grad * slope
        assert result is not None
        return result

    @property
    def _approximate(self) -> str:
        return "tanh" if self.name.endswith("tanh") else "none"
