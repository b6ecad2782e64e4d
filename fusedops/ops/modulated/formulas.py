"""The formulas of the modulated norms and gated residuals, and their gradients.

A scale, shift or gate broadcasts to the rows (B, S, H); its gradient is the sum over the dims in which it repeats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic, compute_dtype
from fusedops.ops.modulated.arguments import (
    LAYER,
    TANH,
    GatedAddModulatedNormGradArgs,
    ModulatedNormArgs,
    ModulatedNormGradArgs,
)
from fusedops.ops.norms import formulas as norms
from fusedops.ops.norms.formulas import normalized, rstd_of, summed


def mean_of(x: Tensor, kind: str) -> Tensor:
    """Return the mean of each row that the norm subtracts, (B, S): 0 for RMSNorm."""
    return norms.mean_of(x) if kind == LAYER else x.new_zeros(x.shape[:-1], dtype=compute_dtype(x.dtype))


def affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return ``normal * weight + bias``."""
    u = normal if weight is None else normal * weight.to(normal.dtype)
    return u if bias is None else u + bias.to(normal.dtype)


def modulated_norm(a: ModulatedNormArgs) -> Tensor:
    """Compute y, (B, S, H), in the dtype of x."""
    rstd = rstd_of(a.x, a.eps, a.kind == LAYER)
    u = affine(normalized(a.x, rstd, norms.mean_of(a.x) if a.kind == LAYER else None), a.weight, a.bias)
    y = u * (a.scale.to(u.dtype) + a.offset)
    return (y if a.shift is None else y + a.shift.to(u.dtype)).to(a.x.dtype)


def modulated_norm_gradients(a: ModulatedNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, in the dtype of rstd, and of scale, shift, weight and bias, in their own."""
    mean = a.mean if a.kind == LAYER else None
    g = a.grad.to(a.rstd.dtype)
    dscale = dshift = None
    if a.needs[1]:
        dscale = summed(g * affine(normalized(a.x, a.rstd, mean), a.weight, a.bias), a.scale)
    if a.shift is not None and a.needs[2]:
        dshift = summed(g, a.shift)
    of_norm = g * (a.scale.to(g.dtype) + a.offset)
    wanted = (a.needs[0], *a.needs[3:])
    dx, dweight, dbias = norms.gradients(of_norm, a.x, mean, a.rstd, a.weight, a.bias, 0.0, wanted)
    return dx, dscale, dshift, dweight, dbias


def activated(gate: Tensor, activation: str) -> tuple[Tensor, Tensor | float]:
    """Return the activation of a gate, and its derivative."""
    if activation != TANH:
        return gate, 1.0
    act = torch.tanh(gate)
    return act, 1 - act * act


def gated_add(residual: Tensor, y: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Compute ``residual + y * act(gate)``, (B, S, H), rounded once to the dtype of the residual."""
    wide = arithmetic(residual, y, gate)
    act, _ = activated(gate.to(wide), activation)
    return (residual.to(wide) + y.to(wide) * act).to(residual.dtype)


def gated_add_gradients(
    grad: Tensor, y: Tensor, gate: Tensor, activation: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of y and gate from that of the sum, (B, S, H)."""
    wide = arithmetic(grad, y, gate)
    g = grad.to(wide)
    act, slope = activated(gate.to(wide), activation)
    dy = (g * act).to(y.dtype) if needs[0] else None
    return dy, summed(g * y.to(wide) * slope, gate) if needs[1] else None


def gated_add_modulated_norm_gradients(a: GatedAddModulatedNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of residual, y, gate, scale, shift, weight and bias, each in its dtype."""
    wanted = (any(a.needs[:3]), *a.needs[3:])
    ds, *others = modulated_norm_gradients(
        ModulatedNormGradArgs(
            a.grad_z, a.s, a.mean, a.rstd, a.scale, a.shift, a.weight, a.bias, a.kind, a.offset, wanted
        )
    )
    dresidual = dy = dgate = None
    if ds is not None:
        ds = ds + a.grad_s.to(ds.dtype)
        dy, dgate = gated_add_gradients(ds, a.y, a.gate, a.activation, a.needs[1:3])
        dresidual = ds.to(a.s.dtype) if a.needs[0] else None
    return dresidual, dy, dgate, *others
