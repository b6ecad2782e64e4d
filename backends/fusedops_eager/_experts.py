"""experts in plain torch: the routed rows sorted by expert, then each expert's products on its own rows alone.

On a CPU the products are in float32 (float64 for float64). Elsewhere they run in the promoted dtype of x and the
weight, and the number of rows of each expert is read from the device once in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.ops.experts.formulas import Activation, arithmetic, experts_of, order_of


class Functions(NamedTuple):
    """The passes between the products: ``forward(h) -> a`` and ``backward(da, h) -> dh``."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


class Experts(NamedTuple):
    """The weights of the experts.

    Attributes:
        up: (E, 2I or I, H), or transposed.
        down: (E, H, I), or transposed.
        up_bias: (E, 2I or I) or None.
        down_bias: (E, H) or None.
        transposed: True where the last two dims of the weights are swapped.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    transposed: bool

    @property
    def rows_of_up(self) -> int:
        """The width of an up-projection."""
        return self.up.shape[2 if self.transposed else 1]


class Route(NamedTuple):
    """The routed rows sorted by expert.

    Attributes:
        order: (T * K,), the routed row at each sorted position; sentinels last.
        token: (T * K,), the token of each sorted row.
        ends: for each expert the end of its rows.
    """

    order: Tensor
    token: Tensor
    ends: list[int]

    def segments(self) -> Iterator[tuple[int, slice]]:
        """Yield the experts that have rows, each with its rows."""
        start = 0
        for e, end in enumerate(self.ends):
            if end > start:
                yield e, slice(start, end)
            start = end

    @property
    def total(self) -> int:
        """The number of rows that have an expert."""
        return self.ends[-1] if self.ends else 0


def route(index: Tensor, experts: int) -> Route:
    """Sort the routed rows by expert."""
    order = order_of(index, experts)
    if index.is_meta:  # no data: all rows at the first expert
        ends: list[int] = [index.numel()] * experts
    else:
        counts = torch.bincount(experts_of(index, experts), minlength=experts + 1)
        ends = cast("Any", counts.cumsum(0)).tolist()[:experts]
    return Route(order, order // max(index.shape[1], 1), ends)


def forward(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, functions: Functions, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the output, and the up-projections of the sorted rows where they are saved."""
    with no_autocast(x.device.type):
        wide = arithmetic(x, experts.up, experts.down)
        rows = route(index, experts.up.shape[0])
        slots = x.new_zeros((index.numel(), x.shape[1]), dtype=wide)
        kept = x.new_zeros((index.numel(), experts.rows_of_up)) if save else None
        factor = weights.reshape(-1, 1).to(wide)[rows.order]
        for e, at in rows.segments():
            h = _linear(_narrow(x[rows.token[at]], x, experts.up), experts.up[e], experts.up_bias, e, wide, experts)
            if kept is not None:
                kept[at] = h
            out = _linear(
                _narrow(functions.forward(h), x, experts.down),
                experts.down[e], experts.down_bias, e, wide, experts,
            )  # fmt: skip
            slots[rows.order[at]] = out.mul_(factor[at])
        return _sum_of_choices(slots, index, x), kept


def backward(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    experts: Experts,
    hidden: Tensor,
    functions: Functions,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weights, up, down and the biases, each where it is wanted."""
    with no_autocast(x.device.type):
        up, down = experts.up, experts.down
        wide = arithmetic(x, up, down)
        rows = route(index, up.shape[0])
        factor = weights.reshape(-1, 1).to(wide)[rows.order]
        slots = x.new_zeros((index.numel(), x.shape[1]), dtype=wide) if needs[0] else None
        dweights = x.new_zeros(index.numel(), dtype=wide) if needs[1] else None
        like = (up, down, experts.up_bias, experts.down_bias)
        of = [None if t is None or not need else torch.zeros_like(t, memory_format=torch.contiguous_format)
              for t, need in zip(like, needs[2:])]  # fmt: skip
        of_hidden = needs[0] or of[0] is not None or of[2] is not None
        for e, at in rows.segments():
            token = rows.token[at]
            inputs = _narrow(x[token], x, up)
            g = grad[token].to(wide)
            h = hidden[at].to(wide)
            a = functions.forward(h)
            da = _narrow(g, x, down) @ _oriented(down[e], _dtype(x, down), not experts.transposed)
            da = da.to(wide)
            if dweights is not None:
                total = (da * a).sum(-1)
                if experts.down_bias is not None:
                    total += g @ experts.down_bias[e].to(wide)
                dweights[rows.order[at]] = total
            weighted = g.mul_(factor[at])
            _write_gradient(of[1], e, weighted, a, x, experts)
            if of[3] is not None:
                of[3][e] = weighted.sum(0)
            if not of_hidden:
                continue
            dh = functions.backward(da.mul_(factor[at]), h)
            _write_gradient(of[0], e, dh, inputs, x, experts)
            if of[2] is not None:
                of[2][e] = dh.sum(0)
            if slots is not None:
                product = _narrow(dh, x, up) @ _oriented(up[e], _dtype(x, up), not experts.transposed)
                slots[rows.order[at]] = product.to(wide)
        dx = None if slots is None else _sum_of_choices(slots, index, x)
        return dx, None if dweights is None else dweights.view(weights.shape).to(weights.dtype), *of


def _write_gradient(of: Tensor | None, e: int, grad: Tensor, inputs: Tensor, x: Tensor, experts: Experts) -> None:
    """Write the gradient of an expert's weight, of which grad is the gradient of the outputs."""
    if of is None:
        return
    first, second = _narrow(grad, x, of), _narrow(inputs, x, of)
    if experts.transposed:
        first, second = second, first
    if of.dtype is first.dtype:
        torch.mm(first.t(), second, out=of[e])
    else:
        of[e] = first.t() @ second


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of a product with a weight."""
    common = torch.promote_types(x.dtype, weight.dtype)
    return compute_dtype(common) if x.device.type == "cpu" else common


def _narrow(rows: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return rows in the dtype of a product with a weight."""
    return rows.to(_dtype(x, weight))


def _oriented(weight: Tensor, dtype: torch.dtype, as_it_is: bool) -> Tensor:
    """Return a weight of one expert, or its transpose, in a dtype."""
    wide = weight.to(dtype)
    return wide if as_it_is else wide.t()


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, e: int, wide: torch.dtype, experts: Experts) -> Tensor:
    """Return ``rows @ weight.T + bias[e]`` in the dtype of the arithmetic."""
    product = (rows @ _oriented(weight, rows.dtype, experts.transposed)).to(wide)
    return product if bias is None else product.add_(bias[e].to(wide))


def _sum_of_choices(slots: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """Return the sum over the choices of each token, in their order: (T, H), the dtype of x."""
    choices = slots.view(*index.shape, x.shape[1])
    if index.shape[1] == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    total = choices[:, 0]
    for k in range(1, index.shape[1]):
        total = total + choices[:, k] if k == 1 else total.add_(choices[:, k])
    return total.to(x.dtype).contiguous()


def functions_of(activation: Activation) -> Functions:
    """Return the passes of an activation in plain torch."""
    return Functions(activation, activation.gradient)
