"""The error bounds of the norm ops: the changes of the results where each number moves by ``absolute`` of itself.

In a row of nearly equal numbers the difference from the mean cancels, and ``rstd`` magnifies what is left.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops._contract.evidence import tolerances
from fusedops.dtypes import compute_dtype, is_narrow, promoted
from fusedops.ops.gated.error_bounds import GateErrors, gate_errors
from fusedops.ops.norms.arguments import GatedRmsNormArgs, GatedRmsNormGradArgs
from fusedops.ops.norms.formulas import in_groups, rounded_sum

TOLERANCE = tolerances((5e-6, 1e-5), (1e-12, 1e-12), absolute=0.0, absolute_roundings=2.0)
GRADIENT_TOLERANCE = tolerances((2e-5, 2e-5), (1e-11, 1e-12))

_SIGMAS = 2.5  # times the root of the sum of squares: independent errors add in quadrature


def rms_norm_error_bound(
    absolute: float, x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool
) -> tuple[Tensor, ...]:
    """Return the changes of y and rstd."""
    return _outputs(_of_arithmetic(absolute, x), x, weight, None, eps, offset, centered=False)


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
    return _outputs(_of_arithmetic(absolute, x), x, weight, bias, eps, 0.0, centered=True)


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
    absolute = max(_of_arithmetic(absolute, s), torch.finfo(s.dtype).eps / 2)  # of the rounding of s
    weight, eps, offset, _ = rest
    y, rstd = _outputs(absolute, s, weight, None, eps, offset, centered=False)
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
    absolute = max(_of_arithmetic(absolute, s), torch.finfo(s.dtype).eps / 2)  # of the rounding of s
    y, mean, rstd = _outputs(absolute, s, weight, bias, eps, 0.0, centered=True)
    return y, None, mean, rstd


def add_layer_norm_gradient_error_bound(
    absolute: float, grad_y: Tensor, grad_s: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x, residual, weight and bias."""
    ds, dweight, dbias = _gradients(absolute, grad_y, *rest[:5], rounded=True)
    ds = ds + absolute * grad_s.double().abs()
    return ds, ds, dweight, dbias


def gated_rms_norm_error_bound(absolute: float, a: GatedRmsNormArgs, save: bool) -> tuple[Tensor, ...]:
    """Return the changes of y and rstd; inf where a group has no determined result."""
    arithmetic = torch.finfo(compute_dtype(promoted(a.x, a.gate)))
    if is_narrow(a.x.dtype):  # computed in float32, and rounded once
        absolute = TOLERANCE[torch.float32].absolute
    of_gate = gate_errors(absolute, a.gate, a.activation, arithmetic)
    z, z_moves = _normalized_rows(absolute, a.x, of_gate, a.gate_first, a.groups)
    rstd = torch.rsqrt(z.square().mean(-1, keepdim=True) + a.eps)
    norm = _norm(absolute, z, z_moves, rstd, arithmetic)
    factor, terms = _factor(None if a.weight is None else in_groups(a.weight, a.groups), a.offset)
    y = norm.normal * factor
    moves = norm.moves * factor.abs() + absolute * (1 + norm.normal.abs() * terms)
    largest = (z.abs() * rstd).maximum(torch.ones(())) * factor.abs()
    if not a.gate_first:
        act, act_moves = (in_groups(each, a.groups) for each in (of_gate.act, of_gate.act_moves))
        moves = moves * (act.abs() + act_moves) + y.abs() * (act_moves + absolute * act.abs())
        largest = largest * act.abs().clamp(min=1.0)
    moves = moves.masked_fill(norm.unknown | (largest >= arithmetic.max), math.inf)
    change = (rstd * norm.rstd_moves).masked_fill(norm.unknown, math.inf)
    return _open(moves.flatten(-2)), _open(change[..., 0])


def gated_rms_norm_gradient_error_bound(absolute: float, a: GatedRmsNormGradArgs) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x, gate and weight; inf where rstd has no determined value, or where a
    product or a sum may overflow.
    """
    arithmetic = torch.finfo(compute_dtype(promoted(a.x, a.gate)))
    if arithmetic.bits < 64:  # the arithmetic is in float32, also beside a weight of float64
        absolute = max(absolute, GRADIENT_TOLERANCE[torch.float32].absolute)
    of_gate = gate_errors(absolute, a.gate, a.activation, arithmetic)
    z, z_moves = _normalized_rows(absolute, a.x, of_gate, a.gate_first, a.groups)
    r = a.rstd.double()[..., None]
    norm = _norm(absolute, z, z_moves, r, arithmetic)
    rows, d, act, act_moves, slope, slope_moves = (
        in_groups(each.double(), a.groups) for each in (a.x, a.grad, *of_gate)
    )
    factor, terms = _factor(None if a.weight is None else in_groups(a.weight, a.groups), a.offset)
    g, g_moves = (d, torch.zeros_like(d)) if a.gate_first else (d * act, d.abs() * (act_moves + absolute * act.abs()))
    m, size = g * factor, g.abs() * terms
    m_moves = absolute * size + g_moves * factor.abs()
    product = (m * norm.normal).mean(-1, keepdim=True)
    of_product = size * (norm.moves + absolute * norm.normal.abs()) + m_moves * norm.normal.abs()
    of_product = of_product.mean(-1, keepdim=True)
    inner = m_moves + norm.moves * product.abs() + norm.normal.abs() * of_product
    inner = inner + absolute * size.mean(-1, keepdim=True) + 2 * arithmetic.tiny * arithmetic.eps
    drift = 0.25 * arithmetic.eps  # terms of one sign, added one by one
    inner = inner + drift * z.shape[-1] * norm.normal.abs() * product.abs()
    exact = m - norm.normal * product
    dz, dz_moves = r * exact, r.abs() * (inner + exact.abs() * norm.rstd_moves)
    reach = (1 + z.abs().nan_to_num(nan=0.0, posinf=0.0).sum(-1, keepdim=True)).square() * (1 + r.abs() ** 3)
    open_rows = norm.unknown | (size.nan_to_num(nan=0.0, posinf=0.0).sum(-1, keepdim=True) * reach >= arithmetic.max)
    # a kernel may multiply by an activation, or by a number of x, of 0 later
    open_rows = open_rows | (d.abs() * terms >= arithmetic.max).any(-1, keepdim=True)
    n_size, n_moves = norm.normal.abs() * terms, norm.moves * factor.abs() + absolute * norm.normal.abs() * terms
    if a.gate_first:
        dx = dz_moves * (act.abs() + act_moves) + dz.abs() * (act_moves + absolute * act.abs())
        of_act, of_act_moves = dz * rows, (dz_moves + absolute * dz.abs()) * rows.abs()
        largest = dz.abs() * act.abs().maximum(rows.abs() * (1 + slope.abs()))
    else:
        dx = dz_moves
        of_act, of_act_moves = d * norm.normal * factor, d.abs() * (n_moves + absolute * n_size)
        largest = d.abs() * (1 + n_size) * (1 + slope.abs()).maximum(act.abs() * factor.abs())
    dgate = of_act_moves * (slope.abs() + slope_moves) + of_act.abs() * (slope_moves + absolute * slope.abs())
    beyond = largest >= arithmetic.max
    dx, dgate = (_open(each.masked_fill(open_rows | beyond, math.inf).flatten(-2)) for each in (dx, dgate))
    if a.weight is None:
        return dx, dgate, None
    of_weight = g.abs() * (norm.moves + absolute * norm.normal.abs()) + g_moves * norm.normal.abs()
    of_weight = of_weight.masked_fill(norm.unknown | beyond, math.inf)
    total = (g * norm.normal).masked_fill(norm.unknown, 0.0)
    drift *= a.x.shape[:-1].numel()
    dweight = of_weight.sum_to_size(factor.shape) + drift * total.sum_to_size(factor.shape).abs()
    return dx, dgate, _open(dweight.flatten())


def _outputs(
    absolute: float, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float, centered: bool
) -> tuple[Tensor, ...]:
    """Return the changes of y, the mean (if ``centered``) and rstd; inf where a row has no determined result.

    Args:
        absolute: of the arithmetic, which is float32 for 16-bit tensors, and of what else moves each number of ``x``.
        x: (..., H), the rows that are normalized.
        weight: (H,) or None.
        bias: (H,) or None.
        eps: see the op.
        offset: see the op.
        centered: True for layer_norm.
    """
    rows, centre, square = _moments(x, centered)
    rstd, rstd_moves = _rstd(rows, centre, square, eps, absolute, centered, x.dtype)
    normal = (rows - centre) * rstd
    size = rows.abs().mean(-1, keepdim=True)  # of which the mean moves by ``absolute``, however small it is
    moves = absolute * (rows.abs() + (size if centered else 0.0)) * rstd + normal.abs() * (rstd_moves + absolute)
    factor, terms = _factor(weight, offset)
    y = moves * factor.abs() + absolute * (1 + normal.abs() * terms)
    if bias is not None:
        y = y + absolute * bias.double().abs()
    unknown = ~(rstd_moves <= 0.5)
    y = y.masked_fill(_overflows(x, rows, centre, rstd * factor.abs()), math.inf)
    mean = (absolute * size[..., 0]).masked_fill(~square[..., 0].isfinite(), math.inf)
    change = (rstd * rstd_moves)[..., 0].masked_fill(unknown[..., 0], math.inf)
    y = y.masked_fill(unknown, math.inf)
    return (y, mean, change) if centered else (y, change)


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
    """Return the changes of the gradients of x, weight and bias; inf where rstd has no determined value, or where a
    product or a sum of the row may overflow.

    The arithmetic and the sums over rows are in float32, also for 16-bit tensors: only the result is rounded. The
    roundings of the x of several rows have no common sign: their changes add up as a root of squares.

    Args:
        absolute: of the tolerance.
        grad: (..., H), the gradient of y.
        x: (..., H), the rows that are normalized.
        mean: (...), for layer_norm, else None.
        rstd: (...).
        weight: (H,) or None.
        bias: (H,) or None.
        offset: see the op.
        rounded: True where x is a sum that was rounded to its dtype.
    """
    if x.dtype != torch.float64:  # the arithmetic is in float32, also beside a weight of float64
        absolute = max(absolute, GRADIENT_TOLERANCE[torch.float32].absolute)
    rounding = torch.finfo(x.dtype).eps / 2 if rounded else 0.0
    rows, g, r = x.double(), grad.double(), rstd.double().abs()[..., None]
    centre = torch.zeros(()).double() if mean is None else mean.double()[..., None]
    normal = (rows - centre) * r
    of_mean = centre.abs()
    if mean is not None and x.shape[-1]:  # a mean that is small by chance moves as its terms do
        of_mean = torch.maximum(of_mean, rows.abs().mean(-1, keepdim=True))
    spread = absolute * (rows.abs() + of_mean) * r
    of_rounding = rounding * (rows.abs() + centre.abs()) * r
    moves_of_rounding = of_rounding + normal.abs() * (of_rounding * normal.abs()).mean(-1, keepdim=True)
    of_rstd = (of_rounding * normal).square().mean(-1, keepdim=True) / max(x.shape[-1], 1)
    rstd_moves = absolute + (spread * normal.abs()).mean(-1, keepdim=True)
    rstd_moves = rstd_moves + (absolute * centre * r).square()  # of equal elements the error of the mean remains
    moves = spread + normal.abs() * (absolute + rstd_moves)
    factor, terms = _factor(weight, offset)
    m, size = g * factor, g.abs() * terms
    product = (m * normal).mean(-1, keepdim=True)
    of_normal = moves + moves_of_rounding
    inner = absolute * (size + size.mean(-1, keepdim=True)) + of_normal * product.abs()
    inner = inner + normal.abs() * (size * (of_normal + absolute * normal.abs())).mean(-1, keepdim=True)
    arithmetic = torch.finfo(compute_dtype(x.dtype))
    inner = inner + 2 * arithmetic.tiny * arithmetic.eps  # the smallest numbers of grad * weight, and of its mean
    # terms of one sign, added one by one as torch's kernels do: each rounding may be half a unit of the sum so far
    drift = 0.25 * arithmetic.eps
    inner = inner + drift * x.shape[-1] * normal.abs() * product.abs()
    exact = m - normal * product
    if mean is not None:
        shift = m.mean(-1, keepdim=True)
        exact = exact - shift
        inner = inner + drift * x.shape[-1] * shift.abs()
    # beside small differences from the mean the squares of the roundings count too: equal elements have nothing else
    of_sums = (of_rounding * (normal.abs() + of_rounding / 2)).mean(-1, keepdim=True)
    unknown = ~(rstd_moves + of_sums <= 0.5) | _overflows(x, rows, centre, r).any(-1, keepdim=True)
    unknown = unknown | ((rows - centre).square().sum(-1, keepdim=True) >= _largest(x))
    # the sum of m * normal is multiplied by normal, then by rstd
    largest = (1 + normal.abs().nan_to_num(nan=0.0, posinf=0.0)).amax(-1, keepdim=True) if x.shape[-1] else 1.0
    total = size.nan_to_num(nan=0.0, posinf=0.0).sum(-1, keepdim=True) * largest * largest
    dx = r * (inner + exact.abs() * (rstd_moves + of_sums))
    dx = dx.masked_fill(unknown | (total * r.clamp(min=1.0) >= _largest(x)), math.inf)
    of_weight = (g.abs() * (moves + absolute * normal.abs())).masked_fill(unknown, math.inf)
    drift *= x.shape[:-1].numel()
    dweight, dbias = None, None
    if weight is not None:
        squares = g.square() * (of_rounding.square() + normal.square() * of_rstd)
        squares = squares.masked_fill(unknown, 0.0).sum_to_size(weight.shape)  # not inf * 0: of_weight is inf there
        total = (g * normal).masked_fill(unknown, 0.0).sum_to_size(weight.shape).abs()
        dweight = of_weight.sum_to_size(weight.shape) + _SIGMAS * squares.sqrt() + drift * total
    if bias is not None:
        dbias = (absolute * g.abs()).sum_to_size(bias.shape) + drift * g.sum_to_size(bias.shape).abs()
    return dx, dweight, dbias


def _of_arithmetic(absolute: float, x: Tensor) -> float:
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


class _Norm(NamedTuple):
    """Groups of rows that are normalized, (..., groups, H / groups), with the largest errors."""

    normal: Tensor
    moves: Tensor  # of normal
    rstd_moves: Tensor  # in proportion to rstd, (..., groups, 1)
    unknown: Tensor  # True where rstd has no determined value, (..., groups, 1)


def _normalized_rows(
    absolute: float, x: Tensor, of_gate: GateErrors, gate_first: bool, groups: int
) -> tuple[Tensor, Tensor]:
    """Return the numbers whose norm is taken, and their errors."""
    z = x.double()
    moves = absolute * z.abs()
    if gate_first:
        moves = moves * 2 * of_gate.act.abs() + z.abs() * of_gate.act_moves
        z = z * of_gate.act
    return in_groups(z, groups), in_groups(moves, groups)


def _norm(absolute: float, z: Tensor, z_moves: Tensor, rstd: Tensor, arithmetic: torch.finfo) -> _Norm:
    """Return the normalized numbers with their errors."""
    normal, spread = z * rstd, z_moves * rstd.abs()
    rstd_moves = absolute + (spread * normal.abs()).mean(-1, keepdim=True)
    moves = spread + normal.abs() * (rstd_moves + absolute)
    squares = z.square().sum(-1, keepdim=True)
    unknown = ~(rstd_moves <= 0.5) | ~(squares < arithmetic.max) | ~(rstd.square() < 1 / arithmetic.smallest_normal)
    unknown = unknown | ~((z.abs() * rstd).amax(-1, keepdim=True) < arithmetic.max) if z.shape[-1] else unknown
    return _Norm(normal, moves, rstd_moves, unknown)


def _open(limit: Tensor) -> Tensor:
    """Return the limit, inf where it is not determined."""
    return limit.nan_to_num(nan=math.inf, posinf=math.inf)
