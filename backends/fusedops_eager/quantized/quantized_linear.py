"""quantized_linear in plain torch: the weight is unpacked in chunks of rows, never whole."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.ops.quantized.quantized_linear import QuantizedLinearArgs, QuantizedLinearGradArgs
from fusedops.quantization import chunks, weights_of_row


def quantized_linear(a: QuantizedLinearArgs) -> Tensor:
    """Compute the op; each chunk of rows of the weight gives columns of the result."""
    x, bias = a.x, a.bias
    wide, rows = compute_dtype(x.dtype), x.shape[:-1]
    flat = x.reshape(rows.numel(), x.shape[-1]).to(wide)
    y = x.new_empty((flat.shape[0], a.packed.shape[0]))
    with no_autocast(x.device.type):
        for at, weight in _chunks(a, wide):
            part = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias[at].to(wide), flat, weight.t())
            y[:, at] = part
    return y.view(*rows, a.packed.shape[0])


def quantized_linear_backward(a: QuantizedLinearGradArgs) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x, a sum over the chunks, and of bias."""
    wide, rows = compute_dtype(a.x_dtype), a.grad.shape[:-1]
    flat = a.grad.reshape(rows.numel(), a.grad.shape[-1]).to(wide)
    dx = dbias = None
    if a.needs[0]:
        columns = weights_of_row(a.packed.shape[1], a.format or "")
        total = flat.new_zeros((flat.shape[0], columns))
        with no_autocast(a.grad.device.type):
            for at, weight in _chunks(a, wide):
                total.addmm_(flat[:, at], weight)
        dx = total.view(*rows, columns).to(a.x_dtype)
    if a.needs[1] and a.bias is not None:
        dbias = flat.sum(0).to(a.bias.dtype)
    return dx, dbias


def _chunks(a: QuantizedLinearArgs | QuantizedLinearGradArgs, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of rows of the weight in a dtype."""
    assert a.format is not None  # by the op's constraints
    for rows, weight in chunks(a.format, a.packed, a.scales, a.global_scale, a.zeros):
        yield rows, weight.to(dtype)
