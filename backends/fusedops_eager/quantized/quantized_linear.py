"""quantized_linear in plain torch: the weight is unpacked in chunks of rows, never whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.quantization import FORMATS, dequantize

_CHUNK = 2**20  # weights of a chunk: 4 MiB in float32


def quantized_linear(x: Tensor, packed: Tensor, bias: Tensor | None, format: str) -> Tensor:
    """Compute the op; each chunk of rows of the weight gives columns of the result."""
    wide, rows = compute_dtype(x.dtype), x.shape[:-1]
    flat = x.reshape(rows.numel(), x.shape[-1]).to(wide)
    y = x.new_empty((flat.shape[0], packed.shape[0]))
    with no_autocast(x.device.type):
        for at, weight in _chunks(packed, format, wide):
            part = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias[at].to(wide), flat, weight.t())
            y[:, at] = part
    return y.view(*rows, packed.shape[0])


def quantized_linear_backward(
    grad: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    format: str,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x, a sum over the chunks, and of bias."""
    wide, rows = compute_dtype(x_dtype), grad.shape[:-1]
    flat = grad.reshape(rows.numel(), grad.shape[-1]).to(wide)
    dx = dbias = None
    if needs[0]:
        columns = packed.shape[1] // FORMATS[format].bytes * FORMATS[format].weights
        total = flat.new_zeros((flat.shape[0], columns))
        with no_autocast(grad.device.type):
            for at, weight in _chunks(packed, format, wide):
                total.addmm_(flat[:, at], weight)
        dx = total.view(*rows, columns).to(x_dtype)
    if needs[1] and bias is not None:
        dbias = flat.sum(0).to(bias.dtype)
    return dx, dbias


def _chunks(packed: Tensor, format: str, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of rows of the weight in a dtype."""
    columns = packed.shape[1] // FORMATS[format].bytes * FORMATS[format].weights
    step = max(16, _CHUNK // max(columns, 1))
    for start in range(0, packed.shape[0], step):
        at = slice(start, start + step)
        yield at, dequantize(packed[at], format, dtype)
