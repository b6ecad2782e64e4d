"""Attention to the keys that each query chooses, in Triton: the chosen rows of k and v are read where they lie.

    forward    A program has one query of some query heads that share a key head. It goes through the query's indices,
               some at a time, with a running largest score.
    queries    The same computes the scores again, and from them the gradient of q.
    keys       A program has one key of one key head. It goes through the queries that chose it, which a stable sort of
               the indices has put beside each other in their order, and adds up the gradients of k and v.

There are no atomics, and the device is not waited for. All heads of a program see the same keys, so what they do not
see is 0 in its tiles, and a NaN there reaches no one: with a mask for each head a program has one head. Products are
added up in float32. A probability that multiplies 16-bit numbers is the sum of two of their dtype.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false, reportAssignmentType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedops import masks
from fusedops.ops.attention.arguments import SparseAttentionArgs, SparseAttentionGradArgs, empty
from fusedops.ops.attention.formulas import scale_of
from fusedops_triton._jit._bias import rounded, unit
from fusedops_triton._jit._common import TYPES, exp, read
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, power_of_two
from fusedops_triton.linear_attention._linear_attention_parts import product, types_of
from fusedops_triton.norms._norm import ready

#: Heads of a program, at most: with 64 rows, Triton 3.6 to 3.8 multiplies small tiles wrongly on sm_90 (see
#: ``_linear_attention_parts.py``). A product has at least 16 rows; those without a head are 0.
_HEADS, _LEAST = 32, 16
#: Columns of a gradient of q above which a program has 16 heads: with 32, float32 spills 664 bytes of a thread.
_WIDE = 512
#: Keys of a tile times columns of its values, and the keys, at most.
_TILE, _KEYS = 4096, 64
#: Columns of q and k that are multiplied at a time, by element size, at most.
_COLUMNS = {2: 128, 4: 64}
#: Elements of q and of the gradient that a program of a key has at a time.
_KEY_TILE = 4096
_ANY = 2**31 - 1  # above the difference of any two positions

Strides = tuple[int, ...]


class _Call(NamedTuple):
    """The layout of a launch.

    Attributes:
        heads: B, Nk, and the query heads of each key head.
        lengths: Sq, Sk, K.
        sizes: D, Dv.
        band: the lowest and the highest visible ``key - query``.
        rows: the strides of the tensors that have rows: batch, head, position.
        chosen: those of the indices: batch, head, query, place.
        mask: those of the mask: batch, head, query, key.
        dtype: of q, k and v.
    """

    heads: tuple[int, int, int]
    lengths: tuple[int, int, int]
    sizes: tuple[int, int]
    band: tuple[int, int]
    rows: tuple[Strides, ...]
    chosen: Strides
    mask: Strides
    dtype: torch.dtype

    @property
    def unit(self) -> int:
        """The power of two, up to 16, that divides the sizes and the strides of rows."""
        return unit(gcd(*self.sizes, *(step for each in self.rows for step in each)) or 16)

    @property
    def integers(self) -> tuple[int, ...]:
        """The integers of a kernel."""
        steps = (size // self.unit for each in (self.sizes, *self.rows) for size in each)
        return (*self.heads[1:], *self.lengths, *self.band, *self.chosen, *self.mask, *steps)


# ---------------------------------------------------------------------------------------------------------- launchers


def sparse_attention(a: SparseAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute out and lse; any strides."""
    q, k, v, indices = _rows_of(a.q), _rows_of(a.k), _rows_of(a.v), a.indices.resolve_neg()
    out, lse = empty(q, k, v)
    if lse.numel():
        launch = _forward_launch(_call_of(a, indices, q, k, v, out))
        launch(q, out, lse, q, k, v, indices, _bytes(a.mask), scale_of(q, a.scale))
    return out, lse


def sparse_attention_backward(a: SparseAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, each where it is wanted, from scores that are computed again."""
    q, k, v, grad, out = (_rows_of(each) for each in (a.q, a.k, a.v, a.grad_out, a.out))
    dq = empty(q, k, q)[0] if a.needs[0] else None
    dk, dv = (
        torch.empty(each.shape, dtype=each.dtype, device=each.device) if need else None
        for each, need in zip((k, v), a.needs[1:])
    )
    if not a.lse.numel():
        return dq, None if dk is None else dk.zero_(), None if dv is None else dv.zero_()
    indices, mask, scale = a.indices.resolve_neg(), _bytes(a.mask), scale_of(q, a.scale)
    lse, grad_lse = ready(a.lse), ready(a.grad_lse) if a.return_lse else None
    inner = torch.empty_like(a.lse, memory_format=torch.contiguous_format)
    of_queries = _queries_launch(_call_of(a, indices, q, k, v, grad, out, q if dq is None else dq))
    of_queries(q, dq, inner, q, k, v, grad, out, lse, grad_lse, indices, mask, scale)
    if k.shape[2] and not (dk is None and dv is None):
        query, ends = _queries_of_keys(indices, k.shape[2])
        of_keys = _keys_launch(_call_of(a, ends, q, k, v, grad))
        of_keys(q, dk, dv, q, k, v, grad, lse, inner, query, ends, mask, scale)
    return dq, dk, dv


def _queries_of_keys(indices: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return the queries that chose each key, in their order, and where those of each key end.

    Args:
        indices: (B, H, Sq, K).
        keys: Sk.

    Returns:
        (B, H, Sq * K), int32, and (B, H, Sk), int64. Queries that chose none are last.
    """
    chosen = indices.flatten(2)
    in_order, place = torch.where((chosen < 0) | (chosen >= keys), keys, chosen).sort(stable=True)
    numbers = torch.arange(keys, dtype=in_order.dtype, device=in_order.device).expand(*indices.shape[:2], keys)
    ends = torch.searchsorted(in_order, numbers.contiguous(), right=True)
    return place.div_(max(indices.shape[3], 1), rounding_mode="floor").to(torch.int32), ends


def _rows_of(tensor: Tensor) -> Tensor:
    """Return a tensor of the same values whose rows are contiguous, without the negative bit."""
    tensor = tensor.resolve_neg()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


def _call_of(a: SparseAttentionArgs | SparseAttentionGradArgs, chosen: Tensor, *rows: Tensor) -> _Call:
    """Return the layout of a launch; chosen: the indices, or what has their dims of batches and heads."""
    (batch, heads, queries, size), (_, key_heads, keys, size_v) = a.q.shape, a.v.shape
    band = masks.band(queries, keys, a.causal, a.window)
    low, high = (open_ if side is None else max(-_ANY, min(side, _ANY)) for side, open_ in zip(band, (-_ANY, _ANY)))
    steps = chosen.stride()
    of_chosen = (steps[0], steps[1] if chosen.shape[1] > 1 else 0, *steps[2:])
    of_mask = (0, 0, 0, 0) if a.mask is None else a.mask.expand(batch, heads, queries, keys).stride()
    # the stride of a dim of one entry is any number
    of_rows = tuple(tuple(step if n > 1 else 0 for step, n in zip(x.stride(), x.shape[:3])) for x in rows)
    of_heads, lengths = (batch, key_heads, heads // key_heads), (queries, keys, a.indices.shape[3])
    return _Call(of_heads, lengths, (size, size_v), (low, high), of_rows, of_chosen, of_mask, a.q.dtype)


@cached_by_layout
def _forward_launch(call: _Call) -> Launch:
    grid, constants, columns = _tiles(_forward, call, _HEADS)
    block = constants["BV"] = _block(call.sizes[1])
    constants["BN"] = max(_LEAST, min(_KEYS, _TILE // block))
    return Launch(_forward, grid, call.integers, {**constants, "BK": columns}, _warps(constants["BG"] * block))


@cached_by_layout
def _queries_launch(call: _Call) -> Launch:
    block = _block(call.sizes[0])
    grid, constants, columns = _tiles(_queries, call, _LEAST if block > _WIDE else _HEADS)
    constants["BD"] = block
    constants["BN"] = max(_LEAST, min(_KEYS, _TILE // block))
    return Launch(_queries, grid, call.integers, {**constants, "BK": columns}, _warps(constants["BG"] * block))


@cached_by_layout
def _keys_launch(call: _Call) -> Launch:
    block_k, block_v = _block(call.sizes[0]), _block(call.sizes[1])
    rows = max(1, min(32, _KEY_TILE // (block_k + block_v)))
    rows = 1 << (rows.bit_length() - 1)
    constants = {"ROWS": rows, "BD": block_k, "BV": block_v, "UNIT": call.unit}
    integers = call.integers
    return Launch(_keys, (call.heads[0] * call.heads[1] * call.lengths[1],), integers, constants, 4)


def _tiles(kernel: Any, call: _Call, most: int) -> tuple[tuple[int], dict[str, Any], int]:
    """Return the grid of a kernel of queries, the constexprs that these have in common, and the columns of a product.

    most: heads of a program, at most.
    The interpreter has no products of bfloat16; those of float32 are the same.
    """
    batch, key_heads, group = call.heads
    at_once = 1 if call.mask[1] else min(group, most)  # of a mask for each head
    split = call.dtype.itemsize == 2
    constants = {
        "STEP": at_once, "BG": max(_LEAST, power_of_two(at_once)), "UNIT": call.unit,
        "PAIRS": TYPES[call.dtype if isinstance(kernel, JITFunction) else torch.float32], **types_of(kernel, split),
    }  # fmt: skip
    columns = min(_COLUMNS[call.dtype.itemsize], max(map(_block, call.sizes)))
    return (batch * key_heads * ceil_div(group, at_once) * call.lengths[0],), constants, columns


def _block(size: int) -> int:
    return max(_LEAST, power_of_two(max(size, 1)))


def _warps(elements: int) -> int:
    """Return the warps of a program with a sum of so many elements: 64 for each thread, at most."""
    return 8 if elements > 2**13 else 4


# ------------------------------------------------------------------------------------------------------ jit functions
# Triton does not specialise on sizes and strides: UNIT gives the compiler the alignment of rows.

_INF = tl.constexpr(float("inf"))
_INTEGERS = [
    "key_heads", "group", "queries", "keys", "count", "low", "high", "c_batch", "c_head", "c_query", "c_place",
    "m_batch", "m_head", "m_query", "m_key", "size", "size_v", "q_batch", "q_head", "q_row", "k_batch", "k_head",
    "k_row", "v_batch", "v_head", "v_row",
]  # fmt: skip


@triton.jit
def _query(key_heads, group, queries, STEP: tl.constexpr, BG: tl.constexpr):
    """Return the batch, key head and query of this program (64-bit), its query heads, and which of these there are."""
    program = tl.program_id(0)
    parts = (group + STEP - 1) // STEP
    query, rest = program % queries, program // queries
    in_group = (rest % parts) * STEP + tl.arange(0, BG)
    rest = rest // parts
    key_head, batch = rest % key_heads, rest // key_heads
    there = (tl.arange(0, BG) < STEP) & (in_group < group)
    head = key_head * group + tl.where(there, in_group, 0)
    return batch.to(tl.int64), key_head.to(tl.int64), query.to(tl.int64), head.to(tl.int64), there


@triton.jit
def _chosen(chosen_ptr, mask_ptr, place, query, keys, count, low, high, c_place, m_key):
    """Return the keys (64-bit) at some places of a query's indices, and which of them the query sees."""
    key = tl.load(chosen_ptr + place.to(tl.int64) * c_place, place < count, -1).to(tl.int64)
    seen = (key >= 0) & (key < keys) & (key - query >= low) & (key - query <= high)
    key = tl.where(seen, key, 0)
    if mask_ptr is not None:
        seen = seen & (tl.load(mask_ptr + key * m_key, seen, 1) == 0)
    return key, seen


@triton.jit
def _products(a_rows, there, b_rows, seen, size, PAIRS: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr):
    """Return the products of some rows with others, float32; those that are not there or not seen are 0.

    a_rows: (BG,) pointers. b_rows: (BN,).
    """
    total = tl.zeros((there.shape[0], seen.shape[0]), tl.float32)
    for first in range(0, size, BK):
        at = first + tl.arange(0, BK)
        fits = (at < size)[None, :]
        a = tl.load(a_rows[:, None] + at[None, :], there[:, None] & fits, 0.0).to(PAIRS)
        b = tl.load(b_rows[:, None] + at[None, :], seen[:, None] & fits, 0.0).to(PAIRS)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION, out_dtype=tl.float32)
    return total


@triton.jit
def _weighted(p, v, total, SPLIT: tl.constexpr, OF: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``total + p @ v``; p from 0 to 1. With SPLIT, as the sum of two products in the dtype of v."""
    if SPLIT == "":
        total = tl.dot(p, v.to(PAIRS), total, input_precision=PRECISION, out_dtype=tl.float32)
    else:
        high = p.to(v.dtype)
        low = p - high.to(tl.float32)  # may be 0, or below it: an inf is in the other product alone
        known = tl.where(tl.abs(v.to(tl.float32)) < _INF, v, 0.0).to(v.dtype)
        if SPLIT == "separate":  # see ``product``
            total += tl.dot((low * 256.0).to(v.dtype).to(PAIRS), known.to(PAIRS), out_dtype=tl.float32) * (1 / 256)
        else:
            total = tl.dot(low.to(v.dtype).to(PAIRS), known.to(PAIRS), total, out_dtype=tl.float32)
        total = tl.dot(high.to(PAIRS), v.to(PAIRS), total, out_dtype=tl.float32)
    return total


@profiled(do_not_specialize=[*_INTEGERS, "out_batch", "out_head", "out_row"])
def _forward(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, chosen_ptr, mask_ptr, scale,
    key_heads, group, queries, keys, count, low, high, c_batch, c_head, c_query, c_place,
    m_batch, m_head, m_query, m_key, size, size_v, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, out_batch, out_head, out_row,
    STEP: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, UNIT: tl.constexpr,
    SPLIT: tl.constexpr, OF: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one query of STEP heads. Grid (B * Nk * cdiv(group, STEP) * Sq,); strides of rows in units of UNIT.

    q_ptr, out_ptr: (B, Nq, Sq, D or Dv). k_ptr, v_ptr: (B, Nk, Sk, ...). lse_ptr: (B, Nq, Sq), contiguous.
    """
    batch, key_head, query, head, there = _query(key_heads, group, queries, STEP, BG)
    q_rows = q_ptr + (batch * q_batch + head * q_head + query * q_row) * UNIT
    k_ptr += (batch * k_batch + key_head * k_head) * UNIT
    v_ptr += (batch * v_batch + key_head * v_head) * UNIT
    chosen_ptr += batch * c_batch + key_head * c_head + query * c_query
    if mask_ptr is not None:
        mask_ptr += batch * m_batch + tl.max(head, 0) * m_head + query * m_query
    size, size_v = size * UNIT, size_v * UNIT
    column = tl.arange(0, BV)
    in_row = column < size_v
    largest, total = tl.full([BG], -_INF, tl.float32), tl.zeros([BG], tl.float32)
    sums = tl.zeros((BG, BV), tl.float32)
    for first in range(0, count, BN):
        place = first + tl.arange(0, BN)
        key, seen = _chosen(chosen_ptr, mask_ptr, place, query, keys, count, low, high, c_place, m_key)
        s = _products(q_rows, there, k_ptr + key * k_row * UNIT, seen, size, PAIRS, PRECISION, BK) * scale
        s = tl.where(seen[None, :], s, -_INF)
        v = tl.load(v_ptr + (key * v_row * UNIT)[:, None] + column[None, :], seen[:, None] & in_row[None, :], 0.0)
        above = tl.maximum(largest, tl.max(s, 1))
        base = tl.where(above == -_INF, 0.0, above)  # no key is seen so far
        p, before = exp(s - base[:, None]), exp(largest - base)
        total = total * before + tl.sum(p, 1)
        sums = _weighted(p, v, sums * before[:, None], SPLIT, OF, PAIRS, PRECISION)
        largest = above
    none = total == 0
    total = tl.where(none, 1.0, total)
    out = sums / total[:, None]
    to = (batch * out_batch + head * out_head + query * out_row) * UNIT
    tl.store(out_ptr + to[:, None] + column[None, :], rounded(out, out_ptr), there[:, None] & in_row[None, :])
    lse = tl.where(none, -_INF, largest + tl.log(total))
    tl.store(lse_ptr + (batch * key_heads * group + head) * queries + query, lse, there)


@profiled(do_not_specialize=[
    *_INTEGERS, "g_batch", "g_head", "g_row", "out_batch", "out_head", "out_row", "d_batch", "d_head", "d_row",
])  # fmt: skip
def _queries(
    dq_ptr, inner_ptr, q_ptr, k_ptr, v_ptr, grad_ptr, out_ptr, lse_ptr, grad_lse_ptr, chosen_ptr, mask_ptr, scale,
    key_heads, group, queries, keys, count, low, high, c_batch, c_head, c_query, c_place,
    m_batch, m_head, m_query, m_key, size, size_v, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, g_batch, g_head, g_row, out_batch, out_head, out_row, d_batch, d_head, d_row,
    STEP: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, UNIT: tl.constexpr,
    SPLIT: tl.constexpr, OF: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of q of one query of STEP heads. As _forward; grad_ptr: as out_ptr; dq_ptr: as q_ptr.

    inner_ptr: as lse_ptr, gets the product of the gradient and out, less the gradient of lse.
    """
    batch, key_head, query, head, there = _query(key_heads, group, queries, STEP, BG)
    q_rows = q_ptr + (batch * q_batch + head * q_head + query * q_row) * UNIT
    grad_rows = grad_ptr + (batch * g_batch + head * g_head + query * g_row) * UNIT
    out_rows = out_ptr + (batch * out_batch + head * out_head + query * out_row) * UNIT
    size, size_v = size * UNIT, size_v * UNIT
    inner = tl.zeros([BG], tl.float32)
    for first in range(0, size_v, BK):
        at = first + tl.arange(0, BK)
        inside = there[:, None] & (at < size_v)[None, :]
        inner += tl.sum(
            read(grad_rows[:, None] + at[None, :], inside) * read(out_rows[:, None] + at[None, :], inside), 1
        )
    number = (batch * key_heads * group + head) * queries + query
    if grad_lse_ptr is not None:
        inner -= tl.load(grad_lse_ptr + number, there, 0.0)
    tl.store(inner_ptr + number, inner, there)
    if dq_ptr is not None:
        k_ptr += (batch * k_batch + key_head * k_head) * UNIT
        v_ptr += (batch * v_batch + key_head * v_head) * UNIT
        chosen_ptr += batch * c_batch + key_head * c_head + query * c_query
        if mask_ptr is not None:
            mask_ptr += batch * m_batch + tl.max(head, 0) * m_head + query * m_query
        lse = tl.load(lse_ptr + number, there, 0.0)
        column = tl.arange(0, BD)
        in_row = column < size
        sums = tl.zeros((BG, BD), tl.float32)
        for first in tl.range(0, count, BN, num_stages=1):
            place = first + tl.arange(0, BN)
            key, seen = _chosen(chosen_ptr, mask_ptr, place, query, keys, count, low, high, c_place, m_key)
            s = _products(q_rows, there, k_ptr + key * k_row * UNIT, seen, size, PAIRS, PRECISION, BK) * scale
            of_p = _products(grad_rows, there, v_ptr + key * v_row * UNIT, seen, size_v, PAIRS, PRECISION, BK)
            ds = exp(s - lse[:, None]) * (of_p - inner[:, None]) * scale
            ds = tl.where(seen[None, :] & there[:, None], ds, 0.0)
            k = tl.load(k_ptr + (key * k_row * UNIT)[:, None] + column[None, :], seen[:, None] & in_row[None, :], 0.0)
            sums = product(ds, k, SPLIT, OF, PRECISION, None, sums)
        to = dq_ptr + ((batch * d_batch + head * d_head + query * d_row) * UNIT)[:, None] + column[None, :]
        tl.store(to, rounded(sums, dq_ptr), there[:, None] & in_row[None, :])


@profiled(
    do_not_specialize=[
        *(each for each in _INTEGERS if each not in ("c_query", "c_place")),
        "g_batch",
        "g_head",
        "g_row",
    ]
)
def _keys(
    dk_ptr, dv_ptr, q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, inner_ptr, query_ptr, ends_ptr, mask_ptr, scale,
    key_heads, group, queries, keys, count, low, high, c_batch, c_head, c_key,
    m_batch, m_head, m_query, m_key, size, size_v, q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, g_batch, g_head, g_row,
    ROWS: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one key, of ROWS query heads at a time. Grid (B * Nk * Sk,). As _queries.

    dk_ptr, dv_ptr: (B, Nk, Sk, ...), contiguous. query_ptr, ends_ptr: of ``_queries_of_keys``.
    """
    program = tl.program_id(0)
    key, rest = (program % keys).to(tl.int64), program // keys
    key_head, batch = (rest % key_heads).to(tl.int64), (rest // key_heads).to(tl.int64)
    size, size_v = size * UNIT, size_v * UNIT
    column, column_v = tl.arange(0, BD), tl.arange(0, BV)
    in_row, in_row_v = (column < size)[None, :], (column_v < size_v)[None, :]
    k = read(k_ptr + (batch * k_batch + key_head * k_head + key * k_row) * UNIT + column, column < size)
    v = read(v_ptr + (batch * v_batch + key_head * v_head + key * v_row) * UNIT + column_v, column_v < size_v)
    ends_ptr += batch * c_batch + key_head * c_head
    start, end = tl.load(ends_ptr + key - 1, key > 0, 0), tl.load(ends_ptr + key)
    # as many lists of queries as of ends: one for each batch, or key head
    lists = batch if c_head == 0 else batch * key_heads + key_head
    query_ptr += lists * queries * count + start
    rows = (end - start).to(tl.int32) * group
    sums, sums_v = tl.zeros((ROWS, BD), tl.float32), tl.zeros((ROWS, BV), tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        query = tl.load(query_ptr + row // group, row < rows, 0).to(tl.int64)
        head = key_head * group + row % group
        seen = (row < rows) & (key - query >= low) & (key - query <= high)
        if mask_ptr is not None:
            at = batch * m_batch + head * m_head + query * m_query + key * m_key
            seen = seen & (tl.load(mask_ptr + at, seen, 1) == 0)
        q_at = (batch * q_batch + head * q_head + query * q_row) * UNIT
        grad_at = (batch * g_batch + head * g_head + query * g_row) * UNIT
        q = read(q_ptr + q_at[:, None] + column[None, :], seen[:, None] & in_row)
        grad = read(grad_ptr + grad_at[:, None] + column_v[None, :], seen[:, None] & in_row_v)
        number = (batch * key_heads * group + head) * queries + query
        lse, inner = tl.load(lse_ptr + number, seen, 0.0), tl.load(inner_ptr + number, seen, 0.0)
        p = tl.where(seen, exp(tl.sum(q * k[None, :], 1) * scale - lse), 0.0)
        sums_v += p[:, None] * grad
        ds = p * (tl.sum(grad * v[None, :], 1) - inner) * scale
        sums += tl.where(seen, ds, 0.0)[:, None] * q
    to = (batch * key_heads + key_head) * keys + key
    if dk_ptr is not None:
        tl.store(dk_ptr + to * size + column, rounded(tl.sum(sums, 0), dk_ptr), column < size)
    if dv_ptr is not None:
        tl.store(dv_ptr + to * size_v + column_v, rounded(tl.sum(sums_v, 0), dv_ptr), column_v < size_v)
