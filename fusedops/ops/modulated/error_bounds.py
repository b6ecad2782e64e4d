"""The error bounds of the modulated norms and gated residuals."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import finite_size
from fusedops._contract.rounding import error_bound_of
from fusedops.dtypes import compute_dtype
from fusedops.ops.modulated import formulas
from fusedops.ops.modulated.arguments import (
    LAYER,
    GatedAddModulatedNormArgs,
    GatedAddModulatedNormGradArgs,
    ModulatedNormArgs,
    ModulatedNormGradArgs,
)
from fusedops.ops.norms.error_bounds import (
    SIGMAS,
    GradientErrors,
    drift,
    gradient_errors,
    of_arithmetic,
    of_gradients,
    output_errors,
    sum_errors,
)

gated_add_error_bound = error_bound_of(formulas.gated_add)
gated_add_gradient_error_bound = error_bound_of(formulas.gated_add_gradients)


def modulated_norm_error_bound(absolute: float, a: ModulatedNormArgs, save: bool) -> tuple[Tensor, ...]:
    """Return the changes of y, the mean and rstd."""
    return _outputs(of_arithmetic(absolute, a.x), a)


def modulated_norm_gradient_error_bound(absolute: float, a: ModulatedNormGradArgs) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x, scale, shift, weight and bias."""
    moves, *others = _gradients(absolute, a)
    return moves.rows, *others


def gated_add_modulated_norm_error_bound(
    absolute: float, a: GatedAddModulatedNormArgs, save: bool
) -> tuple[Tensor, ...]:
    """Return the changes of z, s, the mean and rstd."""
    s = formulas.gated_add(a.residual, a.y, a.gate, a.activation)
    norm = ModulatedNormArgs(s, a.scale, a.shift, a.weight, a.bias, a.eps, a.kind, a.offset)
    of_rounding = max(of_arithmetic(absolute, s), torch.finfo(s.dtype).eps / 2)
    z, *saved = _outputs(of_rounding, norm, _sum_moves(s, a.y, a.gate, a.activation))
    return z, gated_add_error_bound(_of_sum(s), a.residual, a.y, a.gate, a.activation), *saved


def gated_add_modulated_norm_gradient_error_bound(
    absolute: float, a: GatedAddModulatedNormGradArgs
) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of residual, y, gate, scale, shift, weight and bias."""
    wanted = (True, False, False, False, False)
    of_norm = (a.s, a.mean, a.rstd, a.scale, a.shift, a.weight, a.bias, a.kind, a.offset)
    norm = ModulatedNormGradArgs(a.grad_z, *of_norm, wanted)
    of_sum = _sum_moves(a.s, a.y, a.gate, a.activation)
    moves, *others = _gradients(absolute, norm, of_sum)
    exactly, *_ = _gradients(absolute, norm, of_sum, rounded=False)
    absolute = of_gradients(absolute, a.s)
    wide: list[Any] = [each.double() if isinstance(each, Tensor) else each for each in norm]
    exact = formulas.modulated_norm_gradients(ModulatedNormGradArgs(*wide))[0]
    assert exact is not None
    grad_s, y = a.grad_s.double(), a.y.double()
    ds, ds_moves = exact + grad_s, moves.rows + absolute * (exact.abs() + grad_s.abs())
    act, slope = formulas.activated(a.gate.double(), a.activation)
    dy = _times(ds_moves, act.abs()) + absolute * ds.abs() * act.abs()
    size = (y * slope).abs()
    of_gate = _times(exactly.rows, size) + absolute * (ds * y).abs()
    # of the rounding of s, which has no common sign
    squares = ((moves.rows - exactly.rows) * size).square().nan_to_num(posinf=0.0).sum_to_size(a.gate.shape)
    total = (ds * y * slope).sum_to_size(a.gate.shape).abs()
    dgate = of_gate.sum_to_size(a.gate.shape) + SIGMAS * squares.sqrt() + drift(a.s, a.gate.shape) * total
    dgate = dgate.masked_fill(_times(moves.rows, size).isinf().double().sum_to_size(a.gate.shape) > 0, torch.inf)
    return ds_moves, dy, dgate, *others


def _outputs(absolute: float, a: ModulatedNormArgs, x_moves: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return the changes of y, the mean and rstd."""
    scale, terms = _scale(a)
    added = torch.zeros(()).double() if a.bias is None else a.bias.double().abs() * terms
    added = added if a.shift is None else added + a.shift.double().abs()
    weight = torch.ones(()).double() if a.weight is None else a.weight.double()
    centered = a.kind == LAYER
    found = output_errors(absolute, a.x, weight * scale, weight.abs() * terms, added, a.eps, centered, x_moves)
    return found if centered else (found[0], torch.zeros(()).double(), found[1])


def _gradients(
    absolute: float, a: ModulatedNormGradArgs, x_moves: Tensor | None = None, *, rounded: bool | None = None
) -> tuple[GradientErrors, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the changes of the gradients of x, with what they come from, and of scale, shift, weight and bias.

    Args:
        absolute: of the tolerance.
        a: the arguments.
        x_moves: by how much x itself may be off besides its rounding, where it is a sum; else None.
        rounded: False leaves its rounding out.
    """
    scale, terms = _scale(a)
    weight = torch.ones(()).double() if a.weight is None else a.weight.double()
    bias = torch.zeros(()).double() if a.bias is None else a.bias.double()
    moves = gradient_errors(
        absolute,
        a.grad,
        a.x,
        a.mean if a.kind == LAYER else None,
        a.rstd,
        weight * scale,
        weight.abs() * terms,
        rounded=x_moves is not None if rounded is None else rounded,
        x_moves=x_moves,
    )
    absolute, g = of_gradients(absolute, a.x), a.grad.double()
    normal = moves.normal * weight
    of_scale = moves._replace(
        normal=normal + bias,
        terms=_times(moves.terms, weight.abs()) + absolute * g.abs() * (normal.abs() + bias.abs()),
        squares=moves.squares * weight.square(),
    )
    of_weight = moves._replace(
        terms=_times(moves.terms, terms) + absolute * (g * moves.normal).abs() * terms,
        squares=moves.squares * scale.square(),
    )
    return (
        moves,
        sum_errors(a.x, a.grad, of_scale, a.scale.shape),
        None if a.shift is None else _plain_sum(absolute, a.x, g, g.abs(), a.shift.shape),
        None if a.weight is None else sum_errors(a.x, g * scale, of_weight, a.weight.shape),
        None if a.bias is None else _plain_sum(absolute, a.x, g * scale, g.abs() * terms, a.bias.shape),
    )


def _plain_sum(absolute: float, x: Tensor, numbers: Tensor, sizes: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the change of a sum of numbers over rows, each of a size in which it may be off."""
    return (absolute * sizes).sum_to_size(shape) + drift(x, shape) * numbers.sum_to_size(shape).abs()


def _scale(a: ModulatedNormArgs | ModulatedNormGradArgs) -> tuple[Tensor, Tensor]:
    """Return ``offset + scale``, and the sum of the magnitudes of both."""
    return a.scale.double() + a.offset, a.scale.double().abs() + abs(a.offset)


def _of_sum(s: Tensor) -> float:
    """Return the rounding of each number in a gated sum."""
    return 8 * torch.finfo(compute_dtype(s.dtype)).eps


def _sum_moves(s: Tensor, y: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Return by how much a gated sum may be off, (B, S, H), besides its rounding to its dtype."""
    act, _ = formulas.activated(gate.double(), activation)
    return _of_sum(s) * (finite_size(s) + 2 * finite_size(y) * finite_size(act))


def _times(moves: Tensor, size: Tensor) -> Tensor:
    """Return a product, inf where a change is not determined."""
    return (moves * size).masked_fill(~moves.isfinite(), torch.inf)
