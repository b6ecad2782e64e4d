"""quantized_experts in plain torch: as experts, and the weight of each chosen expert is unpacked in chunks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype
from fusedops.ops.experts.arguments import QuantizedExpertsArgs, QuantizedExpertsGradArgs
from fusedops.quantization import chunks
from fusedops_eager.experts import _experts


class Chunks(NamedTuple):
    """Packed weights of all experts. Nothing of an expert without rows is read."""

    dtype: torch.dtype
    format: str | None
    codes: Tensor
    scales: Tensor | None
    global_scale: Tensor | None
    zeros: Tensor | None

    def write_product(self, rows: Tensor, e: int, out: Tensor) -> None:
        for at, weight in self._of_expert(e):
            out[:, at] = rows @ weight.t()

    def write_gradient(self, grad: Tensor, e: int, out: Tensor) -> None:
        out.zero_()
        for at, weight in self._of_expert(e):
            out.addmm_(grad[:, at], weight)

    def _of_expert(self, e: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of rows of the weight of an expert."""
        assert self.format is not None  # by the op's constraints
        parts = (None if each is None else each[e] for each in (self.scales, self.global_scale, self.zeros))
        for rows, weight in chunks(self.format, self.codes[e], *parts):
            yield rows, weight.to(self.dtype)


def quantized_experts(a: QuantizedExpertsArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it, and keep the up-projections of the sorted rows."""
    wide = compute_dtype(a.x.dtype)
    return _experts.forward(a, wide, a.up.shape[1], *_experts.adapted(a, *_weights(a, wide)), save)


def quantized_experts_backward(a: QuantizedExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weights, the biases and the factors, each where it is wanted."""
    wide = compute_dtype(a.x.dtype)
    of = _experts.zeros_of((a.up_bias, a.down_bias, *_experts.factors_of(a)), a.needs[2:])
    weights = _experts.adapted(a, *_weights(a, wide))
    return (*_experts.backward(a, wide, *weights, a.needs[:2], (None, None, *of)), *of)


def _weights(a: QuantizedExpertsArgs | QuantizedExpertsGradArgs, wide: torch.dtype) -> tuple[Chunks, Chunks]:
    return (
        Chunks(wide, a.up_format, a.up, a.up_scales, a.up_global_scale, a.up_zeros),
        Chunks(wide, a.down_format, a.down, a.down_scales, a.down_global_scale, a.down_zeros),
    )
