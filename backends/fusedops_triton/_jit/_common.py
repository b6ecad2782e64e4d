"""Helpers for all kernels: elements as float32, and functions of few instructions."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: The dtypes of tensors whose products kernels compute, as Triton has them.
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def scalar(value):
    """Return a scalar argument as a float32: Triton may pass a number below the smallest normal one as a float64."""
    return tl.cast(value, tl.float32)  # pyright: ignore[reportArgumentType]


@triton.jit
def widened(value):
    """Convert elements to float32.

    A bfloat16 is the upper half of a float32. By a shift of its bits, each of the two in a register takes one
    instruction; by Triton's conversion, every second one takes two.
    """
    if value.dtype == tl.bfloat16:
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def read(pointers, inside):
    """Load elements as float32, 0 where ``inside`` is False."""
    return widened(tl.load(pointers, mask=inside, other=0.0))


@triton.jit
def read_evicting(pointers, inside, EVICTION: tl.constexpr):
    """Load elements as ``read`` does, with an eviction policy of ``tl.load``."""
    return widened(tl.load(pointers, mask=inside, other=0.0, eviction_policy=EVICTION))  # pyright: ignore[reportArgumentType]


@triton.jit
def exp(x):
    """Return e to the power of x in two instructions, where tl.exp has five: results below 1e-38 are 0."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(x):
    """Return 1 / x for x >= 1 in two instructions, where a division has eight: within 3e-7 of itself."""
    root = tl.rsqrt(x)
    return root * root
