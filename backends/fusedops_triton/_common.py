"""Helpers for all kernels: the compute dtype, and scalar arguments."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fusedops.dtypes import compute_dtype

_COMPUTE_TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def compute_type(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of sums and functions for tensors of ``dtype``. Kernels get it as the constexpr WIDE."""
    return _COMPUTE_TYPES[compute_dtype(dtype)]


@triton.jit
def scalar(value, WIDE: tl.constexpr):
    """Return a scalar argument in WIDE. For float64 it is the double whose bits ``scalar_for`` passed.

    Triton passes a number below the smallest normal float32 as a float64, which would widen what it is used with.
    """
    if WIDE == tl.float64:  # noqa: SIM300 - ruff takes any upper case name for a constant
        return value.to(tl.int64).to(tl.float64, bitcast=True)
    return tl.cast(value, WIDE)  # pyright: ignore[reportArgumentType]


@triton.jit
def widened(value, WIDE: tl.constexpr):
    """Convert elements to WIDE.

    A bfloat16 is the upper half of a float32. By a shift of its bits, each of the two in a register takes one
    instruction; by Triton's conversion, every second one takes two.
    """
    if value.dtype == tl.bfloat16 and WIDE == tl.float32:  # noqa: SIM300 - as above
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(WIDE)


@triton.jit
def exp(x):
    """Return e to the power of x. In float32 two instructions, where tl.exp has five: results below 1e-38 are 0."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def reciprocal(x):
    """Return 1 / x for x >= 1. In float32 two instructions, where a division has eight: within 3e-7 of itself."""
    if x.dtype == tl.float64:
        return 1.0 / x
    root = tl.rsqrt(x)
    return root * root
