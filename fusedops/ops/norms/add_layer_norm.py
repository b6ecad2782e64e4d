"""Residual add + LayerNorm, between the halves of a BERT-like or GPT-2-like layer. Replaces add -> layer_norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Case, Saved
from fusedops._dispatch.call import call
from fusedops.ops.norms import formulas, layer_norm
from fusedops.ops.norms.error_bounds import backward_error, forward_error


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``s = x + residual`` and ``y = layer_norm(s, weight, bias, eps)``.

    The norm is that of s as it is returned, rounded to its dtype.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        residual: the shape of ``x``, any of the same dtypes.
        weight: (H,), any of the same dtypes, or None for no factor.
        bias: (H,), any of the same dtypes, or None.
        eps: added to the variance; finite, at least 0.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        y, in the dtype of ``x``, and s, in that of ``x + residual`` by torch's promotion: (..., H), contiguous. Each is
        computed in float32 (float64 for float64) and rounded once. The gradients of ``weight`` and ``bias`` are summed
        in float32, in the same order on every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: flash-attention, ``layer_norm_fn(residual=, prenorm=True)``; torch_npu, ``npu_add_layer_norm``.

    >>> import torch, fusedops
    >>> fusedops.add_layer_norm(torch.tensor([1.0, 1.0]), torch.tensor([0.0, 2.0]), eps=0.0)
    (tensor([-1.,  1.]), tensor([1., 3.]))
    """
    return call(OP, (x, residual, weight, bias, eps), backend)


def reference(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    s = formulas.rounded_sum(x, residual)
    y = formulas.normalized(s, formulas.rstd_of(s, eps, centered=True), formulas.mean_of(s))
    y = y if weight is None else y * weight.to(y.dtype)
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype), s


def mean(s: Tensor) -> Tensor:
    """Compute the saved mean of each row: (...)."""
    return formulas.mean_of(s)


def rstd(s: Tensor, eps: float) -> Tensor:
    """Compute the saved rsqrt(var(s, -1) + eps): (...)."""
    return formulas.rstd_of(s, eps, centered=True)


def backward(
    grad_y: Tensor,
    grad_s: Tensor,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, residual, weight and bias."""
    normal, g = formulas.normalized(s, rstd, mean), grad_y.to(rstd.dtype)
    dweight = formulas.summed(g * normal, weight) if weight is not None and needs[2] else None
    dbias = formulas.summed(g, bias) if bias is not None and needs[3] else None
    if not (needs[0] or needs[1]):
        return None, None, dweight, dbias
    ds = formulas.row_gradient(g, normal, rstd, formulas.factor(weight, 0.0, rstd.dtype), centered=True)
    return *formulas.sum_gradients(ds + grad_s.to(ds.dtype), grad_y.dtype, residual_dtype, needs), dweight, dbias


def empty(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    return formulas.empty_pair(x, residual)


def error(absolute: float, x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """Return the changes of y, mean and rstd; s has the usual one."""
    weight, bias, eps, _ = rest
    s = formulas.rounded_sum(x, residual)
    absolute = max(absolute, torch.finfo(s.dtype).eps)  # of the rounding of s
    y, mean, rstd = forward_error(absolute, s, weight, bias, eps, 0.0, centered=True)
    return y, None, mean, rstd


def gradient_error(absolute: float, grad_y: Tensor, grad_s: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """Return the changes of the gradients of x, residual, weight and bias."""
    ds, dweight, dbias = backward_error(absolute, grad_y, *rest[:5], rounded=True)
    ds = ds + absolute * grad_s.double().abs()
    return ds, ds, dweight, dbias


def unfused(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops."""
    s = x + residual
    return layer_norm.unfused(s, weight, bias, eps).to(x.dtype), s


def min_bytes(x: Any, residual: Any, weight: Any, bias: Any, eps: float) -> Mapping[Any, int]:
    """Read x and residual, write y and s; read s and both gradients, write both gradients."""
    s = formulas.sum_dtype(x, residual)
    return {
        "forward": formulas.row_bytes(x, (x.dtype, residual.dtype, x.dtype, s), (weight, bias)),
        "backward": formulas.row_bytes(x, (s, s, x.dtype, x.dtype, residual.dtype), (weight, weight, bias)),
    }


_LARGE = (8192, 4096)
OP = Op(
    add_layer_norm,
    constraints=[*layer_norm.OP.constraints, *formulas.RESIDUAL],
    reference=reference,
    backward=backward,
    differentiable=("x", "residual", "weight", "bias"),
    outputs=("y", "s"),
    empty=empty,
    saved=(Saved("mean", mean), Saved("rstd", rstd)),
    tolerance=formulas.TOLERANCE,
    gradient_tolerance=formulas.GRADIENT_TOLERANCE,
    error=error,
    gradient_error=gradient_error,
    cases=[Case(case.name, {**case.args, "residual": case.args["x"]}, case.source) for case in layer_norm.OP.cases],
    min_bytes=min_bytes,
    unfused=unfused,
    formula="s = x + residual, (s - mean(s)) * rsqrt(var(s) + eps) * weight + bias",
    sharding=formulas.ROWS,
    sample=lambda batch, length: {
        "x": (batch, length, 6),
        "residual": (batch, length, 6),
        "weight": (6,),
        "bias": (6,),
    },
    large=[Case("training", {"x": _LARGE, "residual": _LARGE, "weight": (4096,), "bias": (4096,)})],
    sweep=lambda rows, width: {"x": (rows, width), "residual": (rows, width), "weight": (width,), "bias": (width,)},
    peers="""
| peer | the norm is of | dtype of s |
|---|---|---|
| flash-attention, `layer_norm_fn` | the sum before rounding | x's, or float32 |
| torch_npu, `npu_add_layer_norm` | weight and bias needed | x's; float32 where x and residual differ |
| fusedops | the rounded sum | as torch promotes |
""",
)
