"""New keys and values written into pages in Triton: a program has some heads of a token.

Numbers of float8 are made from the bits of a float32: a conversion needs sm_89.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.attention.arguments import StoreKvArgs, check_slots, check_written
from fusedops.ops.attention.store_kv import results_of, written
from fusedops_triton._jit._common import widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.attention._paged import rows_of
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, power_of_two
from fusedops_triton.norms._norm import ready

_ELEMENTS = 1024  # of a program, at most
_KINDS = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}


def store_kv(a: StoreKvArgs) -> tuple[Tensor, ...]:
    """Compute the op, by torch's functions where a written tensor has the negative bit."""
    if any(each is not None and each.is_neg() for each in (a.k_cache, a.v_cache, a.k_scale, a.v_scale)):
        return written(a)
    check_written(a)
    check_slots(a.slots, a.k_cache.shape[:2].numel())
    slots = ready(a.slots)
    for x, cache, scale in ((a.k, a.k_cache, a.k_scale), (a.v, a.v_cache, a.v_scale)):
        if not x.shape[:2].numel() or not cache.shape[:2].numel():
            continue
        x = rows_of(x)
        of_scale = (0, 0, 0) if scale is None else (0,) * (3 - scale.dim()) + scale.stride()
        if scale is not None and scale.dim() == 2:
            of_scale = (scale.stride(0), 0, scale.stride(1))
        is_written = scale is not None and scale.dim() == 3
        launch = _launch(x.shape, x.stride()[:2], cache.shape, cache.stride(), of_scale, _kind(cache), is_written)
        codes = cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache
        launch(x, codes, scale, x, slots)
    return results_of(a)


def _kind(cache: Tensor) -> str:
    return _KINDS.get(cache.dtype, "plain")


@cached_by_layout
def _launch(
    shape: torch.Size,
    strides: tuple[int, ...],
    cache: torch.Size,
    of_cache: tuple[int, ...],
    of_scale: tuple[int, ...],
    kind: str,
    is_written: bool,
) -> Launch:
    tokens, heads, size = shape
    block = power_of_two(max(size, 1))
    at_once = min(power_of_two(heads), max(_ELEMENTS // block, 1))
    across = ceil_div(heads, at_once)
    constants = {"KIND": kind, "WRITTEN": is_written, "HEADS": at_once, "BLOCK": block}
    sizes = (across, cache[0], cache[1], heads, size, *strides, *of_cache, *of_scale)
    warps = max(1, min(at_once * block // 256, 8))
    return Launch(_store, (tokens * across,), sizes, constants, warps, fuses=False)


@triton.jit
def _e4m3_of(y):
    """Return the codes of float32 numbers, rounded half to even, of at most 448."""
    bits = tl.abs(y).to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6: as multiples of 2**-9, the last bit of numbers from 2**14 on
    subnormal = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(tl.abs(y) < 0.015625, subnormal, normal)
    code = tl.where(y != y, 0x7F, code)
    return (code | ((y.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@profiled(do_not_specialize=["across", "pages", "page"])
def _store(
    cache_ptr, scale_ptr, x_ptr, slots_ptr,
    across, pages, page, heads, size, x_token, x_head, of_page, of_token, of_head, of_number,
    scale_page, scale_token, scale_head,
    KIND: tl.constexpr, WRITTEN: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write HEADS heads of a token. Grid (tokens * across,), across = cdiv(heads, HEADS).

    x_ptr: (tokens, heads, size). slots_ptr: (tokens,). cache_ptr: (pages, page, heads, size); of float8, its bytes.
    scale_ptr: (pages, page, heads), and written if WRITTEN; None for numbers as they are.
    """
    token = (tl.program_id(0) // across).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if (slot < 0) | (slot >= pages.to(tl.int64) * page):
        return
    head = ((tl.program_id(0) % across) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    has_head = head < heads
    inside = has_head[:, None] & (column < size)[None, :]
    numbers = tl.load(x_ptr + (token * x_token + head * x_head)[:, None] + column[None, :], inside, 0.0)
    if KIND != "plain":
        most = 127.0 if KIND == "int8" else 448.0
        x = widened(numbers)
        scale_at = scale_ptr + (slot // page) * scale_page + (slot % page) * scale_token + head * scale_head
        if WRITTEN:
            is_nan = tl.max((x != x).to(tl.int32), 1) != 0
            scale = tl.div_rn(tl.max(tl.abs(x), 1), tl.full([HEADS], most, tl.float32))
            scale = tl.where(is_nan, float("nan"), scale)
            tl.store(scale_at, scale, has_head)
        else:
            scale = tl.load(scale_at, has_head, 0.0)
        scale = tl.broadcast_to(scale[:, None], (HEADS, BLOCK))
        y = tl.where(scale == 0, 0.0, tl.div_rn(x, scale))
        y = tl.where(y > most, most, tl.where(y < -most, -most, y))
        if KIND == "int8":
            y = (y + 12582912.0) - 12582912.0  # numbers from 2**23 on are integers
            numbers = tl.where(y == y, y, 0.0).to(tl.int8)
        else:
            numbers = _e4m3_of(y)
    at = ((slot // page) * of_page + (slot % page) * of_token)[None, None] + head[:, None] * of_head
    tl.store(cache_ptr + at + column.to(tl.int64)[None, :] * of_number, numbers, inside)
