"""The kernels, each with its limits beside it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim, DType


@kernel(
    ops.scaled_masked_softmax,
    DType("x", torch.float32, torch.float64),
    Dim("x", (-1,), at_most=1024),
    source="plain torch",
)
def scaled_masked_softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False) -> Tensor:
    """The op's signature exactly. What the limits let through must come out right: also a fully masked row, as 0."""
    masked = None if mask is None else mask.bool()
    if causal:
        later = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        masked = later if masked is None else masked | later
    if masked is None:
        return torch.softmax(x * scale, dim=-1)
    y = torch.softmax((x * scale).masked_fill(masked, -math.inf), dim=-1)
    return y.masked_fill(masked.all(-1, keepdim=True), 0.0)


@kernel(ops.scaled_masked_softmax, Dim("y", (-1,), at_most=1024), direction="backward", source="plain torch")
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """The signature of the op's backward. Without this kernel the next backend would serve the gradient."""
    return (grad - (grad * y).sum(-1, keepdim=True)) * y * scale
