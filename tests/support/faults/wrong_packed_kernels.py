"""Wrong kernels of quantized_linear, for the list in ``wrong_kernels``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from wrong_kernels import Run, wrong

from fusedops.quantization import FORMATS, SCALED

OP = "quantized_linear"


def with_scales(a: SimpleNamespace, byte: int, bits: int) -> Tensor:
    """Return the packed weight with only some bits of a byte of each block's float16 numbers."""
    if a.format not in FORMATS:
        return a.packed
    packed, block = a.packed.clone(), FORMATS[a.format]
    for at in block.scales:
        packed[:, at + byte :: block.bytes] &= bits
    return packed


def neighbours(scales: Tensor) -> Tensor:
    """Return scales of which each is that of the group before, of the last row for the first group."""
    return scales.flatten().roll(1).view(scales.shape)


@wrong("a scale is that of the group before, in formats with a tensor of scales", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.scales is None else run(scales=neighbours(a.scales))


@wrong("powers of two as scales are off by one", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scales=a.scales + 1) if a.format == "MXFP4" else run()


@wrong("the scales of NVFP4 have no sign", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(scales=a.scales & 0x7F) if a.format == "NVFP4" else run()


@wrong("the global scale is a factor", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.global_scale is None else run(global_scale=1 / a.global_scale)


@wrong("zeros are those of the group before", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.zeros is None else run(zeros=neighbours(a.zeros))


@wrong("zeros are left out", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run() if a.zeros is None else run(zeros=None)


@wrong("blocks of 128 rows begin one row late", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    y = run()
    if a.format != "FP8_BLOCK" or a.packed.shape[0] <= 128 or not y.numel():
        return y
    y[..., 128] = run(packed=a.packed.roll(-1, 0))[..., 127]
    return y


@wrong("the sign of the scales is ignored", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(packed=with_scales(a, 1, 0x7F))


@wrong("the scales are rounded to bfloat16", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(packed=with_scales(a, 0, 0xF8))


@wrong("the bias is dropped for one row", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(bias=None) if a.x.shape[:-1].numel() == 1 else run()


@wrong("the second block of a row is read as the first", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    packed, size = a.packed.clone(), FORMATS[a.format].bytes if a.format in FORMATS else 16
    if packed.shape[1] > size:
        packed[:, size : 2 * size] = packed[:, :size]
    return run(packed=packed)


@wrong("a block has the scale of the one before", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.format not in FORMATS:
        return run(scales=neighbours(a.scales))
    packed, size = a.packed.clone(), FORMATS[a.format].bytes
    for at in FORMATS[a.format].scales:
        scales = a.packed[:, at::size], a.packed[:, at + 1 :: size]
        for byte, values in enumerate(scales):
            packed[:, at + byte + size :: size] = values[:, :-1]
    return run(packed=packed)


@wrong("the halves of a byte are swapped", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.format in SCALED and SCALED[a.format].bits == 4:
        return run(packed=(a.packed >> 4) | (a.packed << 4))
    if a.format not in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        return run()
    blocks = a.packed.reshape(a.packed.shape[0], a.packed.shape[1] // FORMATS[a.format].bytes, -1).clone()
    data = blocks[:, :, -16:]
    blocks[:, :, -16:] = (data >> 4) | (data << 4)
    return run(packed=blocks.reshape(a.packed.shape))


@wrong("codes of words of 32 bits are read from the highest byte", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.format not in SCALED or a.packed.shape[1] % 4:
        return run()
    return run(packed=a.packed.unflatten(1, (-1, 4)).flip(2).flatten(1))


@wrong("codes of rows of no whole words of 32 bits lack the rest", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    packed = a.packed.clone()
    packed[:, packed.shape[1] // 4 * 4 :] = 0
    return run(packed=packed) if a.format in SCALED and SCALED[a.format].bits == 8 else run()


@wrong("the rows beyond a multiple of four are those of another", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    y = run()
    rows = y.reshape(y.shape[:-1].numel(), y.shape[-1])
    if rows.shape[0] > 4:
        rows[rows.shape[0] // 4 * 4 :] = rows[0].clone()
    return rows.view(y.shape)


@wrong("rows of the weight with storage between them are read as dense", OP, "forward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    if a.packed.is_contiguous() or not a.packed.numel():
        return run()
    return run(packed=a.packed.as_strided(a.packed.shape, (a.packed.shape[1], 1)))


@wrong("the activation is rounded to 8 bits", OP, "forward", "float64")
def _(run: Run, a: SimpleNamespace) -> Any:
    scale = a.x.abs().amax(-1, keepdim=True) / 127 if a.x.numel() else a.x
    return run(x=torch.where(scale > 0, (a.x / scale).round() * scale, a.x))


@wrong("the gradient of x is that of the scales without a sign", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    return run(packed=with_scales(a, 1, 0x7F))


@wrong("the gradient of the bias is of the first row", OP, "backward", "calls")
def _(run: Run, a: SimpleNamespace) -> Any:
    dx, dbias = run()
    if dbias is None or a.grad.dim() < 2 or not a.grad.numel():
        return dx, dbias
    return dx, a.grad.flatten(0, -2)[0].to(dbias.dtype).clone()
