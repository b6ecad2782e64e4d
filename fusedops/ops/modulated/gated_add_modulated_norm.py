"""A gated residual add and the modulated norm of the sum, between the halves of a block of a diffusion transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.ops.modulated import arguments, formulas, modulated_norm
from fusedops.ops.modulated.arguments import (
    GatedAddModulatedNormArgs,
    GatedAddModulatedNormGradArgs,
    ModulatedNormArgs,
    named,
    per_sample,
)


def gated_add_modulated_norm(
    residual: Tensor,
    y: Tensor,
    gate: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    kind: str = "layer",
    offset: float = 1.0,
    activation: str | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``s = gated_add(residual, y, gate)`` and ``z = modulated_norm(s, scale, shift, weight, bias, eps)``.

    The norm is computed from s after its rounding to the dtype in which it is returned.

    Args:
        residual: (B, S, H), float16, bfloat16, float32 or float64.
        y: the shape of ``residual``, any of the same dtypes.
        gate: as in :func:`fusedops.gated_add`.
        scale: as in :func:`fusedops.modulated_norm`.
        shift: as there, or None.
        weight: (H,), any of the same dtypes, or None for no factor.
        bias: (H,), any of the same dtypes, or None.
        eps: added to the variance, or to the mean square; finite, at least 0.
        kind: "layer" or "rms", as in :func:`fusedops.modulated_norm`.
        offset: added to the scale.
        activation: of the gate: None or "tanh".
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        z and s, (B, S, H), contiguous, of the dtype of ``residual``. Each is computed in float32 (float64 for float64)
        and rounded once. Gradients are summed as in the two ops.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: diffusers, ``FluxTransformerBlock``.

    >>> import torch, fusedops
    >>> residual, y = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[0.0, 1.0]]])
    >>> fusedops.gated_add_modulated_norm(residual, y, torch.tensor([2.0, 2.0]), torch.tensor([1.0, 0.0]), eps=0.0)
    (tensor([[[-2.,  1.]]]), tensor([[[1., 3.]]]))
    """
    rows = residual, y, per_sample(gate), per_sample(scale), per_sample(shift)
    return call(OP, (*rows, weight, bias, eps, kind, offset, named(activation)), backend)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with rows for each sample as (B, 1, H), and the activation as a text."""
    return arguments.prepared(args, (2, 3, 4), 10)


def reference(a: GatedAddModulatedNormArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    s = formulas.gated_add(a.residual, a.y, a.gate, a.activation)
    norm = ModulatedNormArgs(s, a.scale, a.shift, a.weight, a.bias, a.eps, a.kind, a.offset)
    return formulas.modulated_norm(norm), s


def mean(s: Tensor, kind: str) -> Tensor:
    """Compute the saved mean of each row of s, 0 for RMSNorm: (B, S)."""
    return modulated_norm.mean(s, kind)


def rstd(s: Tensor, eps: float, kind: str) -> Tensor:
    """Compute the saved rsqrt(var(s, -1) + eps), or of the mean square: (B, S)."""
    return modulated_norm.rstd(s, eps, kind)


def backward(a: GatedAddModulatedNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of residual, y, gate, scale, shift, weight and bias."""
    return formulas.gated_add_modulated_norm_gradients(a)


def empty(a: GatedAddModulatedNormArgs) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    z = torch.empty_like(a.residual, memory_format=torch.contiguous_format)
    return z, torch.empty_like(z)


OP = Op(
    gated_add_modulated_norm,
    constraints=[
        *arguments.rows_of("residual"),
        *arguments.gated("residual"),
        *arguments.modulation("residual"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("residual", "y", "gate", "scale", "shift", "weight", "bias"),
    outputs=("z", "s"),
    empty=empty,
    saved=(Saved("mean", mean), Saved("rstd", rstd)),
    prepare_args=prepare_args,
    sharding="fusedops.ops.modulated.sharding:SHARDING",
    evidence="fusedops.ops.modulated.evidence:GATED_ADD_MODULATED_NORM",
)
