"""Scaled masked softmax in plain torch: any device, fast on a CPU.

``y = softmax(where(masked, -inf, scale * x), -1)``, masked positions and fully masked rows exactly 0; backward from the
rounded y, ``dx = scale * y * (g - sum(g * y, -1))``. Arithmetic in float32 (float64 for float64).

On a CPU a large tensor goes slab by slab, so that the second operation finds in the cache what the first one wrote, and
the buffers stay small beside the result. The ratios in the comments are from Zen 3, 2 threads, torch 2.13, float32 of
128 MiB, counted in copies of the same tensor (``y.copy_(x)``) unless they say otherwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops_eager import _slabs

# The private names, because torch.softmax changes the dtype under autocast and these do not; aten has had both, with
# these arguments, since 1.11. Written into their own input they give the same bits (tests/test_eager_softmax.py).
_softmax = torch._softmax  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
_softmax_backward_data = torch._softmax_backward_data  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

_FLOAT32_MAX = torch.finfo(torch.float32).max
# Up to this many elements the plain form of a masked call is as quick: 4 calls to torch, the slabs about 15.
_SMALL = 32 * 1024


class _Bits(NamedTuple):
    """A float dtype seen as integers: ``inf * 1`` are the bits of -inf, and ``>> sign`` spreads the sign bit."""

    dtype: torch.dtype
    inf: int
    sign: int


_BITS = {
    torch.float16: _Bits(torch.int16, -(1 << 10), 15),
    torch.bfloat16: _Bits(torch.int16, -(1 << 7), 15),
    torch.float32: _Bits(torch.int32, -(1 << 23), 31),
    torch.float64: _Bits(torch.int64, -(1 << 52), 63),
}


def softmax_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Softmax of the scaled scores, masked positions excluded.

    Args:
        x: (..., Sq, Sk), float16, bfloat16, float32 or float64, any strides.
        mask: broadcastable to x, bool or uint8, non-zero = masked; or None.
        scale: finite. Never rounded to the dtype of x.
        causal: also mask k > q (top-left aligned).

    Returns:
        (..., Sq, Sk), dtype of x, contiguous. A row without an unmasked position is 0.
    """
    if mask is None and not causal and scale == 1.0 and x.is_contiguous():
        return _softmax(x, -1, False)
    if not x.is_cpu or x.numel() <= (_slabs.SLAB // 2 if mask is None and not causal else _SMALL):
        return _plain_forward(x, mask, scale, causal)
    if mask is not None:
        mask = _unexpanded(mask, x.dim())
    slabs = _Slabs(x, mask, scale, causal)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if causal:
        slabs.causal(x, mask, out)
    else:
        slabs.masked(x, mask, None, out)
    return out


def softmax_backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Gradient of the scores from the gradient of the probabilities.

    Args:
        grad: (..., Sq, Sk), dtype of y, any strides.
        y: (..., Sq, Sk), what ``softmax_forward`` returned.
        scale: as in the forward.
        causal: as in the forward. Not needed: y is 0 where masked, and to leave out the upper half of the square costs
            more (1.3 times at Sk = 1024: both inputs must be copied to be contiguous) than it saves (0.9 at 4096).

    Returns:
        (..., Sq, Sk), dtype of y, contiguous. Products and the sum are taken in float32.
    """
    exact = _keeps(y, scale, y.is_cpu or y.is_cuda)
    if not y.is_cpu or y.numel() <= _slabs.SLAB // 2:
        if exact:
            dx = _softmax_backward_data(grad, y, -1, y.dtype)
            return dx if scale == 1.0 else dx.mul_(scale)
        return _softmax_backward_data(grad.float(), y.float(), -1, torch.float32).mul_(scale).to(y.dtype)
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    limit = _slabs.limit(y.numel(), 1 if exact else 4)
    wide = None if exact else torch.empty(2, max(limit, y.size(-1)), dtype=torch.float32, device="cpu")
    for dx, g, p in _slabs.pieces(limit, out, grad, y, rows=True):
        if wide is None:
            _softmax_backward_data(g, p, -1, y.dtype, grad_input=dx)
            if scale != 1.0:
                dx.mul_(scale)
        else:
            wide_g, wide_p = wide[:, : dx.numel()].view(2, *dx.shape)
            wide_g.copy_(g)
            wide_p.copy_(p)
            _softmax_backward_data(wide_g, wide_p, -1, torch.float32, grad_input=wide_g)
            dx.copy_(wide_g.mul_(scale))
    return out


def _keeps(x: Tensor, scale: float, wide_sums: bool) -> bool:
    """Whether a product with ``scale`` loses nothing in the dtype of x, so that no float32 copy is owed.

    It is so in float32 and float64; and for a power of two in 16 bits (1/8 = 1/sqrt(64) is the usual scale, above 1
    float16 could overflow, among its subnormals it is off by 3e-8), where ATen takes the sums of a row in float32.
    """
    if x.element_size() >= 4 or scale == 1.0:
        return wide_sums or x.element_size() >= 4
    return wide_sums and math.frexp(abs(scale))[0] == 0.5 and 1e-30 < abs(scale) < 1.0


def _plain_forward(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """The definition, in few calls and without asking the device anything: for other devices and small tensors."""
    keeps = _keeps(x, scale, x.is_cpu or x.is_cuda)
    scores = torch.mul(x if keeps else x.float(), scale)
    masked = mask if mask is None or mask.dtype is torch.bool else mask.ne(0)
    if causal:
        upper = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu_(1)
        masked = upper if masked is None else upper.logical_or(masked)
    if masked is None:
        y = _softmax(scores, -1, False)
    else:
        # Filling before drops what NaN and inf there are; filling after makes a fully masked row 0, not NaN.
        y = _softmax(scores.masked_fill_(masked, -math.inf), -1, False)
        if not x.is_cpu or x.numel() <= 2048 or _has_nan_row(y):  # 3 calls, so not for the smallest; see masked_fill
            y.masked_fill_(masked, 0.0)
    return y if keeps else y.to(x.dtype)


def _unexpanded(mask: Tensor, rank: int) -> Tensor:
    """The mask at the rank of x, with size 1 for each dimension along which it only repeats itself."""
    if mask.dim() < rank:
        mask = mask[(None,) * (rank - mask.dim())]
    for dim, stride in enumerate(mask.stride()):
        if stride == 0 and mask.size(dim) > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


class _Slabs:
    """The CPU forward of one large tensor: its constants and its two buffers, which every slab uses again.

    A mask becomes an additive bias of 0 and -inf, made once for all the heads that share it, because
    ``add(bias, x, alpha=scale)`` is one vectorised pass where ``masked_fill`` with a bool mask is scalar code (10 times
    as long as a copy in the cache). A bias cannot undo a NaN or inf of x, and leaves a fully masked row all -inf: but
    either makes the whole row NaN after the softmax, so one column tells whether a slab needs ``_mend``.
    """

    def __init__(self, x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> None:
        keeps = _keeps(x, scale, True)
        self.dtype = x.dtype if keeps else torch.float32
        self.bits = _BITS[self.dtype]
        # add(alpha=) raises on a number that float32 cannot hold, mul takes it as inf.
        self.scale = scale if x.dtype is torch.float64 else max(-_FLOAT32_MAX, min(_FLOAT32_MAX, scale))
        share = (1 if keeps else 2) * (2 if causal else 1)  # causal needs the scratch in any dtype
        self.limit = _slabs.limit(x.numel(), share)
        self.size = min(x.numel(), max(self.limit, x.size(-1)))
        self.bias_size = self.size if causal or mask is None else min(self.size, mask.numel())
        self._scratch: Tensor | None = None
        self._bias: Tensor | None = None
        # Which rows of the present bias have an unmasked position, by slice: heads that share a bias share this too.
        self._rows: dict[tuple[int, torch.Size], Tensor] = {}

    def causal(self, x: Tensor, mask: Tensor | None, out: Tensor) -> None:
        """Row blocks, each up to the column where its last row ends; the rest of the columns is zeroed.

        At Sk = 1024 this takes 2.3 copies, the whole square with a triangular bias 3.7.
        """
        sq, sk = x.shape[-2:]
        square = min(sq, sk)
        # A sixteenth of the square, but no block below 64 Ki elements, and none whose rows do not fit a slab.
        rows = max(32, min(256, square // 16), 65536 * sq // x.numel())
        rows = max(1, min(rows, self.limit // sk, square))
        # One constant serves every block: zeros, then the triangle; a block at row r begins r columns before it.
        edge = -(-square // rows) * rows - rows
        wedge = torch.zeros(rows, edge + rows, dtype=self.dtype, device="cpu")
        wedge[:, edge:].masked_fill_(torch.ones(rows, rows, dtype=torch.bool, device="cpu").triu_(1), -math.inf)
        wedge = wedge[(None,) * (x.dim() - 2)]
        for row in range(0, square, rows):
            n = min(rows, square - row)
            end = row + n
            bias = wedge[..., :n, edge - row : edge + n]
            part = mask
            if mask is not None:
                part = mask if mask.size(-2) == 1 else mask.narrow(-2, row, n)
                part = part if mask.size(-1) == 1 else part.narrow(-1, 0, end)
                part = part.expand(*mask.shape[:-2], n, end)
            self.masked(x[..., row:end, :end], part, bias, out[..., row:end, :end])
            out[..., row:end, end:].zero_()
        if sq > square:
            part = mask if mask is None or mask.size(-2) == 1 else mask[..., square:, :]
            self.masked(x[..., square:, :], part, None, out[..., square:, :])

    def masked(self, x: Tensor, mask: Tensor | None, wedge: Tensor | None, out: Tensor) -> None:
        """Cuts first by the mask, until its bias fits the buffer, then by what shares that bias."""
        wedges = () if wedge is None else (wedge,)
        if mask is None:
            for o, part, *w in _slabs.pieces(self.limit, out, x, *wedges, rows=True):
                self._slab(part, w[0] if w else None, o)
            return
        for m, x_of, out_of, *w in _slabs.pieces(self.limit, mask, x, out, *wedges, rows=True):
            bias = self._bias_of(m)
            if w:
                bias.add_(w[0])
            for o, part, b in _slabs.pieces(self.limit, out_of, x_of, bias, rows=True):
                self._slab(part, b, o)

    def _bias_of(self, mask: Tensor) -> Tensor:
        """0 where free, -inf where masked, in the buffer: the mask's 0 and 1 times the bits of -inf.

        Two vectorised passes; a masked_fill of the bias takes 10 times as long, a copy from bool (not int8) 3 times.
        """
        if self._bias is None:
            self._bias = torch.empty(self.bias_size, dtype=self.bits.dtype, device="cpu")
        bias = self._bias[: mask.numel()].view(mask.shape)
        ones = mask if mask.dtype is torch.bool else mask.clamp(max=1)
        bias.copy_(ones.view(torch.int8)).mul_(self.bits.inf)
        self._rows.clear()
        return bias.view(self.dtype)

    def _slab(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        buf = out
        if out.dtype is not self.dtype or not out.is_contiguous():  # ATen's kernel writes contiguous rows only
            if self._scratch is None:
                self._scratch = torch.empty(self.size, dtype=self.dtype, device="cpu")
            buf = self._scratch[: out.numel()].view(out.shape)
        # add(bfloat16, bfloat16, out=float32) would round before it stores, so 16 bits are widened by a copy.
        scores = x if x.dtype is self.dtype else buf.copy_(x)
        if bias is None:
            torch.mul(scores, self.scale, out=buf)
        else:
            torch.add(bias, scores, alpha=self.scale, out=buf)
        _softmax(buf, -1, False, out=buf)
        if bias is not None and _has_nan_row(buf):
            self._mend(x, bias, buf)
        if buf is not out:
            out.copy_(buf)

    def _mend(self, x: Tensor, bias: Tensor, buf: Tensor) -> None:
        """Sets fully masked rows to 0; if a row is still NaN, does the slab again with x cleared where masked.

        Both by a bitwise "and" with -1 or 0, one vectorised pass that NaN does not survive: a padded batch (1 in 4
        rows fully masked) takes 1.2 times as long as a clean one, by index_fill_ 1.5. NaN under the mask: 2.7.
        """
        key = int(bias.storage_offset()), bias.shape
        if key not in self._rows:
            self._rows[key] = self._free(bias.amax(-1, keepdim=True))
        rows = self._rows[key]
        bits = buf.view(self.bits.dtype)
        bits.bitwise_and_(rows)
        if _has_nan_row(buf):
            free = self._free(bias)
            buf.copy_(x)
            bits.bitwise_and_(free)
            torch.add(bias, buf, alpha=self.scale, out=buf)
            _softmax(buf, -1, False, out=buf)
            bits.bitwise_and_(free)  # a row that is still NaN is so by right, but not where it is masked

    def _free(self, bias: Tensor) -> Tensor:
        """All bits set where the bias is 0, none where it is -inf."""
        return bias.view(self.bits.dtype).bitwise_right_shift(self.bits.sign).bitwise_not_()


def _has_nan_row(y: Tensor) -> bool:
    return math.isnan(y.select(-1, 0).sum().item())  # y is in [0, 1]: the sum is NaN if and only if one of them is
