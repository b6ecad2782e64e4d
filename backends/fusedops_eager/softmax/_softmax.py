"""Scaled masked softmax in plain torch: any device, fast on a CPU.

``y = softmax(where(masked, -inf, scale * x), -1)``. Masked positions and fully masked rows are exactly 0. The backward
starts from the rounded y: ``dx = scale * y * (g - sum(g * y, -1))``. The compute dtype is float32 (float64 for
float64).

On a CPU, a large tensor is processed in slabs (``_slabs.py``): each operation finds the output of the previous one in
the cache, and the buffers stay small compared with the result. The ratios in the comments are from Zen 3, 2 threads,
torch 2.13, float32 of 128 MiB. Their unit is a copy of the same tensor (``y.copy_(x)``) unless noted otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops_eager import _slabs
from fusedops_eager._torch import softmax as torch_softmax
from fusedops_eager._torch import softmax_backward as torch_softmax_backward

# Up to this many elements, the plain form of a masked call is as fast: it takes 4 torch calls, the slabs about 15.
_MAX_PLAIN_ELEMENTS = 32 * 1024


class _BitPattern(NamedTuple):
    """A float dtype viewed as integers.

    Attributes:
        dtype: the integer dtype of the same size.
        minus_inf: the integer with the bits of -inf.
        sign_shift: ``>> sign_shift`` copies the sign bit to all bits.
    """

    dtype: torch.dtype
    minus_inf: int
    sign_shift: int


_BIT_PATTERNS = {
    torch.float16: _BitPattern(torch.int16, -(1 << 10), 15),
    torch.bfloat16: _BitPattern(torch.int16, -(1 << 7), 15),
    torch.float32: _BitPattern(torch.int32, -(1 << 23), 31),
    torch.float64: _BitPattern(torch.int64, -(1 << 52), 63),
}


def softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the softmax of the scaled scores without the masked positions.

    Args:
        x: (..., Sq, Sk), float16, bfloat16, float32 or float64, any strides.
        mask: broadcastable to x, bool or uint8, non-zero = masked; or None.
        scale: finite. It is never rounded to the dtype of x.
        causal: True also masks k > q (top-left aligned).

    Returns:
        (..., Sq, Sk), dtype of x, contiguous. A row without an unmasked position is 0.
    """
    if mask is None and not causal and scale == 1.0 and x.is_contiguous():
        return torch_softmax(x, -1, False)
    if not x.is_cpu or x.numel() <= (_slabs.SLAB // 2 if mask is None and not causal else _MAX_PLAIN_ELEMENTS):
        return _plain_forward(x, mask, scale, causal)
    if mask is not None:
        mask = _drop_expansion(mask, x.dim())
    slabs = _SlabForward(x, mask, scale, causal)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if causal:
        slabs.compute_causal(x, mask, out)
    else:
        slabs.compute_masked(x, mask, None, out)
    return out


def softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the gradient of the scores from the gradient of the probabilities.

    Args:
        grad: (..., Sq, Sk), dtype of y, any strides.
        y: (..., Sq, Sk), the result of ``softmax_forward``.
        scale: as in the forward.
        causal: as in the forward. It is not used: y is 0 where masked. Skipping the upper triangle takes 1.3 times as
            long at Sk = 1024, because both inputs must be copied to be contiguous, and 0.9 times at Sk = 4096.

    Returns:
        (..., Sq, Sk), dtype of y, contiguous. Products and the sum are computed in float32 (float64 for float64).
    """
    exact = _computes_exactly(y, scale, y.is_cpu or y.is_cuda)
    if not y.is_cpu or y.numel() <= _slabs.SLAB // 2:
        if exact:
            dx = torch_softmax_backward(grad, y, -1, y.dtype)
            return dx if scale == 1.0 else dx.mul_(scale)
        return torch_softmax_backward(grad.float(), y.float(), -1, torch.float32).mul_(scale).to(y.dtype)
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    max_elements = _slabs.max_slab_elements(y.numel(), 1 if exact else 4)
    wide = None if exact else torch.empty(2, max(max_elements, y.size(-1)), dtype=torch.float32, device="cpu")
    for dx, g, p in _slabs.pieces(max_elements, out, grad, y, rows=True):
        if wide is None:
            torch_softmax_backward(g, p, -1, y.dtype, grad_input=dx)
            if scale != 1.0:
                dx.mul_(scale)
        else:
            wide_g, wide_p = wide[:, : dx.numel()].view(2, *dx.shape)
            wide_g.copy_(g)
            wide_p.copy_(p)
            torch_softmax_backward(wide_g, wide_p, -1, torch.float32, grad_input=wide_g)
            dx.copy_(wide_g.mul_(scale))
    return out


def _computes_exactly(x: Tensor, scale: float, wide_sums: bool) -> bool:
    """Return True if a product with ``scale`` is exact enough in the dtype of x, so that no float32 copy is needed.

    This holds in float32 and float64. In 16 bits it holds if the scale is a power of two and ``wide_sums`` is True:
    ATen accumulates the sums of a row in float32. 1/8 = 1/sqrt(64) is the usual scale. With a scale above 1, float16
    can overflow; subnormal float16 results are off by 3e-8.
    """
    if x.element_size() >= 4 or scale == 1.0:
        return wide_sums or x.element_size() >= 4
    return wide_sums and math.frexp(abs(scale))[0] == 0.5 and 1e-30 < abs(scale) < 1.0


def _plain_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the definition with few torch calls and without a device synchronisation.

    Used for devices other than the CPU and for small tensors.
    """
    exact = _computes_exactly(x, scale, x.is_cpu or x.is_cuda)
    scores = torch.mul(x if exact else x.float(), scale)
    masked = mask if mask is None or mask.dtype is torch.bool else mask.ne(0)
    if causal:
        upper = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu_(1)
        masked = upper if masked is None else upper.logical_or(masked)
    if masked is None:
        y = torch_softmax(scores, -1, False)
    else:
        # The fill before the softmax removes NaN and inf at masked positions. The fill after it sets a fully masked
        # row to 0 instead of NaN.
        y = torch_softmax(scores.masked_fill_(masked, -math.inf), -1, False)
        # The check for NaN takes 3 torch calls, so the smallest tensors are filled without it
        if not x.is_cpu or x.numel() <= 2048 or _has_nan_row(y):
            y.masked_fill_(masked, 0.0)
    return y if exact else y.to(x.dtype)


def _drop_expansion(mask: Tensor, rank: int) -> Tensor:
    """Return the mask with ``rank`` dimensions, narrowed to size 1 along each expanded (stride 0) dimension."""
    if mask.dim() < rank:
        mask = mask[(None,) * (rank - mask.dim())]
    for dim, stride in enumerate(mask.stride()):
        if stride == 0 and mask.size(dim) > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


class _SlabForward:
    """The CPU forward of one large tensor: its constants, and two buffers that all slabs reuse.

    A mask becomes an additive bias of 0 and -inf, computed once for all heads that share it:
    ``add(bias, x, alpha=scale)`` is one vectorised pass, while ``masked_fill`` with a bool mask is scalar code and
    takes 10 times as long as a copy in the cache. An additive bias does not remove a NaN or inf of x, and a fully
    masked row becomes -inf everywhere. Both make the whole row NaN after the softmax, so a check of one column shows
    whether a slab needs ``_fix_nan_rows``.
    """

    def __init__(self, x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> None:
        exact = _computes_exactly(x, scale, True)
        self.dtype = x.dtype if exact else torch.float32
        self.bits = _BIT_PATTERNS[self.dtype]
        self.scale = scale
        buffers = (1 if exact else 2) * (2 if causal else 1)  # causal needs the scratch buffer in any dtype
        self.max_elements = _slabs.max_slab_elements(x.numel(), buffers)
        self.size = min(x.numel(), max(self.max_elements, x.size(-1)))
        self.bias_size = self.size if causal or mask is None else min(self.size, mask.numel())
        self._scratch: Tensor | None = None
        self._bias: Tensor | None = None
        # For each slice of the current bias: all bits set in the rows that have an unmasked position. Heads that share
        # a bias share this too.
        self._unmasked_rows: dict[tuple[int, torch.Size], Tensor] = {}

    def compute_causal(self, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Compute blocks of rows up to the last unmasked column of each block, and set the other columns to 0.

        At Sk = 1024 this takes 2.3 copies; the whole square with a triangular bias takes 3.7.
        """
        sq, sk = x.shape[-2:]
        square = min(sq, sk)
        # A sixteenth of the square, at least 64 Ki elements per block, and at most the rows that fit in a slab.
        rows = max(32, min(256, square // 16), 65536 * sq // x.numel())
        rows = max(1, min(rows, self.max_elements // sk, square))
        # One tensor holds the bias of every block: zeros, followed by the triangle. The slice for the block at row r
        # starts r columns before the triangle.
        edge = -(-square // rows) * rows - rows
        triangle = torch.zeros(rows, edge + rows, dtype=self.dtype, device="cpu")
        triangle[:, edge:].masked_fill_(torch.ones(rows, rows, dtype=torch.bool, device="cpu").triu_(1), -math.inf)
        triangle = triangle[(None,) * (x.dim() - 2)]
        for row in range(0, square, rows):
            n = min(rows, square - row)
            end = row + n
            causal_bias = triangle[..., :n, edge - row : edge + n]
            part = mask
            if mask is not None:
                part = mask if mask.size(-2) == 1 else mask.narrow(-2, row, n)
                part = part if mask.size(-1) == 1 else part.narrow(-1, 0, end)
                part = part.expand(*mask.shape[:-2], n, end)
            self.compute_masked(x[..., row:end, :end], part, causal_bias, out[..., row:end, :end])
            out[..., row:end, end:].zero_()
        if sq > square:
            part = mask if mask is None or mask.size(-2) == 1 else mask[..., square:, :]
            self.compute_masked(x[..., square:, :], part, None, out[..., square:, :])

    def compute_masked(self, x: Tensor, mask: Tensor | None, causal_bias: Tensor | None, out: Tensor) -> None:
        """Cut along the mask until its bias fits in the buffer, then cut the heads that share the bias into slabs."""
        causal_biases = () if causal_bias is None else (causal_bias,)
        if mask is None:
            for o, part, *c in _slabs.pieces(self.max_elements, out, x, *causal_biases, rows=True):
                self._compute_slab(part, c[0] if c else None, o)
            return
        for m, x_part, out_part, *c in _slabs.pieces(self.max_elements, mask, x, out, *causal_biases, rows=True):
            bias = self._mask_to_bias(m)
            if c:
                bias.add_(c[0])
            for o, part, b in _slabs.pieces(self.max_elements, out_part, x_part, bias, rows=True):
                self._compute_slab(part, b, o)

    def _mask_to_bias(self, mask: Tensor) -> Tensor:
        """Return a buffer with 0 where unmasked and -inf where masked: the mask's 0 or 1, times the bits of -inf.

        This takes two vectorised passes. A masked_fill of the bias takes 10 times as long, a copy from bool instead of
        int8 3 times.
        """
        if self._bias is None:
            self._bias = torch.empty(self.bias_size, dtype=self.bits.dtype, device="cpu")
        bias = self._bias[: mask.numel()].view(mask.shape)
        # the bytes of a bool mask of another library may be other than 0 and 1
        ones = mask.view(torch.uint8).clamp(max=1)
        bias.copy_(ones.view(torch.int8)).mul_(self.bits.minus_inf)
        self._unmasked_rows.clear()
        return bias.view(self.dtype)

    def _compute_slab(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        buf = out
        if out.dtype is not self.dtype or not out.is_contiguous():  # ATen's kernel writes contiguous rows only
            if self._scratch is None:
                self._scratch = torch.empty(self.size, dtype=self.dtype, device="cpu")
            buf = self._scratch[: out.numel()].view(out.shape)
        # add(bfloat16, bfloat16, out=float32) rounds before it stores, so 16 bits are widened by a copy
        scores = x if x.dtype is self.dtype else buf.copy_(x)
        if bias is None:
            torch.mul(scores, self.scale, out=buf)
        else:
            torch.add(bias, scores, alpha=self.scale, out=buf)
        torch_softmax(buf, -1, False, out=buf)
        if bias is not None and _has_nan_row(buf):
            self._fix_nan_rows(x, bias, buf)
        if buf is not out:
            out.copy_(buf)

    def _fix_nan_rows(self, x: Tensor, bias: Tensor, buf: Tensor) -> None:
        """Set fully masked rows to 0. If a row is still NaN, compute the slab again with x set to 0 where masked.

        Both steps are a bitwise "and" with -1 or 0, one vectorised pass that also clears NaN. A padded batch (1 in 4
        rows fully masked) takes 1.2 times as long as one without padding; with index_fill_ it takes 1.5 times. NaN
        under the mask takes 2.7 times.
        """
        key = int(bias.storage_offset()), bias.shape
        if key not in self._unmasked_rows:
            self._unmasked_rows[key] = self._unmasked_bits(bias.amax(-1, keepdim=True))
        rows = self._unmasked_rows[key]
        bits = buf.view(self.bits.dtype)
        bits.bitwise_and_(rows)
        if _has_nan_row(buf):
            unmasked = self._unmasked_bits(bias)
            buf.copy_(x)
            bits.bitwise_and_(unmasked)
            torch.add(bias, buf, alpha=self.scale, out=buf)
            torch_softmax(buf, -1, False, out=buf)
            bits.bitwise_and_(
                unmasked
            )  # a row that is NaN at unmasked positions stays NaN there, and is 0 where masked

    def _unmasked_bits(self, bias: Tensor) -> Tensor:
        """Return integers with all bits set where the bias is 0, and no bit set where it is -inf."""
        return bias.view(self.bits.dtype).bitwise_right_shift(self.bits.sign_shift).bitwise_not_()


def _has_nan_row(y: Tensor) -> bool:
    return math.isnan(y.select(-1, 0).sum().item())  # y is in [0, 1]: the sum is NaN if and only if one of them is
