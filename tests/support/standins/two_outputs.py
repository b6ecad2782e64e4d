"""A test-only op with two outputs, one required and one optional saved value, and a backend with kernels of its own.

``add_center_scale``: layer normalization of a residual stream, ``s = x + residual``, ``y = (s - mean(s)) * rstd(s) *
weight``. ``rstd`` is saved, ``mean`` may be: backward computes it again from s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops import Backend, Case, Evidence, Op, Saved, Sharding, Tolerance, kernel
from fusedops.constraints import Broadcasts, Dim, Finite, Floating, Rank, SameDevice, SameShape


def add_center_scale(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-5, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Compute ``s = x + residual`` and ``y``, its layer normalization times ``weight``.

    Args:
        x: (..., H), floating.
        residual: the shape of ``x``, floating.
        weight: broadcastable to (H,), floating, or None.
        eps: added to the variance.
        backend: a policy for this call alone.

    Returns:
        y and s, contiguous, of the dtype of ``x``. Computed in float32 (float64 for float64), rounded once.

    >>> import torch
    >>> with two_outputs():
    ...     y, s = add_center_scale(torch.tensor([1.0, 3.0]), torch.zeros(2), eps=0.0)
    >>> y, s
    (tensor([-1.,  1.]), tensor([1., 3.]))
    """
    return fusedops.call(OP, (x, residual, weight, eps), backend)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    wide = _wide(torch.promote_types(x.dtype, residual.dtype))
    return x.to(wide) + residual.to(wide)


def mean(x: Tensor, residual: Tensor) -> Tensor:
    """Compute the saved mean: (..., 1)."""
    return _sum(x, residual).mean(-1, keepdim=True)


def rstd(x: Tensor, residual: Tensor, eps: float) -> Tensor:
    """Compute the saved 1 / sqrt(variance + eps): (..., 1)."""
    s = _sum(x, residual)
    return torch.rsqrt(s.var(-1, keepdim=True, unbiased=False) + eps)


def reference(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    s = _sum(x, residual)
    y = (s - s.mean(-1, keepdim=True)) * rstd(x, residual, eps)
    if weight is not None:
        y = y * weight.to(torch.promote_types(weight.dtype, s.dtype))
    return y.to(x.dtype), s.to(x.dtype)


def backward(
    grad_y: Tensor,
    grad_s: Tensor,
    s: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    weight: Tensor | None,
    residual_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, residual and weight."""
    wide = rstd.dtype
    s_wide = s.to(wide)
    normal = (s_wide - (s_wide.mean(-1, keepdim=True) if mean is None else mean)) * rstd
    grad = grad_y.to(wide)
    scaled = grad if weight is None else grad * weight.to(wide)
    centered = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
    ds = grad_s.to(wide) + rstd * centered
    dx = ds.to(grad_y.dtype, copy=True) if needs[0] else None  # two results must not share memory
    dresidual = ds.to(residual_dtype, copy=True) if needs[1] else None
    if weight is None or not needs[2]:
        return dx, dresidual, None
    return dx, dresidual, (grad * normal).sum_to_size(weight.shape).to(weight.dtype)


def empty(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    like = torch.empty_like(x, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like)


def unfused(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops."""
    s = x + residual
    return torch.nn.functional.layer_norm(s, s.shape[-1:], weight, None, eps), s


def min_bytes(x: Any, residual: Any, weight: Any, eps: float) -> Mapping[Any, int]:
    """Read x and residual, write y and s; read s and both gradients, write both."""
    elements, size = math.prod(x.shape), x.dtype.itemsize
    return {
        "forward": elements * (3 * size + residual.dtype.itemsize),
        "backward": elements * (4 * size + residual.dtype.itemsize),
    }


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    return {"x": (batch, length, 6), "residual": (batch, length, 6), "weight": (6,)}


OP = Op(
    add_center_scale,
    constraints=[
        Floating("x"),
        Rank("x", at_least=1),
        Dim("x", (-1,), at_least=1),
        Finite("eps", at_least=0.0),
        Floating("residual"),
        SameDevice("residual", "x"),
        SameShape("residual", "x"),
        Floating("weight"),
        SameDevice("weight", "x"),
        Rank("weight", 1),
        Broadcasts("weight", "x"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x", "residual", "weight"),
    outputs=("y", "s"),
    empty=empty,
    saved=(Saved("rstd", rstd), Saved("mean", mean, optional=True)),
    sharding=Sharding(whole=(-1,)),
    evidence=Evidence(
        tolerance={
            torch.float16: Tolerance(2e-3, 2e-3),
            torch.bfloat16: Tolerance(1e-2, 1.6e-2),
            torch.float32: Tolerance(5e-6, 1e-5),
            torch.float64: Tolerance(1e-12, 1e-12),
        },
        gradient_tolerance={
            # s is rounded before backward reads it
            torch.float16: Tolerance(2e-2, 4e-3),
            torch.bfloat16: Tolerance(1.5e-1, 3e-2),
            # float32: of one column, where rstd is 1 / sqrt(eps), and what it multiplies cancels
            torch.float32: Tolerance(1e-3, 1e-5),
            torch.float64: Tolerance(1e-11, 1e-12),
        },
        cases=[
            Case("small", {"x": (4, 16, 96), "residual": (4, 16, 96), "weight": (96,)}),
            Case("ragged", {"x": (3, 33), "residual": (3, 33), "weight": (33,), "eps": 1e-3}),
            Case("no_weight", {"x": (2, 5, 40), "residual": (2, 5, 40)}),
        ],
        min_bytes=min_bytes,
        unfused=unfused,
        formula="layer_norm(x + residual) * weight, x + residual",
        sample=_sample,
    ),
)


@kernel(OP.name, source="torch.native_layer_norm")
def forward_kernel(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, save: bool) -> tuple[Any, ...]:
    """Compute the outputs, and the saved values where asked for, by torch's fused layer norm."""
    s = _sum(x, residual).contiguous()
    y, _, rstd = torch.native_layer_norm(s, s.shape[-1:], None, None, eps)
    mean = s.mean(-1, keepdim=True)  # layer_norm's own is NaN in a row with an infinity
    if weight is not None:
        y = y * weight.to(torch.promote_types(weight.dtype, s.dtype))
    saved = (rstd, mean) if save else (None, None)
    return y.to(x.dtype), s.to(x.dtype, copy=True), *saved


@kernel(OP.name, direction="backward", source="torch.native_layer_norm_backward")
def backward_kernel(
    grad_y: Tensor,
    grad_s: Tensor,
    s: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    weight: Tensor | None,
    residual_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients by torch's fused backward of layer norm."""
    wide = rstd.dtype
    grad = grad_y.to(wide).contiguous()
    centers = s.to(wide).mean(-1, keepdim=True) if mean is None else mean.contiguous()
    ones = torch.ones(s.shape[-1], dtype=wide, device=s.device)
    gamma = ones if weight is None else weight.to(wide) * ones
    dnormal, dgamma, _ = torch.ops.aten.native_layer_norm_backward(
        grad, s.to(wide).contiguous(), s.shape[-1:], centers, rstd.contiguous(), gamma, None, [True, True, False]
    )
    ds = grad_s.to(wide) + dnormal
    dx = ds.to(grad_y.dtype, copy=True).contiguous() if needs[0] else None
    dresidual = ds.to(residual_dtype, copy=True).contiguous() if needs[1] else None
    if weight is None or not needs[2]:
        return dx, dresidual, None
    return dx, dresidual, dgamma.sum_to_size(weight.shape).to(weight.dtype)


BACKEND = Backend("two_outputs", ("cpu", "cuda"), -60, (forward_kernel, backward_kernel))


@contextmanager
def two_outputs(*backends: Backend) -> Iterator[Op]:
    """Register the op, and backends of it, for a block.

    Args:
        *backends: the default is the one of this module.
    """
    chosen = backends or (BACKEND,)
    fusedops.register(OP)
    registered: list[str] = []
    try:
        for plugin in chosen:
            fusedops.register(plugin)
            registered.append(plugin.name)
        yield OP
    finally:
        for name in reversed(registered):
            fusedops.unregister(name)
        fusedops.unregister(OP.name)
