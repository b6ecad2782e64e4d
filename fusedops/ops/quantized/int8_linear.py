"""A linear layer of 8-bit integers: rows of x are rounded to int8, and so is the weight. Replaces torch's dynamic int8
linear, ``torch._int_mm`` with its scales, and torch_npu's npu_dynamic_quant with npu_quant_matmul.
"""

from __future__ import annotations

from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops._named_tuple import NamedTuple
from fusedops.constraints import (
    Between,
    Dim,
    DType,
    Floating,
    Int8,
    LeadingDims,
    OneOf,
    Present,
    Rank,
    SameDevice,
    SameSize,
    When,
)
from fusedops.dtypes import STORAGE, compute_dtype, no_autocast
from fusedops.quantization import rounded_rows

MOST_TERMS = 133_000  # products of 127 * 127 whose sum is below 2^31
_TERMS = 1024  # products of 127 * 127 whose sum is below 2^24: exact in float32, in any order
_BY_NAME = {each.name: each.dtype for each in STORAGE.values() if each.dtype is not torch.float64}


class Int8LinearArgs(NamedTuple):
    """The arguments of int8_linear."""

    x: Tensor
    x_scale: Tensor | None
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None = None
    smooth: Tensor | None = None
    dtype: str | None = None


def int8_linear(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    *,
    smooth: Tensor | None = None,
    dtype: torch.dtype | Literal["float16", "bfloat16", "float32"] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute ``(q @ weight.T) * x_scale * weight_scale + bias``, q the rows of x rounded to 8 bits.

    The sum of integers is exact, then converted to float32; each further step is one rounding in float32. So the result
    has the same bits on every backend, for any number of rows and threads.

    Args:
        x: (..., K), K up to 133,000: float16, bfloat16, float32 or float64, whose rows are rounded as
            :func:`fusedops.quantization.quantize_rows` does; or int8, rounded already, in [-127, 127].
        x_scale: (...), floating, rounded to float32: of the rows of an int8 x. Of a floating x the scale to round with,
            where larger numbers become 127 or -127; None: each row's ``max(abs(x)) / 127``.
        weight: (N, K), int8, in [-127, 127]. It has no gradient.
        weight_scale: (N,), floating, rounded to float32, without a gradient.
        bias: (N,), floating, or None.
        smooth: (K,), floating: a floating x is divided by it first. None: by nothing.
        dtype: of the result, float16, bfloat16 or float32, or its name. None: that of ``x``, float32 for int8.
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Returns:
        (..., N), contiguous. A row of x with NaN or inf gives NaN. The gradient of x is that of
        ``(x / smooth) @ (weight * weight_scale).T``, without the rounding of x.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch_npu, ``npu_quant_matmul``; Bengio et al. 2013, arXiv:1308.3432 (the gradient).

    >>> import torch, fusedops
    >>> q, scale = fusedops.quantization.quantize_rows(torch.tensor([[0.5, -1.0], [3.0, 1.0]]))
    >>> fusedops.int8_linear(torch.tensor([2.0, 1.0]), None, q, scale)
    tensor([0.0000, 6.9999])
    """
    return call(OP, (x, x_scale, weight, weight_scale, bias, smooth, name_of(dtype)), backend)


def name_of(dtype: Any) -> Any:
    """Return the name of a dtype; anything else as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the name of a dtype."""
    return (*args[:-1], name_of(args[-1])) if isinstance(args[-1], torch.dtype) else args


def output_dtype(a: Int8LinearArgs) -> torch.dtype:
    """Return the dtype of the result."""
    return _BY_NAME[a.dtype] if a.dtype else a.x.dtype if a.x.dtype.is_floating_point else torch.float32


def exact(a: Int8LinearArgs) -> Tensor:
    """Compute the result, without a gradient."""
    if a.x.is_floating_point():
        q, x_scale = rounded_rows(a.x, a.x_scale, a.smooth)
    else:
        assert a.x_scale is not None  # by the op's constraints
        q, x_scale = a.x, a.x_scale.detach().float()
    y = _integer_sums(q, a.weight).float() * x_scale[..., None] * a.weight_scale.detach().float()
    y = y if a.bias is None else y + a.bias.detach().float()
    return y.to(output_dtype(a))


def _integer_sums(q: Tensor, weight: Tensor) -> Tensor:
    """Return ``q @ weight.T`` in int32. Products in float32 of few terms are exact, on every device.

    ``torch._int_mm`` is not: of one column it is wrong on a CPU (torch 2.13).
    """
    total = q.new_zeros((*q.shape[:-1], weight.shape[0]), dtype=torch.int32)
    with no_autocast(q.device.type):
        for first in range(0, q.shape[-1], _TERMS):
            part = slice(first, first + _TERMS)
            total = total + (q[..., part].float() @ weight[:, part].float().t()).int()
    return total


def reference(a: Int8LinearArgs) -> Tensor:
    """Compute the op in plain torch."""
    return exact(a) + _zero(a)


def _zero(a: Int8LinearArgs) -> Tensor | float:
    """Return 0 with the gradients of x and bias."""
    zero, wide = 0.0, compute_dtype(torch.promote_types(output_dtype(a), a.x.dtype))
    if a.x.is_floating_point():
        difference = (a.x - a.x.detach()).to(wide)
        difference = difference if a.smooth is None else difference / a.smooth.to(wide)
        weight = a.weight.to(wide) * a.weight_scale.to(wide)[:, None]
        with no_autocast(a.x.device.type):
            zero = (difference @ weight.t()).to(output_dtype(a))
    return zero if a.bias is None else zero + (a.bias - a.bias.detach()).to(output_dtype(a))


def backward(
    grad: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    smooth: Tensor | None,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x, as if it were not rounded, and of bias."""
    wide = compute_dtype(torch.promote_types(grad.dtype, x_dtype))
    g = grad.to(wide)
    dx = dbias = None
    if needs[0]:
        with no_autocast(grad.device.type):
            dx = g @ (weight.to(wide) * weight_scale.to(wide)[:, None])
        dx = (dx if smooth is None else dx / smooth.to(wide)).to(x_dtype)
    if needs[1] and bias is not None:
        # not the sum over (): of no dim it is the sum over all; nor Size.numel, which fixes a symbolic size
        dbias = g.reshape(prod(g.shape[:-1]), g.shape[-1]).sum(0).to(bias.dtype)
    return dx, dbias


def empty(a: Int8LinearArgs) -> Tensor:
    """Return an empty output."""
    return a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0]), dtype=output_dtype(a))


_IS_INT8 = DType("x", torch.int8)
OP = Op(
    int8_linear,
    constraints=[
        Int8("x", or_floating=True),
        Rank("x", at_least=1),
        Dim("x", (-1,), at_most=MOST_TERMS),
        Between("x_scale", 0.01, 0.1),
        SameDevice("x_scale", "x"),
        LeadingDims("x_scale", "x"),
        When(_IS_INT8, Present("x_scale")),
        Int8("weight"),
        Rank("weight", 2),
        SameDevice("weight", "x"),
        SameSize("weight", 1, "x", -1, rebuilds=True),
        Floating("weight_scale"),
        SameDevice("weight_scale", "x"),
        Rank("weight_scale", 1),
        SameSize("weight_scale", 0, "weight", 0),
        Floating("bias"),
        SameDevice("bias", "x"),
        Rank("bias", 1),
        SameSize("bias", 0, "weight", 0),
        Floating("smooth"),
        SameDevice("smooth", "x"),
        Rank("smooth", 1),
        SameSize("smooth", 0, "weight", 1),
        When(_IS_INT8, Present("smooth", False)),
        OneOf("dtype", *_BY_NAME, or_none=True),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x", "bias"),
    output_dtype=output_dtype,
    empty=empty,
    prepare_args=prepare_args,
    sharding="fusedops.ops.quantized.sharding:INT8_SHARDING",
    evidence="fusedops.ops.quantized.evidence:INT8_LINEAR",
)
