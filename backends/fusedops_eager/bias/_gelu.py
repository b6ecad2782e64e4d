"""Bias + GELU in plain torch, on any device. Computed in float32 (float64 for float64)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic, promoted
from fusedops.ops import OPS

_ERF_SATURATION = 32.0  # for larger u, the exact form is u, in float64 too


def gelu_forward(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute ``gelu(x + bias)``, (...), contiguous, in the dtype of ``x + bias``.

    Args:
        x: (...), floating, any strides.
        bias: broadcastable to x, floating, or None.
        approximate: "tanh", or "none" for the exact form.
    """
    u = _sum(x, bias)
    if approximate == "tanh" or x.is_cpu or x.is_cuda:
        y = torch.nn.functional.gelu(u, approximate=approximate)
    else:
        y = _erf_form(u)
    if approximate == "none" and y.is_cpu:
        # torch's kernel for AVX-512 returns NaN for inf, and inf for u above half of the largest float32 (torch 2.13)
        y = torch.where(u > _ERF_SATURATION, u, y)
    return y.to(promoted(x, bias)).contiguous()


def gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and of the bias from the inputs, contiguous, None for one that is not wanted.

    Args:
        grad: (...), the dtype of ``x + bias``, any strides.
        x: as in the forward.
        bias: as in the forward.
        approximate: as in the forward.
        needs: (gradient of x is wanted, gradient of the bias is wanted).
    """
    if not x.is_cpu:
        dx, dbias = OPS["bias_gelu"].backward(grad, x, bias, approximate, needs)
        return None if dx is None else dx.contiguous(), dbias
    u = _sum(x, bias)
    du = torch.ops.aten.gelu_backward(grad.to(u.dtype), u, approximate=approximate)
    dx = du.to(x.dtype).contiguous() if needs[0] else None
    if bias is None or not needs[1]:
        return dx, None
    return dx, du.sum_to_size(bias.shape).to(bias.dtype, copy=True).contiguous()


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    wide = arithmetic(x, bias)
    return x.to(wide) if bias is None else x.to(wide) + bias.to(wide)


def _erf_form(u: Tensor) -> Tensor:
    """Compute the exact form from elementary operations. torch_npu's gelu computes the tanh form for both values."""
    return 0.5 * u * (torch.erf(u * math.sqrt(0.5)) + 1)  # 0.5 first: u * 2 overflows for the largest numbers
