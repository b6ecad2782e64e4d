"""A tensor times one number on the device, rounded once: the last step of a gradient that forward has computed.

torch.mul does not read such a number once for all: on an H200 it takes 2.0 ms for the (128256, 4096) gradient of a
weight, from float32 to bfloat16, where its bytes take 0.75.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, tile


def scaled(value: Tensor, factor: Tensor, dtype: torch.dtype, reuse: bool) -> Tensor:
    """Return ``value * factor``, contiguous.

    Args:
        value: float32, any strides.
        factor: ().
        dtype: of the result.
        reuse: True may write over ``value``.
    """
    value = value.resolve_neg().contiguous()
    out = value if reuse and value.dtype is dtype else torch.empty_like(value, dtype=dtype)
    if out.numel():
        _launch_of(out.numel(), min(out.element_size(), value.element_size()))(out, out, value, factor.resolve_neg())
    return out


@cached_by_layout
def _launch_of(size: int, narrowest: int) -> Launch:
    setting, aligned = tile(narrowest), unit(size)
    constants = {"UNIT": aligned, "EVEN": size % setting.block == 0, "BLOCK": setting.block}
    return Launch(_scale, (ceil_div(size, setting.block),), (size // aligned,), constants, setting.warps)


@profiled(do_not_specialize=["size"])
def _scale(out_ptr, value_ptr, factor_ptr, size, UNIT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK elements of size * UNIT. Grid (cdiv(size * UNIT, BLOCK),). EVEN: all blocks are whole."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr).to(value_ptr.dtype.element_ty)
    if EVEN:
        tl.store(out_ptr + at, rounded(tl.load(value_ptr + at, eviction_policy="evict_first") * factor, out_ptr))
    else:
        inside = at < size.to(tl.int64) * UNIT
        value = tl.load(value_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        tl.store(out_ptr + at, rounded(value * factor, out_ptr), mask=inside)
