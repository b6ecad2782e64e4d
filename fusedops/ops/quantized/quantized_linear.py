"""A linear layer with a packed weight, in the formats of GGUF files and of the Hub: 4 to 8 bits a weight. Replaces
transformers' dequantized linear layers, and llama.cpp's products where the activation must stay exact.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops._named_tuple import NamedTuple
from fusedops.constraints import Bytes, Floating, OneOf, PackedPart, PackedRows, Rank, SameDevice, SameSize
from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.errors import InvalidInputError
from fusedops.quantization import FORMATS, SCALED, Packed, dequantize
from fusedops.quantization._scaled import unpack_rows


class QuantizedLinearArgs(NamedTuple):
    """The arguments of quantized_linear."""

    x: Tensor
    packed: Tensor
    bias: Tensor | None = None
    format: str | None = None
    scales: Tensor | None = None
    global_scale: Tensor | None = None
    zeros: Tensor | None = None


class QuantizedLinearGradArgs(NamedTuple):
    """The arguments of the backward of quantized_linear."""

    grad: Tensor
    packed: Tensor
    bias: Tensor | None
    format: str | None
    scales: Tensor | None
    global_scale: Tensor | None
    zeros: Tensor | None
    x_dtype: torch.dtype
    needs: tuple[bool, ...]


def quantized_linear(
    x: Tensor,
    packed: Packed | Tensor,
    bias: Tensor | None = None,
    *,
    format: str | None = None,
    scales: Tensor | None = None,
    global_scale: Tensor | None = None,
    zeros: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute ``x @ unpack(packed).T + bias``.

    The activation is not quantized: each weight has the exact value of its format, and the products are summed in
    float32. llama.cpp rounds the activation to 8 bits first.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        packed: a :class:`fusedops.quantization.Packed` of shape (N, K); or uint8, (N, bytes of a row), N rows of K
            weights, as ``fusedops.quantization.quantize`` returns them and GGUF files store them. It has no gradient.
        bias: (N,), any of the dtypes of ``x``, or None.
        format: of bytes: one of ``fusedops.quantization.FORMATS``, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K",
            "Q5_K", "Q6_K", "MXFP4_GGUF", "NVFP4_GGUF". K is a multiple of its block, 256 for those with a K, 64 for the
            last one, else 32. None for a Packed, which has its own.
        scales: of bytes of another format, as the tensor of that name of a Packed; None for a Packed.
        global_scale: likewise.
        zeros: likewise.
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Returns:
        (..., N), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64) and rounded once.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: gguf, ``gguf.quants``; torch, ``torch.nn.functional.linear``; as of :class:`fusedops.quantization.Packed`.

    >>> import torch, fusedops
    >>> packed = fusedops.quantization.quantize(torch.eye(32)[:3], "Q8_0")
    >>> fusedops.quantized_linear(torch.arange(32.0), packed, format="Q8_0")
    tensor([0.0000, 0.9999, 1.9999])
    >>> fusedops.quantized_linear(torch.arange(32.0), fusedops.quantization.pack(torch.eye(32)[:3], "MXFP4"))
    tensor([0., 1., 2.])
    """
    args = (x, packed, bias, format, scales, global_scale, zeros)
    return call(OP, prepare_args(args) if isinstance(packed, Packed) else args, backend)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the tensors of a Packed in its place."""
    x, packed, bias, format, *others = args
    if not isinstance(packed, Packed):
        return args
    if any(each is not None for each in others) or format not in (None, packed.format):
        raise InvalidInputError(
            f"quantized_linear: got a Packed of {packed.format} beside a format or scales of its own, expected one of "
            f"both; to fix: leave out format, scales, global_scale and zeros"
        )
    return (x, packed.codes, bias, packed.format, packed.scales, packed.global_scale, packed.zeros)


def weight_of(a: QuantizedLinearArgs | QuantizedLinearGradArgs, dtype: torch.dtype) -> Tensor:
    """Return the unpacked weight, (N, K)."""
    assert a.format is not None  # by the op's constraints
    if a.scales is None:
        return dequantize(a.packed, a.format, dtype)
    return unpack_rows(a.format, a.packed, a.scales, a.global_scale, a.zeros).to(dtype)


def reference(a: QuantizedLinearArgs) -> Tensor:
    """Compute the op in plain torch."""
    wide = compute_dtype(a.x.dtype)
    with no_autocast(a.x.device.type):
        y = a.x.to(wide) @ weight_of(a, wide).t()
    return (y if a.bias is None else y + a.bias.to(wide)).to(a.x.dtype)


def backward(args: QuantizedLinearGradArgs) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and bias."""
    wide = compute_dtype(args.x_dtype)
    g = args.grad.to(wide)
    dx = dbias = None
    if args.needs[0]:
        with no_autocast(g.device.type):
            dx = (g @ weight_of(args, wide)).to(args.x_dtype)
    if args.needs[1] and args.bias is not None:
        # not the sum over (): of no dim it is the sum over all; nor Size.numel, which fixes a symbolic size
        dbias = g.reshape(prod(g.shape[:-1]), g.shape[-1]).sum(0).to(args.bias.dtype)
    return dx, dbias


def empty(a: QuantizedLinearArgs) -> Tensor:
    """Return an empty output."""
    return a.x.new_empty((*a.x.shape[:-1], a.packed.shape[0]))


OP = Op(
    quantized_linear,
    constraints=[
        Floating("x"),
        Rank("x", at_least=1),
        Bytes("packed"),
        Rank("packed", 2),
        SameDevice("packed", "x"),
        OneOf("format", *FORMATS, *SCALED),
        PackedRows("packed", "x", "format"),
        SameDevice("scales", "x"),
        PackedPart("scales", "packed", "format"),
        SameDevice("global_scale", "x"),
        PackedPart("global_scale", "packed", "format"),
        SameDevice("zeros", "x"),
        PackedPart("zeros", "packed", "format"),
        Floating("bias"),
        SameDevice("bias", "x"),
        Rank("bias", 1),
        SameSize("bias", 0, "packed", 0),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x", "bias"),
    prepare_args=prepare_args,
    empty=empty,
    sharding="fusedops.ops.quantized.sharding:SHARDING",
    evidence="fusedops.ops.quantized.evidence:QUANTIZED_LINEAR",
)
