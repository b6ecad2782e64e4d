"""experts in plain torch: the routed rows sorted by expert, then each expert's products on its own rows alone.

The passes between the products run on a panel: the rows of several experts, as many as PANEL, so that few tokens cost
few calls and many take little memory. On a CPU the products are in float32 (float64 for float64). Elsewhere those of
16-bit tensors are in 16 bits, and the number of rows of each expert is read from the device once in each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic, no_autocast
from fusedops.ops.experts.arguments import ExpertsArgs, ExpertsGradArgs
from fusedops.ops.experts.formulas import Activation, experts_of, order_of

PANEL = 2048  # rows of a panel, at most, unless one expert has more


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

    def panels(self) -> Iterator[tuple[slice, list[tuple[int, slice]]]]:
        """Yield the rows of each panel, with its experts that have rows and the rows of each within the panel."""
        first = start = 0
        members: list[tuple[int, slice]] = []
        for e, end in enumerate(self.ends):
            if members and end - first > PANEL:
                yield slice(first, start), members
                first, members = start, []
            if end > start:
                members.append((e, slice(start - first, end - first)))
            start = end
        if members:
            yield slice(first, start), members

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


def experts(a: ExpertsArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it, and keep the up-projections of the sorted rows."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    x, index = a.x, a.index
    with no_autocast(x.device.type):
        wide = arithmetic(x, a.up, a.down)
        rows = route(index, a.up.shape[0])
        width = a.up.shape[2 if a.transposed else 1]
        slots = x.new_zeros((index.numel(), x.shape[1]), dtype=wide)
        kept = x.new_zeros((index.numel(), width)) if save else None
        factor = a.weights.reshape(-1, 1).to(wide)[rows.order]
        of_up, of_down = product_dtype(x, a.up, wide), product_dtype(x, a.down, wide)
        for at, members in rows.panels():
            inputs = x[rows.token[at]].to(of_up)
            h = x.new_empty((inputs.shape[0], width), dtype=wide)
            for e, part in members:
                _linear(inputs[part], a.up[e], a.up_bias, e, h[part], a.transposed)
            if kept is not None:  # in the dtype of x
                kept[at] = h
            activated = act(h).to(of_down)
            out = x.new_empty((h.shape[0], x.shape[1]), dtype=wide)
            for e, part in members:
                _linear(activated[part], a.down[e], a.down_bias, e, out[part], a.transposed)
            slots[rows.order[at]] = out.mul_(factor[at])
        return _sum_of_choices(slots, index, x), kept


def experts_backward(a: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients from the inputs and the up-projections of forward, each where it is wanted."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    x, index, up, down, down_bias = a.x, a.index, a.up, a.down, a.down_bias
    with no_autocast(x.device.type):
        wide = arithmetic(x, up, down)
        rows = route(index, up.shape[0])
        factor = a.weights.reshape(-1, 1).to(wide)[rows.order]
        slots = x.new_zeros((index.numel(), x.shape[1]), dtype=wide) if a.needs[0] else None
        dweights = x.new_zeros(index.numel(), dtype=wide) if a.needs[1] else None
        like = (up, down, a.up_bias, down_bias)
        of = [None if t is None or not need else torch.zeros_like(t, memory_format=torch.contiguous_format)
              for t, need in zip(like, a.needs[2:])]  # fmt: skip
        of_up, of_down = product_dtype(x, up, wide), product_dtype(x, down, wide)
        of_hidden = a.needs[0] or of[0] is not None or of[2] is not None
        for at, members in rows.panels():
            token = rows.token[at]
            inputs = x[token].to(of_up)
            g = a.grad[token].to(wide)
            h = a.hidden[at].to(wide)
            activated = act(h)
            da, narrow = torch.empty_like(activated), g.to(of_down)
            for e, part in members:
                write_product(narrow[part], oriented(down[e], narrow.dtype, not a.transposed), da[part])
            if dweights is not None:
                total = (da * activated).sum(-1)
                if down_bias is not None:
                    for e, part in members:
                        total[part] += g[part] @ down_bias[e].to(wide)
                dweights[rows.order[at]] = total
            weighted = g.mul_(factor[at])
            write_gradients(of[1], of[3], members, weighted, activated, of_down, a.transposed)
            if not of_hidden:
                continue
            dh = act.gradient(da.mul_(factor[at]), h)
            write_gradients(of[0], of[2], members, dh, inputs, of_up, a.transposed)
            if slots is not None:
                product, narrow = x.new_empty((dh.shape[0], x.shape[1]), dtype=wide), dh.to(of_up)
                for e, part in members:
                    write_product(narrow[part], oriented(up[e], narrow.dtype, not a.transposed), product[part])
                slots[rows.order[at]] = product
        dx = None if slots is None else _sum_of_choices(slots, index, x)
        return dx, None if dweights is None else dweights.view(a.weights.shape).to(a.weights.dtype), *of


def write_gradients(
    weight: Tensor | None,
    bias: Tensor | None,
    members: list[tuple[int, slice]],
    grad: Tensor,
    inputs: Tensor,
    dtype: torch.dtype,
    transposed: bool,
) -> None:
    """Write the gradients of the weight and the bias of each expert, of which grad is the gradient of the outputs.

    The products are in ``dtype``.
    """
    if bias is not None:
        for e, part in members:
            bias[e] = grad[part].sum(0)
    if weight is None:
        return
    first, second = grad.to(dtype), inputs.to(dtype)
    if transposed:
        first, second = second, first
    for e, part in members:
        write_product(first[part].t(), second[part], weight[e])


def write_product(first: Tensor, second: Tensor, out: Tensor) -> None:
    """Write ``first @ second``."""
    if out.dtype is first.dtype:
        torch.mm(first, second, out=out)
    else:
        out.copy_(first @ second)


def product_dtype(x: Tensor, weight: Tensor, wide: torch.dtype) -> torch.dtype:
    """Return the dtype of a product with a weight."""
    return wide if x.device.type == "cpu" or wide is torch.float64 else torch.promote_types(x.dtype, weight.dtype)


def oriented(weight: Tensor, dtype: torch.dtype, as_it_is: bool) -> Tensor:
    """Return a weight of one expert, or its transpose, in a dtype."""
    wide = weight.to(dtype)
    return wide if as_it_is else wide.t()


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None, e: int, out: Tensor, transposed: bool) -> None:
    """Write ``rows @ weight.T + bias[e]``."""
    write_product(rows, oriented(weight, rows.dtype, transposed), out)
    if bias is not None:
        out += bias[e].to(out.dtype)


def _sum_of_choices(slots: Tensor, index: Tensor, x: Tensor) -> Tensor:
    """Return the sum over the choices of each token, in their order: (T, H), the dtype of x."""
    choices = slots.view(*index.shape, x.shape[1])
    if index.shape[1] == 0:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    total = choices[:, 0]
    for k in range(1, index.shape[1]):
        total = total + choices[:, k] if k == 1 else total.add_(choices[:, k])
    return total.to(x.dtype).contiguous()
