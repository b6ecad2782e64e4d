"""experts in plain torch: the routed rows sorted by expert, then each expert's products on its own rows alone.

The passes between the products run on a panel: the rows of several experts, as many as PANEL, so that few tokens cost
few calls and many take little memory. On a CPU the products are in float32 (float64 for float64). Elsewhere those of
16-bit tensors are in 16 bits, and the number of rows of each expert is read from the device once in each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic, no_autocast
from fusedops.ops.experts.arguments import (
    ExpertsArgs,
    ExpertsGradArgs,
    QuantizedExpertsArgs,
    QuantizedExpertsGradArgs,
)
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


class Weight(Protocol):
    """The weights of all experts, (E, N, K), by their products."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products."""
        ...

    def write_product(self, rows: Tensor, e: int, out: Tensor) -> None:
        """Write ``rows @ weight[e].T``."""
        ...

    def write_gradient(self, grad: Tensor, e: int, out: Tensor) -> None:
        """Write ``grad @ weight[e]``."""
        ...


class Floats(NamedTuple):
    """Weights as they are."""

    weight: Tensor
    dtype: torch.dtype
    transposed: bool

    def write_product(self, rows: Tensor, e: int, out: Tensor) -> None:
        write_product(rows, oriented(self.weight[e], self.dtype, self.transposed), out)

    def write_gradient(self, grad: Tensor, e: int, out: Tensor) -> None:
        write_product(grad, oriented(self.weight[e], self.dtype, not self.transposed), out)


class Adapted(NamedTuple):
    """Weights with factors of LoRA, whose products are added; the sum of weight and factors is never built."""

    weight: Weight
    a: Tensor
    b: Tensor
    scale: float

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def write_product(self, rows: Tensor, e: int, out: Tensor) -> None:
        self.weight.write_product(rows, e, out)
        out += self._thin(rows, e) @ self.b[e].to(self.dtype).t()

    def write_gradient(self, grad: Tensor, e: int, out: Tensor) -> None:
        self.weight.write_gradient(grad, e, out)
        out += self._thin_gradient(grad, e) @ self.a[e].to(self.dtype)

    def write_factor_gradients(
        self, grad: Tensor, inputs: Tensor, e: int, of_a: Tensor | None, of_b: Tensor | None
    ) -> None:
        """Write the gradients of the factors of an expert, of which grad is the gradient of the outputs."""
        if of_a is not None:
            write_product(self._thin_gradient(grad, e).t(), inputs, of_a[e])
        if of_b is not None:
            write_product(grad.t(), self._thin(inputs, e), of_b[e])

    def _thin(self, rows: Tensor, e: int) -> Tensor:
        return (rows @ self.a[e].to(self.dtype).t()).mul_(self.scale)

    def _thin_gradient(self, grad: Tensor, e: int) -> Tensor:
        return (grad @ self.b[e].to(self.dtype)).mul_(self.scale)


def adapted(
    a: ExpertsArgs | ExpertsGradArgs | QuantizedExpertsArgs | QuantizedExpertsGradArgs, up: Weight, down: Weight
) -> tuple[Weight, Weight]:
    """Return the weights with the factors of a call."""
    if a.up_lora is not None and a.up_lora_b is not None:
        up = Adapted(up, a.up_lora, a.up_lora_b, a.lora_scale)
    if a.down_lora is not None and a.down_lora_b is not None:
        down = Adapted(down, a.down_lora, a.down_lora_b, a.lora_scale)
    return up, down


def experts(a: ExpertsArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it, and keep the up-projections of the sorted rows."""
    wide = arithmetic(a.x, a.up, a.down)
    up, down = (Floats(each, product_dtype(a.x, each, wide), a.transposed) for each in (a.up, a.down))
    return forward(a, wide, a.up.shape[2 if a.transposed else 1], *adapted(a, up, down), save)


def forward(
    a: ExpertsArgs | QuantizedExpertsArgs, wide: torch.dtype, width: int, up: Weight, down: Weight, save: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the op, and the up-projections if they are saved.

    Args:
        a: the arguments.
        wide: the dtype of the arithmetic.
        width: the columns of an up-projection.
        up: the weights.
        down: the weights.
        save: True where the up-projections are saved.
    """
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    x, index = a.x, a.index
    with no_autocast(x.device.type):
        rows = route(index, a.up.shape[0])
        slots = x.new_zeros((index.numel(), x.shape[1]), dtype=wide)
        kept = x.new_zeros((index.numel(), width)) if save else None
        factor = a.weights.reshape(-1, 1).to(wide)[rows.order]
        for at, members in rows.panels():
            inputs = x[rows.token[at]].to(up.dtype)
            h = x.new_empty((inputs.shape[0], width), dtype=wide)
            for e, part in members:
                _linear(inputs[part], up, a.up_bias, e, h[part])
            if kept is not None:  # in the dtype of x
                kept[at] = h
            activated = act(h).to(down.dtype)
            out = x.new_empty((h.shape[0], x.shape[1]), dtype=wide)
            for e, part in members:
                _linear(activated[part], down, a.down_bias, e, out[part])
            slots[rows.order[at]] = out.mul_(factor[at])
        return _sum_of_choices(slots, index, x), kept


def experts_backward(a: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients from the inputs and the up-projections of forward, each where it is wanted."""
    wide = arithmetic(a.x, a.up, a.down)
    up, down = (Floats(each, product_dtype(a.x, each, wide), a.transposed) for each in (a.up, a.down))
    given = (a.up, a.down, a.up_bias, a.down_bias, *factors_of(a))
    of = zeros_of(given, a.needs[2:])
    return (*backward(a, wide, *adapted(a, up, down), a.needs[:2], of, a.transposed), *of)


def factors_of(a: ExpertsGradArgs | QuantizedExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Return the factors of LoRA in the order of their gradients."""
    return (a.up_lora, a.up_lora_b, a.down_lora, a.down_lora_b)


def zeros_of(tensors: tuple[Tensor | None, ...], needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Return zeros for the gradients that are wanted."""
    return tuple(
        None if each is None or not need else torch.zeros_like(each, memory_format=torch.contiguous_format)
        for each, need in zip(tensors, needs)
    )


def backward(
    a: ExpertsGradArgs | QuantizedExpertsGradArgs,
    wide: torch.dtype,
    up: Weight,
    down: Weight,
    needs: tuple[bool, ...],
    of: tuple[Tensor | None, ...],
    transposed: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and weights, where they are wanted, and write those of the weights of experts.

    Args:
        a: the arguments.
        wide: the dtype of the arithmetic.
        up: the weights.
        down: the weights.
        needs: True for each of x and weights that is wanted.
        of: the gradients of up, down, the biases and the factors, zeros, or None where they are not wanted.
        transposed: as of the op.
    """
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    x, index, down_bias = a.x, a.index, a.down_bias
    with no_autocast(x.device.type):
        rows = route(index, a.up.shape[0])
        factor = a.weights.reshape(-1, 1).to(wide)[rows.order]
        slots = x.new_zeros((index.numel(), x.shape[1]), dtype=wide) if needs[0] else None
        dweights = x.new_zeros(index.numel(), dtype=wide) if needs[1] else None
        of_hidden = needs[0] or any(of[at] is not None for at in (0, 2, 4, 5))
        for at, members in rows.panels():
            token = rows.token[at]
            inputs = x[token].to(up.dtype)
            g = a.grad[token].to(wide)
            h = a.hidden[at].to(wide)
            activated = act(h)
            da, narrow = torch.empty_like(activated), g.to(down.dtype)
            for e, part in members:
                down.write_gradient(narrow[part], e, da[part])
            if dweights is not None:
                total = (da * activated).sum(-1)
                if down_bias is not None:
                    for e, part in members:
                        total[part] += g[part] @ down_bias[e].to(wide)
                dweights[rows.order[at]] = total
            weighted = g.mul_(factor[at])
            write_gradients(of[1], of[3], members, weighted, activated, down.dtype, transposed)
            _write_factor_gradients(of[6:], members, weighted, activated, down)
            if not of_hidden:
                continue
            dh = act.gradient(da.mul_(factor[at]), h)
            write_gradients(of[0], of[2], members, dh, inputs, up.dtype, transposed)
            _write_factor_gradients(of[4:6], members, dh, inputs, up)
            if slots is not None:
                product, narrow = x.new_empty((dh.shape[0], x.shape[1]), dtype=wide), dh.to(up.dtype)
                for e, part in members:
                    up.write_gradient(narrow[part], e, product[part])
                slots[rows.order[at]] = product
        dx = None if slots is None else _sum_of_choices(slots, index, x)
        return dx, None if dweights is None else dweights.view(a.weights.shape).to(a.weights.dtype)


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


def _write_factor_gradients(
    of: tuple[Tensor | None, ...], members: list[tuple[int, slice]], grad: Tensor, inputs: Tensor, weight: Weight
) -> None:
    """Write the gradients of the factors of each expert, if the weight has factors whose gradients are wanted."""
    if not isinstance(weight, Adapted) or (of[0] is None and of[1] is None):
        return
    first, second = grad.to(weight.dtype), inputs.to(weight.dtype)
    for e, part in members:
        weight.write_factor_gradients(first[part], second[part], e, *of)


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


def _linear(rows: Tensor, weight: Weight, bias: Tensor | None, e: int, out: Tensor) -> None:
    """Write ``rows @ weight[e].T + bias[e]``."""
    weight.write_product(rows, e, out)
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
