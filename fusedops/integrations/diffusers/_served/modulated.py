"""Modulated norms, gated sums, and a group norm with SiLU, by an op or as the forward has them.

A scale of two dims is left to torch, which puts it beside tokens where an op puts it beside samples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import GroupNorm, SiLU

from fusedops import ops
from fusedops.dtypes import compute_dtype
from fusedops.integrations._replacement import own_class
from fusedops.integrations._trial.twin import is_untouched
from fusedops.integrations.diffusers._served.taken import are_taken, norm_of


def modulated(norm: Any, x: Any, scale: Any, shift: Any, offset: float, wide: bool) -> Any:
    """Return ``norm(x) * (offset + scale) + shift``; where ``wide``, computed in float32 and in x's dtype."""
    arguments = _arguments(norm, x, scale, shift, offset, wide)
    if arguments is not None:
        return ops.modulated_norm(x, **arguments)
    y = norm(x.float() if wide else x) * (1 + scale if offset else scale)
    y = y if shift is None else y + shift
    return y.type_as(x) if wide else y


def gated(residual: Any, gate: Any, y: Any, is_tanh: bool, wide: bool) -> Any:
    """Return ``residual + gate * y``, with the tanh of the gate or without; where ``wide``, computed in float32."""
    if _is_gated(residual, gate, y, wide):
        return ops.gated_add(residual, y, gate, activation="tanh" if is_tanh else None)
    s = (residual.float() if wide else residual) + (gate.tanh() if is_tanh else gate) * y
    return s.type_as(residual) if wide else s


def gated_modulated(
    residual: Any,
    gate: Any,
    y: Any,
    is_tanh: bool,
    wide: bool,
    norm: Any,
    scale: Any,
    shift: Any,
    offset: float,
    wide_norm: bool,
) -> tuple[Any, Any]:
    """Return the modulated norm of a gated sum, and the sum."""
    if _is_gated(residual, gate, y, wide):
        arguments = _arguments(norm, residual, scale, shift, offset, wide_norm)
        if arguments is not None:
            activation = "tanh" if is_tanh else None
            return ops.gated_add_modulated_norm(residual, y, gate, **arguments, activation=activation)
    s = gated(residual, gate, y, is_tanh, wide)
    return modulated(norm, s, scale, shift, offset, wide_norm), s


def chained(outer: Any, inner: Any, x: Any) -> Any:
    """Return ``outer(inner(x))``: SiLU of a group norm."""
    if own_class(inner) is GroupNorm and type(outer) is SiLU and is_untouched(inner) and is_untouched(outer):
        y = group_normed(inner, x, "silu")
        if y is not None:
            return y
    return outer(inner(x))


def group_normed(norm: Any, x: Any, activation: Any) -> Tensor | None:
    """Return a group norm by the op, or None for a call that it does not take."""
    weight, bias = norm.weight, norm.bias
    given = [each for each in (x, weight, bias) if each is not None]
    if not are_taken(*given) or not 3 <= x.dim() <= 5 or any(each.dtype != x.dtype for each in given):
        return None
    return ops.group_norm(x, norm.num_groups, weight, bias, norm.eps, activation=activation)


def _arguments(norm: Any, x: Any, scale: Any, shift: Any, offset: float, wide: bool) -> dict[str, Any] | None:
    """Return the arguments of the op after x, or None for a call that it does not take."""
    found = norm_of(norm)
    if found is None:
        return None
    weight = norm.weight if found.has_weight else None
    bias = norm.bias if found.has_bias else None
    given = [each for each in (x, scale, shift, weight, bias) if each is not None]
    if not are_taken(*given) or x.dim() != 3 or not _is_of(x, scale) or not (shift is None or _is_of(x, shift)):
        return None
    if not wide and any(each.dtype != x.dtype for each in given):
        return None  # the result of the plain forward may have another dtype
    if found.offset and weight is not None:
        weight = weight + found.offset
    eps = torch.finfo(compute_dtype(x.dtype)).eps if found.eps is None else found.eps
    return {
        "scale": scale,
        "shift": shift,
        "weight": weight,
        "bias": bias,
        "eps": eps,
        "kind": "rms" if found.op == "rms_norm" else "layer",
        "offset": offset,
    }


def _is_of(x: Tensor, row: Tensor) -> bool:
    """Return True for a scale of x (B, S, H): (H,), or of three dims."""
    if row.shape[-1:] != x.shape[-1:] or not row.is_floating_point():
        return False
    return row.dim() == 1 or (row.dim() == 3 and row.shape[0] in (1, x.shape[0]) and row.shape[1] in (1, x.shape[1]))


def _is_gated(residual: Any, gate: Any, y: Any, wide: bool) -> bool:
    if not are_taken(residual, gate, y) or residual.dim() != 3 or y.shape != residual.shape:
        return False
    if not residual.is_floating_point() or not y.is_floating_point():
        return False
    if not _is_of(residual, gate):
        of_token = gate.dim() == 3 and gate.shape[:2] == residual.shape[:2] and gate.shape[2] == 1
        if not (of_token and gate.is_floating_point()):
            return False
    return wide or residual.dtype == gate.dtype == y.dtype
