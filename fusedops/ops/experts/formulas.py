"""The formulas of experts in plain torch: the order of the routed rows, the projections of one expert, its activation,
and the whole op, each expert on every token.

A *routed row* is a pair of a token and one of its K choices. A choice outside [0, E) is a sentinel: the expert is
elsewhere, and the row counts for nothing. Rows that are sorted by expert are groups, of which offsets are the ends.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fusedops._named_tuple import NamedTuple
from fusedops.constraints import Offsets
from fusedops.dtypes import arithmetic, no_autocast
from fusedops.ops.experts.arguments import GATED, ExpertsArgs, ExpertsGradArgs
from fusedops.ops.gated import geglu, swiglu


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


class Lora(NamedTuple):
    """The factors of LoRA of one weight of all experts, a (E, r, inputs) and b (E, outputs, r), or None without.

    ``scale * b[e] @ a[e]`` is added to the weight of expert e: as two products, of which the first has r outputs.
    """

    a: Tensor | None
    b: Tensor | None
    scale: float

    def added(self, product: Tensor, rows: Tensor, e: int) -> Tensor:
        """Return a product of rows with a weight, and the term of the factors."""
        if self.a is None or self.b is None:
            return product
        return product + self.scale * linear(linear(rows, self.a[e], None, False), self.b[e], None, False)

    def gradients(
        self, grad: Tensor, rows: Tensor, e: int, absent: Tensor
    ) -> tuple[Tensor | float, Tensor | None, Tensor | None]:
        """Return the gradients of the rows, of a and of b, from that of the outputs; rows of other experts are 0."""
        if self.a is None or self.b is None:
            return 0.0, None, None
        thin, of_b = linear_gradients(self.scale * grad, linear(rows, self.a[e], None, False), self.b[e], False)
        of_rows, of_a = linear_gradients(thin.masked_fill(absent, 0.0), rows, self.a[e], False)
        return of_rows, of_a, of_b


def loras_of(a: ExpertsArgs | ExpertsGradArgs) -> tuple[Lora, Lora]:
    """Return the factors of up and of down."""
    return Lora(a.up_lora, a.up_lora_b, a.lora_scale), Lora(a.down_lora, a.down_lora_b, a.lora_scale)


def experts_reference(a: ExpertsArgs) -> Tensor:
    """Compute the op in plain torch: each expert on every token, of which those that did not choose it count as 0."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    wide = a.x.to(arithmetic(a.x, a.up, a.down))
    total = wide.new_zeros(a.x.shape)
    of_up, of_down = loras_of(a)
    for e in range(a.up.shape[0]):
        chosen = a.index == e
        absent = ~chosen.any(-1, keepdim=True)
        factor = a.weights.to(wide.dtype).masked_fill(~chosen, 0.0).sum(-1, keepdim=True)
        rows = wide.masked_fill(absent, 0.0)
        h = linear(rows, a.up[e], None if a.up_bias is None else a.up_bias[e], a.transposed)
        activated = act(of_up.added(h, rows, e))
        out = linear(activated, a.down[e], None if a.down_bias is None else a.down_bias[e], a.transposed)
        out = of_down.added(out, activated, e)
        total = total + (factor * out).masked_fill(absent, 0.0)
    return total.to(a.x.dtype)


def experts_hidden(
    x: Tensor,
    index: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    transposed: bool,
    up_lora: Tensor | None,
    up_lora_b: Tensor | None,
    lora_scale: float,
) -> Tensor:
    """Compute the saved value: the up-projection of the routed rows, sorted by expert, (T * K, 2I or I), the dtype of
    x. 0 for sentinels.
    """
    order = order_of(index, up.shape[0])
    chosen = experts_of(index, up.shape[0])[order]
    rows = x.to(arithmetic(x, up, down))[order // max(index.shape[1], 1)]
    result = rows.new_zeros(rows.shape[0], up.shape[2 if transposed else 1])
    for e in range(up.shape[0]):
        of_expert = linear(rows, up[e], None if up_bias is None else up_bias[e], transposed)
        of_expert = Lora(up_lora, up_lora_b, lora_scale).added(of_expert, rows, e)
        result = of_expert.where((chosen == e)[:, None], result)
    return result.to(x.dtype)


def experts_backward(args: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weights, up, down, the biases and factors, each expert on every routed row."""
    act = Activation(args.activation, args.limit, args.alpha, args.offset, args.interleaved)
    dtype = arithmetic(args.x, args.up, args.down)
    chosen = experts_of(args.index, args.up.shape[0])
    rows, g_rows = (each.to(dtype).repeat_interleave(args.index.shape[1], 0) for each in (args.x, args.grad))
    factor = args.weights.to(dtype).reshape(-1, 1)
    dx, dfactor = rows.new_zeros(rows.shape), factor.new_zeros(factor.shape)
    of_up, of_down = loras_of(args)
    given = (args.up, args.down, args.up_bias, args.down_bias, *of_up[:2], *of_down[:2])
    parts: list[list[Tensor | None]] = []
    for e in range(args.up.shape[0]):
        absent = (chosen != e)[:, None]
        inputs, g = rows.masked_fill(absent, 0.0), g_rows.masked_fill(absent, 0.0)
        h = linear(inputs, args.up[e], None if args.up_bias is None else args.up_bias[e], args.transposed)
        a = act(of_up.added(h, inputs, e))
        da, ddown = linear_gradients(g * factor, a, args.down[e], args.transposed)
        da_added, *of_down_factors = of_down.gradients(g * factor, a, e, absent)
        out = linear(a, args.down[e], None if args.down_bias is None else args.down_bias[e], args.transposed)
        out = of_down.added(out, a, e)
        dfactor = dfactor + (g * out).sum(-1, keepdim=True).masked_fill(absent, 0.0)
        dh = act.gradient(da + da_added, of_up.added(h, inputs, e)).masked_fill(absent, 0.0)
        drows, dup = linear_gradients(dh, inputs, args.up[e], args.transposed)
        drows_added, *of_up_factors = of_up.gradients(dh, inputs, e, absent)
        dx = dx + (drows + drows_added).masked_fill(absent, 0.0)
        parts.append([dup, ddown, dh.sum(0), (g * factor).sum(0), *of_up_factors, *of_down_factors])
    dx = dx.reshape(*args.index.shape, args.x.shape[1]).sum(1)
    return (
        dx.to(args.x.dtype) if args.needs[0] else None,
        dfactor.reshape(args.weights.shape).to(args.weights.dtype) if args.needs[1] else None,
        *(
            stacked([cast("Tensor", of[at]) for of in parts], each) if args.needs[2 + at] and each is not None else None
            for at, each in enumerate(given)
        ),
    )
