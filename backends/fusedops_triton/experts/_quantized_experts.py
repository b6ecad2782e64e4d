"""quantized_experts with Triton: as experts, with the products of ``_packed_rows.py``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops.ops.experts.arguments import (
    ExpertsArgs,
    ExpertsGradArgs,
    QuantizedExpertsArgs,
    QuantizedExpertsGradArgs,
)
from fusedops.ops.experts.quantized_experts import without_weights
from fusedops_triton.experts import _experts
from fusedops_triton.experts._packed_rows import PackedRows
from fusedops_triton.quantized._scaled import scaled


def quantized_experts(a: QuantizedExpertsArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it, and keep the up-projections."""
    return _experts.experts(ExpertsArgs(*a[:3], *_weights(a), *a[5:12], False, *a[-5:]), save)


def quantized_experts_backward(a: QuantizedExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weights, the biases and the factors, each where it is wanted."""
    needs = (*a.needs[:2], False, False, *a.needs[2:])
    args = ExpertsGradArgs(*a[:4], *_weights(a), *a[6:14], False, *a[-6:-1], needs=needs)
    return without_weights(_experts.experts_backward(args))


def _weights(a: QuantizedExpertsArgs | QuantizedExpertsGradArgs) -> tuple[Any, Any]:
    """Return the weights, in the place of tensors."""
    # formats are texts, and scales are there, by the constraints
    up = scaled(a.up, a.up_format or "", a.up_scales, a.up_global_scale, a.up_zeros)  # pyright: ignore[reportArgumentType]
    down = scaled(a.down, a.down_format or "", a.down_scales, a.down_global_scale, a.down_zeros)  # pyright: ignore[reportArgumentType]
    return PackedRows(up), PackedRows(down)
