"""The formulas of experts in plain torch: the order of the routed rows, the projections of one expert, its activation.

A *routed row* is a pair of a token and one of its K choices. A choice outside [0, E) is a sentinel: the expert is
elsewhere, and the row counts for nothing. Rows that are sorted by expert are groups, of which offsets are the ends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.constraints import Offsets
from fusedops.dtypes import no_autocast
from fusedops.ops.gated import geglu, swiglu

GATED = ("swiglu", "geglu", "geglu_tanh")
PLAIN = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


def experts_of(index: Tensor, experts: int) -> Tensor:
    """Return the expert of each routed row, (T * K,) int64, and ``experts`` for a sentinel."""
    flat = index.reshape(-1).long()
    return flat.masked_fill((flat < 0) | (flat >= experts), experts)


def order_of(index: Tensor, experts: int) -> Tensor:
    """Return the routed rows sorted by expert, sentinels last, (T * K,): row r is choice r % K of token r // K."""
    return torch.argsort(experts_of(index, experts), stable=True)


def valid_ends(offsets: Tensor, rows: int) -> Tensor:
    """Return the ends of groups, (E,) int64, within [0, rows]; one that falls is the end before it."""
    return Offsets.within(offsets, rows)


def group_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Return the group of each row, (rows,) int64, and E for a row past the last end."""
    number = offsets.new_ones(rows, dtype=torch.int64).cumsum(0)  # from 1; a DTensor where offsets are one
    return (number[:, None] > valid_ends(offsets, rows)).sum(-1)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return ``rows @ weight.T + bias`` of one expert in the dtype of rows, also under autocast."""
    wide = weight.to(rows.dtype)
    with no_autocast(rows.device.type):
        product = rows @ (wide if transposed else wide.t())
    return product if bias is None else product + bias.to(rows.dtype)


def linear_gradients(grad: Tensor, rows: Tensor, weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and of the weight of :func:`linear`."""
    wide = weight.to(rows.dtype)
    with no_autocast(rows.device.type):
        of_rows = grad @ (wide.t() if transposed else wide)
        of_weight = rows.t() @ grad if transposed else grad.t() @ rows
    return of_rows, of_weight


def stacked(parts: list[Tensor], like: Tensor) -> Tensor:
    """Return the gradients of all experts as one tensor, in the dtype of ``like``."""
    return torch.stack(parts).to(like.dtype) if parts else torch.zeros_like(like)


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
