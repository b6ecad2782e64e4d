"""Helpers for the ops with a bias on a CPU: ``x + bias`` in the compute dtype, and the gradient of the bias."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops_eager._slabs import max_slab_elements

# The rows of a slab are summed in this many parts. With 8, bias_gelu's backward takes 0.93 times as long as with 1.
_ROW_PARTS = 8
# A sum to one number first sums this many columns.
_COLUMNS = 1024


def slab_elements(elements: int, buffer_bytes: int, itemsize: int, threads: int | None = None) -> int:
    """Return the number of elements of one slab of a tensor.

    Args:
        elements: number of elements of the tensor that is cut.
        buffer_bytes: bytes of buffer memory per element of a slab.
        itemsize: bytes per element of the result. The buffers stay small compared with the result.
        threads: number of threads that work on a slab. None: the number that torch uses. Callers that compute a sum
            pass a constant, so that the bits of the sum do not depend on the number of threads.
    """
    return min(elements, max_slab_elements(elements, -(-buffer_bytes // itemsize), threads))


def with_rank(bias: Tensor | None, rank: int) -> Tensor | None:
    """Return the bias with ``rank`` dimensions, the number that x has, so that both can be cut in the same way."""
    return bias if bias is None or bias.dim() == rank else bias[(None,) * (rank - bias.dim())]


def add(x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write ``x + bias`` into ``out``. The dtype of ``out`` is at least as wide as both; the sum is computed in it."""
    if bias is None:
        return out.copy_(x)
    if x.dtype is out.dtype and bias.dtype is out.dtype:
        return torch.add(x, bias, out=out)
    return out.copy_(x).add_(bias)  # add(bfloat16, bfloat16, out=float32) would round before it stores


class BiasGradient:
    """The sum of a gradient over the dimensions along which the bias was broadcast. Slabs are added in a fixed order.

    Args:
        bias: any shape that broadcasts to ``shape``.
        shape: shape of x.
        dtype: compute dtype. The sum is accumulated in it.

    Attributes:
        dims: the dimensions of x that are summed.
        sum: the sum so far, in the shape of the bias.
        sum_at_rank: ``sum``, viewed with as many dimensions as x.
    """

    def __init__(self, bias: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
        self.dtype = bias.dtype
        sizes = (1,) * (len(shape) - bias.dim()) + tuple(bias.shape)
        self.dims = [dim for dim, (size, full) in enumerate(zip(sizes, shape)) if size != full]
        self.sum = torch.zeros(bias.shape, dtype=dtype if self.dims else bias.dtype, device="cpu")
        self.sum_at_rank = self.sum.view(sizes)
        self._sums_leading_dims = self.dims == list(range(len(self.dims))) and self.sum.numel() > 1

    def add(self, du: Tensor, piece: Tensor) -> None:
        """Add ``du``, a contiguous slab of the gradient, to ``piece``, the matching part of ``sum_at_rank``."""
        if not self.dims:
            piece.copy_(du)
        elif piece.numel() == 1:
            # torch splits a sum to one number into one part per thread, so its bits depend on the number of threads.
            # In a sum to many numbers, one thread computes each of them.
            flat, even = du.view(-1), du.numel() // _COLUMNS * _COLUMNS
            piece.add_(flat[:even].view(-1, _COLUMNS).sum(0).sum()).add_(flat[even:].sum())
        elif self._sums_leading_dims:
            bias_sizes = piece.shape[len(self.dims) :]
            rows = du.numel() // bias_sizes.numel()
            if rows % _ROW_PARTS == 0:
                du = du.view(_ROW_PARTS, -1, *bias_sizes).sum(1)
            piece.add_(du.view(-1, *bias_sizes).sum(0))
        else:
            piece.add_(du.sum(self.dims, keepdim=True))

    def result(self) -> Tensor:
        """Return the gradient of the bias, in the shape and dtype of the bias."""
        return self.sum.to(self.dtype)
