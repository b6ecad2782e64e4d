"""The error bounds of experts and grouped_matmul: of sums of products, and of an activation whose argument is off.

A sum of products is off by ``absolute`` times the root of the sum of their squares, as its roundings have no common
sign. The same holds for a sum of terms that are off themselves, such as numbers that were rounded to 16 bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops._contract.evidence import Tolerance, finite_size, tolerances
from fusedops.dtypes import STORAGE, arithmetic
from fusedops.ops.experts.arguments import (
    ExpertsArgs,
    ExpertsGradArgs,
    QuantizedExpertsArgs,
    QuantizedExpertsGradArgs,
)
from fusedops.ops.experts.formulas import Activation, Lora, experts_of, group_of_rows, loras_of, order_of
from fusedops.ops.experts.quantized_experts import gradients_with_unpacked, with_unpacked, without_weights
from fusedops.ops.gated.formulas import split

TOLERANCE = tolerances((2e-6, 2e-6), (1e-14, 1e-12))
GRADIENT_TOLERANCE = {**TOLERANCE, torch.float32: Tolerance(2e-6, 4e-6)}

_SPREAD = 2.0  # the largest of many sums of errors, over the root of the sum of their squares
_TERMS = 2**10  # of a sum: of more, roundings are of larger numbers
_SLOPE = 1.2  # at most, of silu and GELU
_TOGETHER = 2**16  # elements of a tensor of several experts


class Narrow(NamedTuple):
    """The dtype of x, to which kernels may round what is computed in a wider one.

    Attributes:
        share: by which a rounded number is off at most; 0 where the arithmetic is in the dtype of x.
        least: by which its smallest numbers are off; 0 as ``share``.
        largest: the size from which a number may overflow in it.
        eps: of the arithmetic.
    """

    share: float
    least: float
    largest: float
    eps: float

    def rounding(self, numbers: Tensor) -> Tensor:
        """Return by how much numbers are off at most once they are rounded."""
        return self.share * finite_size(numbers) + self.least


def narrow_of(x: Tensor, *weights: Tensor) -> Narrow:
    """Return what a rounding to the dtype of x means."""
    info, wide = torch.finfo(x.dtype), arithmetic(x, *weights)
    rounds = wide is not x.dtype
    return Narrow(rounds * info.eps / 2, rounds * STORAGE[x.dtype].smallest_step, info.max / 2, torch.finfo(wide).eps)


def _of_equal_terms(eps: float, one: Tensor, other: Tensor) -> Tensor:
    """Return the error of ``one @ other`` where terms are equal: added one by one, their roundings have one sign.

    It is small beside other errors where terms cancel out, as their roundings then do. eps: of the arithmetic.
    """
    one, other = (each.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for each in (one, other))
    equal = (one @ other).square() / (one.abs() @ other.abs())
    return 0.25 * eps * one.shape[-1] * equal.nan_to_num(nan=0.0)  # 0 / 0


def _of_arithmetic(absolute: float, x: Tensor, *weights: Tensor) -> float:
    """Return the tolerance of the arithmetic, which may be narrower than a result: float64 weights, a float32 x."""
    return absolute if arithmetic(x, *weights) is torch.float64 else max(absolute, TOLERANCE[torch.float32].absolute)


class _Added(NamedTuple):
    """The term that two factors add to a product of rows, as ``scale * (rows @ first.T) @ second.T``, and its errors.

    Attributes:
        thin: the first product, times the scale, (E, N, r).
        of_thin: the error of it.
        sum: the term.
        of_sum: the error of it.
    """

    thin: Tensor
    of_thin: Tensor
    sum: Tensor
    of_sum: Tensor


def _added(
    absolute: float, narrow: Narrow, rows: Tensor, size: Tensor, error: Tensor, factors: tuple[Tensor, Tensor, float]
) -> _Added:
    """Return the term of two factors; size, error: of the rows."""
    one, other, scale = factors[0].mT, factors[1].mT, factors[2]
    thin = scale * (rows @ one)
    of_thin = _of_product(absolute, narrow, size, error, one.abs()) + _of_equal_terms(narrow.eps, rows, one)
    of_thin = abs(scale) * of_thin + absolute * finite_size(thin) + 2 * narrow.rounding(thin)
    total = thin @ other
    of_sum = _of_product(absolute, narrow, finite_size(thin), of_thin, other.abs())
    of_sum = of_sum + _of_equal_terms(narrow.eps, thin, other) + absolute * finite_size(total) + narrow.rounding(total)
    return _Added(thin, of_thin, total, of_sum)


def _factors_of(lora: Lora, e: slice) -> tuple[Tensor, Tensor, float] | None:
    """Return the factors of experts in float64, and their scale."""
    return None if lora.a is None or lora.b is None else (lora.a[e].double(), lora.b[e].double(), lora.scale)


def _turned(factors: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor, float]:
    """Return the factors as they multiply gradients of outputs."""
    return factors[1].mT, factors[0].mT, factors[2]


class _Experts:
    """Computes some experts for rows in float64, and the errors of a kernel.

    Attributes:
        h: the up-projection, (E, N, 2I or I).
        of_product: the error of h before it is rounded.
        of_h: the error of h.
        a: the activation, (E, N, I).
        of_a: the error of a; inf where it, or an element of h, may overflow.
        added: the term of the factors of up, or None.
    """

    def __init__(
        self,
        absolute: float,
        narrow: Narrow,
        rows: Tensor,
        up: Tensor,
        up_bias: Tensor | None,
        act: Activation,
        factors: tuple[Tensor, Tensor, float] | None,
    ) -> None:
        bias = None if up_bias is None else up_bias.double()[:, None]
        up = up.mT
        self.act = act
        self.h = rows @ up if bias is None else rows @ up + bias
        sizes = finite_size(rows), finite_size(up)
        size = _root_of_squares(*sizes)
        if bias is not None:
            size = size + finite_size(bias)
        self.of_product = _of_sum(absolute, rows.shape[-1]) * size + _of_equal_terms(narrow.eps, rows, up)
        self.added = None
        if factors is not None:
            self.added = _added(absolute, narrow, rows, sizes[0], torch.zeros_like(sizes[0]), factors)
            self.of_product = self.of_product + narrow.rounding(self.h) + self.added.of_sum
            self.h = self.h + self.added.sum
            self.of_product = self.of_product + absolute * finite_size(self.h)
        if bias is not None:  # a kernel may keep the product in the dtype of x before the bias is added
            self.of_product = self.of_product + narrow.rounding(self.h - bias)
        self.of_h = self.of_product + narrow.rounding(self.h)  # and h
        overflows = sizes[0] @ sizes[1] >= narrow.largest  # so inf may meet inf of another sign
        self.of_h = self.of_h.masked_fill(overflows | (finite_size(self.h) >= narrow.largest), math.inf)
        self.a = act(self.h)
        self.of_a = self._of_activation() + absolute * finite_size(self.a) + narrow.rounding(self.a)
        self.of_a = self.of_a.masked_fill(finite_size(self.a) >= narrow.largest, math.inf)

    def _of_activation(self) -> Tensor:
        """Return the error of a that follows from the error of h."""
        act = self.act
        if not act.gated:
            return self.of_h * (2.0 * finite_size(self.h) + self.of_h if act.name == "relu2" else _SLOPE)
        (gate, up), (of_gate, of_up) = self.halves()
        return of_gate * (_SLOPE * self.scale) * (finite_size(up) + abs(act.offset)) + of_up * finite_size(gate)

    def halves(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return gate and up of h, and the errors of both."""
        return split(self.h, self.act.interleaved), split(self.of_h, self.act.interleaved)

    def has_unknown_slope(self) -> Tensor:
        """Return True where the slope at an element of h may have another sign, (E, N, 2I or I)."""
        moves = [-self.of_h, self.of_h]
        if self.act.gated:
            gate, up = split(self.of_h, self.act.interleaved)
            moves += [self.joined(-gate, up), self.joined(gate, -up)]
        ones = torch.ones_like(self.a)
        slope = self.act.gradient(ones, self.h).sign()
        return torch.stack([self.act.gradient(ones, self.h + move).sign() != slope for move in moves]).any(0)

    @property
    def scale(self) -> float:
        """The largest factor by which alpha makes the sigmoid steeper."""
        return max(abs(self.act.alpha), 1.0) if self.act.name == "swiglu" else 1.0

    def hidden_gradient(self, absolute: float, da: Tensor) -> tuple[Tensor, Tensor]:
        """Return the size of the gradient of h and the error of it, from the size of the gradient of a."""
        act = self.act
        if not act.gated:
            slope = 2.0 * finite_size(self.h) if act.name == "relu2" else torch.full_like(self.h, _SLOPE)
            error = da * (2.0 * self.of_h + 4 * absolute * slope)
            return da * slope, error + da * self._near(0.0, self.h, self.of_h) * (act.name == "relu")
        (gate, up), (of_gate, of_up) = self.halves()
        other = finite_size(up) + abs(act.offset)
        sizes = da * _SLOPE * self.scale * other, da * finite_size(gate)
        errors = [
            da * self.scale * (self.scale * of_gate * other + _SLOPE * of_up + 4 * absolute * other),
            da * (_SLOPE * self.scale * of_gate + 4 * absolute * finite_size(gate)),
        ]
        if act.name == "swiglu" and act.limit is not None:  # beyond which a gradient is 0
            errors[0] = errors[0] + sizes[0] * self._near(act.limit, gate, of_gate)
            errors[1] = errors[1] + sizes[1] * self._near(act.limit, up.abs(), of_up)
        return self.joined(*sizes), self.joined(*errors)

    @staticmethod
    def _near(bound: float, value: Tensor, error: Tensor) -> Tensor:
        """Return 1 where a value may be on either side of a bound, else 0."""
        return ((value - bound).abs() <= error).double()

    def joined(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return two halves in the layout of h."""
        return torch.stack((gate, up), -1).flatten(-2) if self.act.interleaved else torch.cat((gate, up), -1)


def experts_error_bound(absolute: float, a: ExpertsArgs, save: bool = False) -> tuple[Tensor, Tensor]:
    """Return the largest errors of the output, (T, H), and of the saved up-projections, (T * K, 2I or I)."""
    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    absolute = _of_arithmetic(absolute, a.x, a.up, a.down)
    total, narrow = a.x.double().new_zeros(a.x.shape), narrow_of(a.x, a.up, a.down)
    order = order_of(a.index, a.up.shape[0])
    sorted_experts = experts_of(a.index, a.up.shape[0])[order]
    of_up, of_down = loras_of(a)
    of_hidden = total.new_zeros(a.index.numel(), a.up.shape[2 if a.transposed else 1])
    for e, numbers in _together(a.index, a.up):
        chosen = a.index == numbers
        first, second = _of_experts(e, a.up, a.down, a.transposed)
        of = _Experts(absolute, narrow, a.x.double(), first, _rows(a.up_bias, e), act, _factors_of(of_up, e))
        factor = finite_size(a.weights).masked_fill(~chosen, 0.0).sum(-1, keepdim=True)
        error = _of_product(absolute, narrow, finite_size(of.a), of.of_a, second.abs().mT)
        error = error + _of_equal_terms(narrow.eps, of.a, second.mT)
        out, down_bias = of.a @ second.mT, _rows(a.down_bias, e)
        if down_bias is not None:
            out = out + down_bias.double()[:, None]
            error = error + absolute * finite_size(down_bias)[:, None]
        if (factors := _factors_of(of_down, e)) is not None:
            added = _added(absolute, narrow, of.a, finite_size(of.a), of.of_a, factors)
            error = error + narrow.rounding(out) + added.of_sum
            out = out + added.sum
            error = error + absolute * finite_size(out)
        # the order of a sum decides where a term may overflow, or is not finite, or is 0 times one that is not
        unknown = ~((out.abs() * factor.clamp(min=1.0)) < narrow.largest)
        infinite = (a.weights.isinf() & chosen).any(-1, keepdim=True)
        unknown = unknown | (infinite & _has_unknown_sign(out.abs(), error + narrow.rounding(out)))
        # a kernel may keep the outputs of an expert in the dtype of x, before and after they are weighted
        error = factor * (error + narrow.rounding(out)) + narrow.rounding(factor * out)
        error = error.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(unknown, math.inf)
        total = total + error.masked_fill(~chosen.any(-1, keepdim=True), 0.0).sum(0)
        at = (sorted_experts >= e.start) & (sorted_experts < e.stop)
        of_hidden[at] = of.of_product[sorted_experts[at] - e.start, order[at] // a.index.shape[1]]
    return total, of_hidden


def experts_gradient_error_bound(absolute: float, args: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Return the largest errors of the gradients of x, weights, up, down, the biases and the factors."""
    act = Activation(args.activation, args.limit, args.alpha, args.offset, args.interleaved)
    chosen = experts_of(args.index, args.up.shape[0])
    rows = args.x.double().repeat_interleave(args.index.shape[1], 0)
    every = args.grad.double().repeat_interleave(args.index.shape[1], 0)
    g_rows = finite_size(every)
    factor = finite_size(args.weights).reshape(-1, 1)
    absolute = _of_arithmetic(absolute, args.x, args.up, args.down)
    dx, dweights, narrow = (
        rows.new_zeros(rows.shape),
        factor.new_zeros(factor.shape),
        narrow_of(args.x, args.up, args.down),
    )
    parts: list[list[Tensor]] = [[], [], [], [], [], [], [], []]
    up_lora, down_lora = loras_of(args)
    for e, numbers in _together(args.index, args.up):
        present = chosen[:, None] == numbers
        first, second = _of_experts(e, args.up, args.down, args.transposed)
        inputs, g = rows.masked_fill(~present, 0.0), g_rows.masked_fill(~present, 0.0)
        up_factors, down_factors = _factors_of(up_lora, e), _factors_of(down_lora, e)
        of = _Experts(absolute, narrow, inputs, first, _rows(args.up_bias, e), act, up_factors)
        weighted, sizes = g * factor, (finite_size(first), finite_size(second))
        a = finite_size(of.a)
        of_out = _of_product(absolute, narrow, a, of.of_a, second.abs().mT)
        out, down_bias = of.a @ second.mT, _rows(args.down_bias, e)
        if down_bias is not None:
            of_out = of_out + absolute * finite_size(down_bias)[:, None]
            out = out + down_bias.double()[:, None]
        added = None
        if down_factors is not None:
            added = _added(absolute, narrow, of.a, a, of.of_a, down_factors)
            out, of_out = out + added.sum, of_out + added.of_sum + narrow.rounding(out)
        of_out = of_out + _of_equal_terms(narrow.eps, of.a, second.mT)
        of_out = of_out + narrow.rounding(out) + absolute * finite_size(out)
        # what may overflow in the dtype of x, as products and the factors of the next ones do
        overflows = (torch.maximum(g, weighted) @ sizes[1] >= narrow.largest).any(-1, keepdim=True)
        overflows = overflows | (weighted >= narrow.largest).any(-1, keepdim=True)
        # each term is off, and equal ones that are added one by one have roundings of one sign
        drift = 0.25 * narrow.eps * args.x.shape[1] * (g * finite_size(out)).sum(-1, keepdim=True)
        of_weights = (g * of_out).square().sum(-1, keepdim=True).sqrt() + drift
        # or as a sum of a * da, whose second factor may be rounded: to nothing where it is small, and equal ones alike
        unweighted = every.masked_fill(~present, 0.0) @ second
        of_unweighted = narrow.rounding(unweighted)
        if down_factors is not None:
            none, masked = torch.zeros_like(g), every.masked_fill(~present, 0.0)
            back = _added(absolute, narrow, masked, g, none, _turned(down_factors))
            unweighted = unweighted + back.sum
            of_unweighted = of_unweighted + back.of_sum + narrow.rounding(unweighted)
        alike = narrow.share * finite_size((of.a * unweighted).sum(-1, keepdim=True))
        of_weights = of_weights + alike + narrow.least * a.sum(-1, keepdim=True)
        of_weights = of_weights + _SPREAD * (a * of_unweighted).square().sum(-1, keepdim=True).sqrt()
        unknown = (every.isinf() & present & _has_unknown_sign(out.abs(), of_out)).any(-1, keepdim=True)
        of_weights = of_weights.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(overflows | unknown, math.inf)
        dweights = dweights + of_weights.sum(0)
        # of the gradient of a: of terms without a common sign, or of equal ones, which add up
        da = (every * args.weights.double().reshape(-1, 1)).masked_fill(~present, 0.0) @ second
        of_weighted = absolute * weighted + narrow.rounding(weighted)
        size_of_da, back = _root_of_squares(weighted, sizes[1]), None
        if down_factors is not None:
            masked = (every * args.weights.double().reshape(-1, 1)).masked_fill(~present, 0.0)
            back = _added(absolute, narrow, masked, weighted, of_weighted, _turned(down_factors))
            da, size_of_da = da + back.sum, size_of_da + finite_size(back.sum)
        dh, of_dh = of.hidden_gradient(absolute, torch.maximum(size_of_da, finite_size(da)))
        of_da = torch.maximum(
            _root_of_squares(of_weighted, sizes[1]), absolute * finite_size(da) + factor * of_unweighted
        )
        of_da = of_da if back is None else of_da + back.of_sum + narrow.rounding(da)
        of_dh = of_dh + of.hidden_gradient(absolute, of_da)[0]
        largest = weighted @ sizes[1]
        if back is not None and down_factors is not None:
            largest = largest + finite_size(back.thin) @ finite_size(down_factors[0])
        largest = of.hidden_gradient(absolute, largest)[0]
        of_dh = (of_dh + narrow.rounding(dh)).masked_fill(overflows | (largest >= narrow.largest), math.inf)
        signed = da
        if not da.isfinite().all():
            da = of.joined(da, da) if act.gated else da
            of_dh = of_dh.masked_fill(~da.isfinite() & of.has_unknown_slope(), math.inf)
        dx = dx + _of_product(absolute, narrow, dh, of_dh, first.abs()).sum(0)
        if up_factors is not None and of.added is not None:
            turned = _added(absolute, narrow, act.gradient(signed, of.h), dh, of_dh, _turned(up_factors))
            dx = dx + (turned.of_sum + narrow.rounding(turned.sum)).sum(0)
            parts[4].append(_of_product(absolute, narrow, finite_size(turned.thin).mT, turned.of_thin.mT, inputs.abs()))
            of_b = _of_product(absolute, narrow, dh.mT, of_dh.mT, finite_size(of.added.thin))
            parts[5].append(of_b + _SPREAD * _root_of_squares(dh.mT, of.added.of_thin))
        if back is not None and added is not None:
            thin = finite_size(back.thin).mT
            of_a = _of_product(absolute, narrow, thin, back.of_thin.mT, a) + _SPREAD * _root_of_squares(thin, of.of_a)
            parts[6].append(of_a.masked_fill((factor * a >= narrow.largest).any(-2, keepdim=True), math.inf))
            of_b = _of_product(absolute, narrow, weighted.mT, of_weighted.mT, finite_size(added.thin))
            parts[7].append(of_b + _SPREAD * _root_of_squares(weighted.mT, added.of_thin))
        of_up = _of_product(absolute, narrow, dh.mT, of_dh.mT, finite_size(inputs))
        of_down = _of_product(absolute, narrow, weighted.mT, of_weighted.mT, a)
        of_down = of_down + _SPREAD * _root_of_squares(weighted.mT, of.of_a)
        of_down = of_down.masked_fill((weighted >= narrow.largest).any(-2)[..., None], math.inf)
        of_down = of_down.masked_fill((factor * a >= narrow.largest).any(-2, keepdim=True), math.inf)
        parts[0].append(of_up.mT if args.transposed else of_up)
        parts[1].append(of_down.mT if args.transposed else of_down)
        parts[2].append(_SPREAD * _root(of_dh) + _of_sum(absolute, len(rows)) * _root(dh))
        parts[3].append(_of_sum(absolute, len(rows)) * _root(weighted))
    of_x = dx.reshape(*args.index.shape, args.x.shape[1]).sum(1)
    given = (args.up, args.down, args.up_bias, args.down_bias, *up_lora[:2], *down_lora[:2])
    stacked = [
        torch.cat(of) if of else torch.zeros_like(args.x if each is None else each, dtype=dx.dtype)
        for of, each in zip(parts, given)
    ]
    return (of_x, dweights.reshape(args.weights.shape), *stacked)


def quantized_experts_error_bound(
    absolute: float, a: QuantizedExpertsArgs, save: bool = False
) -> tuple[Tensor, Tensor]:
    """Return those of experts, whose weights are as exact."""
    return experts_error_bound(absolute, with_unpacked(a), save)


def quantized_experts_gradient_error_bound(absolute: float, a: QuantizedExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Return those of experts."""
    return without_weights(experts_gradient_error_bound(absolute, gradients_with_unpacked(a)))


def _together(index: Tensor, up: Tensor) -> list[tuple[slice, Tensor]]:
    """Return the experts in parts that take some megabytes at a time: as slices, and as numbers, (E, 1, 1)."""
    count, numbers = len(up), torch.arange(len(up), device=index.device)[:, None, None]
    most = max(1, _TOGETHER // max(index.numel() * max(up.shape[1:]), up.shape[1] * up.shape[2], 1))
    parts = [slice(at, min(at + most, count)) for at in range(0, count, most)]
    return [(part, numbers[part]) for part in parts]


def _of_experts(e: slice, up: Tensor, down: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the weights of experts, (E, 2I or I, H) and (E, H, I), in float64."""
    first, second = up[e].double(), down[e].double()
    return (first.mT, second.mT) if transposed else (first, second)


def _rows(bias: Tensor | None, e: slice) -> Tensor | None:
    return None if bias is None else bias[e]


def _of_product(absolute: float, narrow: Narrow, size: Tensor, error: Tensor, other: Tensor) -> Tensor:
    """Return the error of a product of numbers that are off with numbers that are exact; inf where it may overflow.

    Args:
        absolute: of the tolerance.
        narrow: of the dtype of x.
        size: (..., N, M), the magnitudes.
        error: (..., N, M), of each.
        other: (..., M, L), the magnitudes, also those that are not finite.
    """
    finite = finite_size(other)
    result = _SPREAD * _root_of_squares(error, finite)
    result = result + _of_sum(absolute, size.shape[-1]) * _root_of_squares(size, finite)
    result = result.masked_fill(~(size @ finite < narrow.largest), math.inf)
    infinite = other.isinf()
    if infinite.any():  # times a number of unknown sign
        result = result.masked_fill(_has_unknown_sign(size, error).double() @ infinite.double() > 0, math.inf)
    return result


def _of_sum(absolute: float, terms: int) -> float:
    """Return the share of the root of the sum of the squares of so many terms by which their sum is off."""
    return absolute * max(1.0, terms / _TERMS) ** 0.5


def _has_unknown_sign(size: Tensor, error: Tensor) -> Tensor:
    """Return True where a number may also be 0, or have the other sign."""
    return (error > 0) & (size <= error)


def _root_of_squares(one: Tensor, other: Tensor) -> Tensor:
    """Return, for each element of ``one @ other``, the root of the sum of the squares of its terms."""
    return (one.square() @ other.square()).sqrt().nan_to_num(nan=math.inf, posinf=math.inf)  # inf * 0


def _root(rows: Tensor) -> Tensor:
    """Return the same for the sum over rows."""
    return rows.square().sum(-2).sqrt().nan_to_num(nan=math.inf, posinf=math.inf)  # inf * 0


# ----------------------------------------------------------------------------------------------------- grouped_matmul


class _Sums:
    """Computes sums of products in float64, and the errors of a kernel."""

    def __init__(self, absolute: float, x: Tensor, weight: Tensor) -> None:
        self.absolute = _of_arithmetic(absolute, x, weight)
        self.narrow = narrow_of(x, weight)

    def errors(self, one: Tensor, other: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the errors of ``one @ other + bias``; inf where it may overflow."""
        size, finite, product = finite_size(one), finite_size(other), one @ other
        error = _of_product(self.absolute, self.narrow, size, torch.zeros_like(size), other.abs())
        error = error + _of_equal_terms(self.narrow.eps, one, other)
        if bias is None:
            return error
        # a kernel may keep the product in the dtype of x before the bias is added
        error = error + self.absolute * finite_size(bias) + self.narrow.rounding(product)
        return error.masked_fill(size @ finite + finite_size(bias) >= self.narrow.largest, math.inf)


def grouped_error_bound(
    absolute: float, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool
) -> Tensor:
    """Return the largest errors of the output, (S, N)."""
    sums, group = _Sums(absolute, x, weight), group_of_rows(offsets, x.shape[0])
    result = x.double().new_zeros(x.shape[0], weight.shape[2 if transposed else 1])
    for e, each in enumerate(weight.double()):
        at = group == e
        of_bias = None if bias is None else bias[e].double()
        result[at] = sums.errors(x[at].double(), each if transposed else each.t(), of_bias)
    return result


def grouped_gradient_error_bound(
    absolute: float,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """Return the largest errors of the gradients of x, weight and bias."""
    sums, group = _Sums(absolute, x, weight), group_of_rows(offsets, x.shape[0])
    of_x, of_weight = x.double().new_zeros(x.shape), torch.zeros_like(weight, dtype=torch.float64)
    of_bias = grad.double().new_zeros(weight.shape[0], grad.shape[1])
    for e, each in enumerate(weight.double()):
        at = group == e
        g, rows = grad[at].double(), x[at].double()
        of_x[at] = sums.errors(g, each.t() if transposed else each)
        of_weight[e] = sums.errors(rows.t(), g) if transposed else sums.errors(g.t(), rows)
        of_bias[e] = sums.errors(g.new_ones(1, len(g)), g)[0]
    return of_x, of_weight, of_bias
