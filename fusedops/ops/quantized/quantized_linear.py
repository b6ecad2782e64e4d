"""A linear layer with a packed weight, in the block formats of GGUF files: 4 to 8 bits for each weight. Replaces
transformers' dequantized linear layers, and llama.cpp's products where the activation must stay exact.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.constraints import Bytes, Floating, OneOf, PackedRows, Rank, SameDevice, SameSize
from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.quantization import FORMATS, dequantize


def quantized_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None = None, *, format: str, backend: str | None = None
) -> Tensor:
    """Compute ``x @ dequantize(packed, format).T + bias``.

    The activation is not quantized: each weight has the exact value of its format, and the products are summed in
    float32. llama.cpp rounds the activation to 8 bits first.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        packed: uint8, (N, bytes of a row), N rows of K weights, as ``fusedops.quantization.quantize`` returns them and
            GGUF files store them. It has no gradient.
        bias: (N,), any of the dtypes of ``x``, or None.
        format: one of ``fusedops.quantization.FORMATS``: "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K",
            "Q6_K". K is a multiple of its block, 256 for the last three, else 32.
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Returns:
        (..., N), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64) and rounded once.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: gguf, ``gguf.quants``; torch, ``torch.nn.functional.linear``.

    >>> import torch, fusedops
    >>> packed = fusedops.quantization.quantize(torch.eye(32)[:3], "Q8_0")
    >>> fusedops.quantized_linear(torch.arange(32.0), packed, format="Q8_0")
    tensor([0.0000, 0.9999, 1.9999])
    """
    return call(OP, (x, packed, bias, format), backend)


def reference(x: Tensor, packed: Tensor, bias: Tensor | None, format: str) -> Tensor:
    """Compute the op in plain torch."""
    wide = compute_dtype(x.dtype)
    with no_autocast(x.device.type):
        y = x.to(wide) @ dequantize(packed, format, wide).t()
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def backward(
    grad: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    format: str,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and bias."""
    wide = compute_dtype(x_dtype)
    g = grad.to(wide)
    dx = dbias = None
    if needs[0]:
        with no_autocast(grad.device.type):
            dx = (g @ dequantize(packed, format, wide)).to(x_dtype)
    if needs[1] and bias is not None:
        # not the sum over (): of no dim it is the sum over all; nor Size.numel, which fixes a symbolic size
        dbias = g.reshape(prod(g.shape[:-1]), g.shape[-1]).sum(0).to(bias.dtype)
    return dx, dbias


def empty(x: Tensor, packed: Tensor, bias: Tensor | None, format: str) -> Tensor:
    """Return an empty output."""
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


OP = Op(
    quantized_linear,
    constraints=[
        Floating("x"),
        Rank("x", at_least=1),
        Bytes("packed"),
        Rank("packed", 2),
        SameDevice("packed", "x"),
        OneOf("format", *FORMATS),
        PackedRows("packed", "x", "format"),
        Floating("bias"),
        SameDevice("bias", "x"),
        Rank("bias", 1),
        SameSize("bias", 0, "packed", 0),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x", "bias"),
    empty=empty,
    sharding="fusedops.ops.quantized.sharding:SHARDING",
    evidence="fusedops.ops.quantized.evidence:QUANTIZED_LINEAR",
)
