"""The error bounds of the norm ops: the changes of the results where each number moves by ``absolute`` of itself.

In a row of nearly equal numbers the difference from the mean cancels, and ``rstd`` magnifies what is left.
"""

from __future__ import annotations

import math
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops._contract.evidence import finite_size, tolerances
from fusedops._contract.rounding import error_bound_of
from fusedops.dtypes import compute_dtype, is_narrow, promoted
from fusedops.ops.norms.arguments import GatedRmsNormArgs, GatedRmsNormGradArgs
from fusedops.ops.norms.formulas import gated_gradients, gated_norm, rounded_sum

TOLERANCE = tolerances((5e-6, 1e-5), (1e-12, 1e-12), absolute=0.0, absolute_roundings=2.0)
GRADIENT_TOLERANCE = tolerances((2e-5, 2e-5), (1e-11, 1e-12))

SIGMAS = 2.5  # times the root of the sum of squares: independent errors add in quadrature


def rms_norm_error_bound(
    absolute: float, x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool
) -> tuple[Tensor, ...]:
    """Return the changes of y and rstd."""
    return output_errors(of_arithmetic(absolute, x), x, *_factor(weight, offset), None, eps, centered=False)


def rms_norm_gradient_error_bound(
    absolute: float,
    grad: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x and weight."""
    return _gradients(absolute, grad, x, None, rstd, weight, None, offset)[:2]


def layer_norm_error_bound(
    absolute: float, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, ...]:
    """Return the changes of y, mean and rstd."""
    return output_errors(of_arithmetic(absolute, x), x, *_factor(weight, 0.0), bias, eps, centered=True)


def layer_norm_gradient_error_bound(
    absolute: float,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x, weight and bias."""
    return _gradients(absolute, grad, x, mean, rstd, weight, bias)


def add_rms_norm_error_bound(absolute: float, x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """Return the changes of y and rstd; s has the usual one."""
    s = rounded_sum(x, residual)
    absolute = max(of_arithmetic(absolute, s), torch.finfo(s.dtype).eps / 2)  # of the rounding of s
    weight, eps, offset, _ = rest
    y, rstd = output_errors(absolute, s, *_factor(weight, offset), None, eps, centered=False)
    return y, None, rstd


def add_rms_norm_gradient_error_bound(
    absolute: float, grad_y: Tensor, grad_s: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x, residual and weight."""
    s, rstd, weight, offset, *_ = rest
    ds, dweight, _ = _gradients(absolute, grad_y, s, None, rstd, weight, None, offset, rounded=True)
    ds = ds + absolute * grad_s.double().abs()
    return ds, ds, dweight


def add_layer_norm_error_bound(absolute: float, x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """Return the changes of y, mean and rstd; s has the usual one."""
    weight, bias, eps, _ = rest
    s = rounded_sum(x, residual)
    absolute = max(of_arithmetic(absolute, s), torch.finfo(s.dtype).eps / 2)  # of the rounding of s
    y, mean, rstd = output_errors(absolute, s, *_factor(weight, 0.0), bias, eps, centered=True)
    return y, None, mean, rstd


def add_layer_norm_gradient_error_bound(
    absolute: float, grad_y: Tensor, grad_s: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x, residual, weight and bias."""
    ds, dweight, dbias = _gradients(absolute, grad_y, *rest[:5], rounded=True)
    ds = ds + absolute * grad_s.double().abs()
    return ds, ds, dweight, dbias


_gated_bound = error_bound_of(gated_norm, dtype_of=(0, 1))
_gated_gradient_bound = error_bound_of(gated_gradients, dtype_of=(3,))


def gated_rms_norm_error_bound(absolute: float, a: GatedRmsNormArgs, save: bool) -> tuple[Tensor, Tensor]:
    """Return the errors of y and rstd by their formula; inf where its products may overflow in another order."""
    y, rstd = _gated_bound(absolute, *a)
    size = _factor_size(a) * (1 + finite_size(a.gate)) * a.x.shape[-1]  # of a normalized number, at most its root
    return y.masked_fill(size >= torch.finfo(compute_dtype(promoted(a.x, a.gate))).max, math.inf), rstd


def gated_rms_norm_gradient_error_bound(absolute: float, a: GatedRmsNormGradArgs) -> tuple[Tensor | None, ...]:
    """Return the same of the gradients of x, gate and weight: of the first two, of whole rows."""
    *of_rows, dweight = _gated_gradient_bound(absolute, *a)
    m = finite_size(a.grad) * _factor_size(a)
    rows = 1 + finite_size(a.x) * (1 + finite_size(a.gate))
    r = a.rstd.double().abs()[..., None].amax(-2)
    reach = m.sum(-1, keepdim=True) * rows.sum(-1, keepdim=True).square() * (1 + r**3)
    beyond = ~(reach < torch.finfo(a.rstd.dtype).max)
    return *(None if each is None else each.masked_fill(beyond, math.inf) for each in of_rows), dweight


def _factor_size(a: GatedRmsNormArgs | GatedRmsNormGradArgs) -> Tensor:
    return torch.ones(()).double() if a.weight is None else finite_size(a.weight) + abs(a.offset)


def _gradients(
    absolute: float,
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    offset: float = 0.0,
    rounded: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the changes of the gradients of x, weight (H,) and bias (H,), None for None.

    The arguments are those of :func:`gradient_errors`, with a weight to which ``offset`` is added.
    """
    moves = gradient_errors(absolute, grad, x, mean, rstd, *_factor(weight, offset), rounded=rounded)
    dweight = None if weight is None else sum_errors(x, grad, moves, weight.shape)
    dbias = None
    if bias is not None:
        g = grad.double()
        of_order = drift(x, bias.shape) * g.sum_to_size(bias.shape).abs()
        dbias = (of_gradients(absolute, x) * g.abs()).sum_to_size(bias.shape) + of_order
    return moves.rows, dweight, dbias


def output_errors(
    absolute: float,
    x: Tensor,
    factor: Tensor,
    terms: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    x_moves: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the changes of y, the mean (if ``centered``) and rstd; inf where a row has no determined result.

    Args:
        absolute: of the arithmetic, which is float32 for 16-bit tensors, and of what else moves each number of ``x``.
        x: (..., H), the rows that are normalized.
        factor: of the normalized numbers, in float64, broadcasts to x.
        terms: the sum of the magnitudes of what it is computed from.
        bias: what is added, broadcasts to x, or None.
        eps: see the op.
        centered: True for layer_norm.
        x_moves: (..., H), by how much x itself may be off besides, or None.
    """
    rows, centre, square = _moments(x, centered)
    rstd, rstd_moves = _rstd(rows, centre, square, eps, absolute, centered, x.dtype)
    normal = (rows - centre) * rstd
    size = rows.abs().mean(-1, keepdim=True)  # of which the mean moves by ``absolute``, however small it is
    moves = absolute * (rows.abs() + (size if centered else 0.0)) * rstd + normal.abs() * (rstd_moves + absolute)
    if x_moves is not None:
        shared = normal.abs() * (x_moves * normal.abs()).mean(-1, keepdim=True)
        moves = moves + (x_moves + shared + (x_moves.mean(-1, keepdim=True) if centered else 0.0)) * rstd
    y = moves * factor.abs() + absolute * (1 + normal.abs() * terms)
    if bias is not None:
        y = y + absolute * bias.double().abs()
    unknown = ~(rstd_moves <= 0.5)
    y = y.masked_fill(_overflows(x, rows, centre, rstd * factor.abs()), math.inf)
    mean = (absolute * size[..., 0]).masked_fill(~square[..., 0].isfinite(), math.inf)
    change = (rstd * rstd_moves)[..., 0].masked_fill(unknown[..., 0], math.inf)
    y = y.masked_fill(unknown, math.inf)
    return (y, mean, change) if centered else (y, change)


class GradientErrors(NamedTuple):
    """The changes of the gradient of the rows, and of the terms of which a weight's is the sum.

    Attributes:
        rows: (..., H), of the gradient of the rows.
        normal: (..., H), the normalized numbers in float64.
        terms: (..., H), the changes of the products of grad and the normalized numbers.
        squares: (..., H), the squares of those that the rounding of the rows makes: they have no common sign.
        unknown: (..., 1), True where rstd has no determined value.
    """

    rows: Tensor
    normal: Tensor
    terms: Tensor
    squares: Tensor
    unknown: Tensor


def gradient_errors(
    absolute: float,
    grad: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    factor: Tensor,
    terms: Tensor,
    *,
    rounded: bool = False,
    grad_moves: Tensor | None = None,
    x_moves: Tensor | None = None,
) -> GradientErrors:
    """Return the changes of the gradient of x; inf where rstd has no determined value, or where a product or a sum of
    the row may overflow.

    The arithmetic and the sums over rows are in float32, also for 16-bit tensors: only the result is rounded. The
    roundings of the x of several rows have no common sign: their changes add up as a root of squares.

    Args:
        absolute: of the tolerance.
        grad: (..., H), the gradient of y.
        x: (..., H), the rows that are normalized.
        mean: (...), for layer_norm, else None.
        rstd: (...).
        factor: of the normalized numbers, in float64, broadcasts to x.
        terms: the sum of the magnitudes of what it is computed from.
        rounded: True where x is a sum that was rounded to its dtype.
        grad_moves: (..., H), by how much grad itself may be off, or None.
        x_moves: the same of x, besides its rounding.
    """
    absolute = of_gradients(absolute, x)
    rounding = torch.finfo(x.dtype).eps / 2 if rounded else 0.0
    rows, g, r = x.double(), grad.double(), rstd.double().abs()[..., None]
    centre = torch.zeros(()).double() if mean is None else mean.double()[..., None]
    normal = (rows - centre) * r
    of_mean = centre.abs()
    if mean is not None and x.shape[-1]:  # a mean that is small by chance moves as its terms do
        of_mean = torch.maximum(of_mean, rows.abs().mean(-1, keepdim=True))
    spread = absolute * (rows.abs() + of_mean) * r
    of_rounding = rounding * (rows.abs() + centre.abs()) * r
    if x_moves is not None:
        of_rounding = of_rounding + x_moves * r
    moves_of_rounding = of_rounding + normal.abs() * (of_rounding * normal.abs()).mean(-1, keepdim=True)
    of_rstd = (of_rounding * normal).square().mean(-1, keepdim=True) / max(x.shape[-1], 1)
    rstd_moves = absolute + (spread * normal.abs()).mean(-1, keepdim=True)
    rstd_moves = rstd_moves + (absolute * centre * r).square()  # of equal elements the error of the mean remains
    moves = spread + normal.abs() * (absolute + rstd_moves)
    m, size = g * factor, g.abs() * terms
    product = (m * normal).mean(-1, keepdim=True)
    of_normal = moves + moves_of_rounding
    inner = absolute * (size + size.mean(-1, keepdim=True)) + of_normal * product.abs()
    inner = inner + normal.abs() * (size * (of_normal + absolute * normal.abs())).mean(-1, keepdim=True)
    of_weight = g.abs() * (moves + absolute * normal.abs())
    if grad_moves is not None:
        moved = grad_moves * terms
        shared = moved.mean(-1, keepdim=True) + normal.abs() * (moved * normal.abs()).mean(-1, keepdim=True)
        inner, of_weight = inner + moved + shared, of_weight + grad_moves * normal.abs()
    arithmetic = torch.finfo(compute_dtype(x.dtype))
    inner = inner + 2 * arithmetic.tiny * arithmetic.eps  # the smallest numbers of grad * weight, and of its mean
    # terms of one sign, added one by one as torch's kernels do: each rounding may be half a unit of the sum so far
    in_order = 0.25 * arithmetic.eps
    inner = inner + in_order * x.shape[-1] * normal.abs() * product.abs()
    exact = m - normal * product
    if mean is not None:
        shift = m.mean(-1, keepdim=True)
        exact = exact - shift
        inner = inner + in_order * x.shape[-1] * shift.abs()
    # beside small differences from the mean the squares of the roundings count too: equal elements have nothing else
    of_sums = (of_rounding * (normal.abs() + of_rounding / 2)).mean(-1, keepdim=True)
    unknown = ~(rstd_moves + of_sums <= 0.5) | _overflows(x, rows, centre, r).any(-1, keepdim=True)
    unknown = unknown | ((rows - centre).square().sum(-1, keepdim=True) >= _largest(x))
    # the sum of m * normal is multiplied by normal, then by rstd
    largest = (1 + normal.abs().nan_to_num(nan=0.0, posinf=0.0)).amax(-1, keepdim=True) if x.shape[-1] else 1.0
    total = size.nan_to_num(nan=0.0, posinf=0.0).sum(-1, keepdim=True) * largest * largest
    dx = r * (inner + exact.abs() * (rstd_moves + of_sums))
    dx = dx.masked_fill(unknown | (total * r.clamp(min=1.0) >= _largest(x)), math.inf)
    squares = g.square() * (of_rounding.square() + normal.square() * of_rstd)
    return GradientErrors(dx, normal, of_weight.masked_fill(unknown, math.inf), squares, unknown)


def sum_errors(x: Tensor, grad: Tensor, moves: GradientErrors, shape: tuple[int, ...]) -> Tensor:
    """Return the changes of the sum of grad times the normalized numbers over rows, of a gradient of ``shape``."""
    squares = moves.squares.masked_fill(moves.unknown, 0.0).sum_to_size(shape)  # not inf * 0: terms is inf there
    total = (grad.double() * moves.normal).masked_fill(moves.unknown, 0.0).sum_to_size(shape).abs()
    return moves.terms.sum_to_size(shape) + SIGMAS * squares.sqrt() + drift(x, shape) * total


def of_gradients(absolute: float, x: Tensor) -> float:
    """Return the error of each number in backward: it is computed in float32, also beside a weight of float64."""
    return absolute if x.dtype is torch.float64 else max(absolute, GRADIENT_TOLERANCE[torch.float32].absolute)


def drift(x: Tensor, shape: tuple[int, ...]) -> float:
    """Return the share by which a sum of terms of one sign may be off: they are added one by one."""
    return 0.25 * torch.finfo(compute_dtype(x.dtype)).eps * x.numel() / max(prod(shape), 1)


def of_arithmetic(absolute: float, x: Tensor) -> float:
    """Return the error of each number: 16-bit tensors are computed in float32, and the result is rounded once."""
    return TOLERANCE[torch.float32].absolute if is_narrow(x.dtype) else absolute


def _moments(x: Tensor, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return x in float64, the mean of each row (0 unless ``centered``) and the mean square of the difference."""
    rows = x.double()
    centre = rows.mean(-1, keepdim=True) if centered else torch.zeros(()).double()
    return rows, centre, (rows - centre).square().mean(-1, keepdim=True)


def _rstd(
    rows: Tensor, centre: Tensor, square: Tensor, eps: float, absolute: float, centered: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return rstd, and its change in proportion to it; above 0.5 where the mean square is not determined."""
    arithmetic = torch.finfo(compute_dtype(dtype))
    beyond = (square * rows.shape[-1] >= arithmetic.max) | (square + eps < arithmetic.smallest_normal)
    change = absolute * ((rows - centre).abs() * (rows.abs() + centre.abs())).mean(-1, keepdim=True)
    # if all elements are equal, the error of the mean itself remains
    change = change + (absolute * centre).square() if centered else change
    return torch.rsqrt(square + eps), (absolute + change / (square + eps)).masked_fill(beyond, math.inf)


def _overflows(x: Tensor, rows: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    """Return True where ``x * scale - mean * scale`` is a difference of numbers beyond the largest."""
    return (rows.abs() + centre.abs()) * scale >= _largest(x)


def _largest(x: Tensor) -> float:
    """Return the largest number of the arithmetic."""
    return torch.finfo(compute_dtype(x.dtype)).max


def _factor(weight: Tensor | None, offset: float) -> tuple[Tensor, Tensor]:
    """Return ``weight + offset``, and the sum of the magnitudes of both."""
    if weight is None:
        return torch.ones(()).double(), torch.ones(()).double()
    return weight.double() + offset, weight.double().abs() + abs(offset)
