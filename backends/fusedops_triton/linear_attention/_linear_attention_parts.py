"""Linear attention in Triton: a call as kernels read it, and what its chunks have without a state.

The weighted products of a chunk's queries and keys and, for the delta rule, the inverse of a triangular matrix: one
program for each chunk and value head. The chunks of all sequences have numbers. Where sequences are packed, their
bounds stay on the device, and some numbers are of no chunk.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedops.constraints import Offsets
from fusedops.ops.linear_attention.arguments import bounds_of
from fusedops.ops.linear_attention.formulas import scale_of
from fusedops_triton._jit._bias import unit
from fusedops_triton._jit._common import TYPES, exp, read, scalar
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch import settings
from fusedops_triton.launch.chips import CHIPS
from fusedops_triton.launch.launcher import Launch, cached_by_layout, compiles_ptx
from fusedops_triton.launch.settings import ceil_div, power_of_two
from fusedops_triton.norms._norm import ready

#: Positions of a chunk, where q, k and v have 16 bits. Of wider ones half as many, and of rows of more than 128 too:
#: products of fewer fit in the registers.
CHUNK = 64
#: The columns of q and k, of 16 bits, that a program has at a time beside the products of a chunk. Of wider ones half
#: as many: else 152 bytes of a thread spill on sm_90.
SLICE = 64
#: The version of Triton.
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
#: The positions of a block whose matrix is inverted without products. No chunk has fewer.
BLOCK = 16
#: The vectors of a chunk: ``Parts.factors``.
FACTORS = tl.constexpr(8)


class Columns(NamedTuple):
    """The part of a state that a program has in registers, and the warps of a program."""

    rows: int
    cols: int
    warps: int

    @property
    def constants(self) -> dict[str, int]:
        """The constexprs of a walk: of 128 rows and more, a half at a time is split into two of bfloat16."""
        halves = 2 if self.rows >= 128 else 1
        return {"BK": self.rows // halves, "HALVES": halves, "BV": self.cols}


class Sizes(NamedTuple):
    """The layout of a call.

    Attributes:
        sequences: B or N.
        positions: S.
        heads: Hv.
        group: Hv / Hk.
        size_k: Dk.
        size_v: Dv.
        packed: there are bounds.
        pairs: the dtype of products of q and k, which is exact for them.
        split: the other products are of bfloat16: q, k and v have 16 bits.
    """

    sequences: int
    positions: int
    heads: int
    group: int
    size_k: int
    size_v: int
    packed: bool
    pairs: torch.dtype
    split: bool

    @property
    def chunk(self) -> int:
        """The positions of a chunk."""
        most = CHUNK >> (not self.split) + (self.size_k > 128)
        return min(most, max(power_of_two(self.positions), self.least_side))

    @property
    def least_side(self) -> int:
        """The least side of a product, in a kernel that has several of them.

        With sides of 16 and 32, by 16-bit products of 64 rows on sm_90, Triton 3.4 to 3.8 has wrong numbers or reads
        past shared memory, in some kernels and by chance (triton-lang/triton#10573, #11366). Chunks of fewer positions,
        for rows of more than 128, are multiplied by other instructions.
        """
        unsafe = settings.chip == CHIPS["sm_90"] and TRITON < (3, 9)
        return CHUNK if unsafe and self.split and self.size_k <= 128 else 16

    @property
    def chunks(self) -> int:
        """The chunks of a sequence that is not packed."""
        return ceil_div(self.positions, self.chunk)

    @property
    def numbers(self) -> int:
        """The numbers of chunks. Positions from a to b are in at most ``b // C - a // C + 1`` chunks."""
        return self.positions // self.chunk + self.sequences if self.packed else self.sequences * self.chunks


class Call(NamedTuple):
    """The tensors of a call, contiguous, the bounds as int32; the scale is a number."""

    sizes: Sizes
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    beta: Tensor | None
    scale: float
    normalize: bool
    state: Tensor | None
    bounds: Tensor | None


class Parts(NamedTuple):
    """The parts of chunks that need no state, float32, for each number of a chunk and each value head.

    Attributes:
        products: of queries and keys, weighted by the decays, (numbers, Hv, C, C), as ``store_matrix`` has it: float32,
            or two of bfloat16 in the same memory, which the walks multiply without another split.
        inverse: Y, as ``products``, or None without beta. With M, the weighted products of keys with those before
            them, ``(I + beta * M)**-1 = I - beta * Y``.
        factors: of each position (numbers, Hv, FACTORS, C): of the row of q, of the row of k, of the state before the
            chunk, and of the position in the state after the chunk; beta, if there is one; the first by the third, the
            second by the third, and the second by the fourth, so that a walk holds one vector and not two.
    """

    products: Tensor
    inverse: Tensor | None
    factors: Tensor


# ------------------------------------------------------------------------------------------------------------ launchers


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: bool,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Call:
    """Return the tensors of a call as kernels read them. The arguments are those of the op."""
    bounds = None
    if cu_seqlens is not None:
        if cu_seqlens.is_cpu:  # in the interpreter: raises for bounds that are not valid
            bounds_of("linear_attention", cu_seqlens, q.shape[1])
        bounds = Offsets.within(cu_seqlens, q.shape[1]).int()
    sequences = v.shape[0] if bounds is None else bounds.shape[0] - 1
    dtypes = {q.dtype, k.dtype}
    pairs = q.dtype if len(dtypes) == 1 else torch.float32
    split = all(dtype.itemsize == 2 for dtype in dtypes | {v.dtype})
    group = v.shape[2] // max(q.shape[2], 1)
    sizes = Sizes(sequences, q.shape[1], v.shape[2], group, q.shape[3], v.shape[3], bounds is not None, pairs, split)
    made = [ready(each) for each in (q, k, v, decay, beta, initial_state)]
    return Call(sizes, *made[:5], scale_of(q, scale), normalize, made[5], bounds)


def parts_of(call: Call) -> Parts:
    """Compute the parts of the chunks of a call."""
    sizes = call.sizes
    shape = (sizes.numbers, sizes.heads, sizes.chunk, sizes.chunk)
    products = torch.empty(shape, dtype=torch.float32, device=call.q.device)
    products = products.view(torch.bfloat16) if sizes.split else products  # two of each, in the same memory
    inverse = None if call.beta is None else torch.empty_like(products)
    factors = torch.empty((*shape[:2], FACTORS.value, sizes.chunk), dtype=torch.float32, device=call.q.device)
    launch = _parts_launch(sizes, call.normalize)
    launch(
        products, products, inverse, factors, call.q, call.k, call.decay, call.beta, call.bounds, call.scale
    )  # fmt: skip
    return Parts(products, inverse, factors)


def types_of(kernel: Any, split: bool) -> dict[str, Any]:
    """Return the constexprs of products that are not of queries and keys alone; split: of 16-bit tensors.

    Of 16-bit tensors by bfloat16. Those of float32 are in three parts on the tensor cores of an NVIDIA GPU, each of 11
    bits of the operands: within 2**-22 of each product. By plain instructions, a chunk by a state spills 9 KB of a
    thread. The interpreter has no products of bfloat16: it rounds to it, and multiplies float32.
    """
    compiled = isinstance(kernel, JITFunction)
    chained = "chained" if settings.chains_products() else "separate"
    return {
        "SPLIT": chained if split else "", "OF": tl.bfloat16 if split and compiled else tl.float32,
        "PRECISION": precision_of(kernel),
    }  # fmt: skip


def precision_of(kernel: Any) -> str:
    """Return how float32 operands are multiplied."""
    return "tf32x3" if compiles_ptx(kernel) else "ieee"


def units(sizes: Sizes) -> tuple[tuple[int, int], dict[str, int]]:
    """Return Dk and Dv over the powers of two that divide them, and these."""
    unit_k, unit_v = unit(sizes.size_k), unit(sizes.size_v)
    return (sizes.size_k // unit_k, sizes.size_v // unit_v), {"UNIT_K": unit_k, "UNIT_V": unit_v}


def columns_of(sizes: Sizes, least: int) -> Columns:
    """Return the columns of a program: no fewer than ``least``, the least side of a product.

    Not measured. On sm_90, 64 are the rows of a product of 16-bit tensors whose first factor is in the registers of
    four warps. Elsewhere they would spill 430 bytes of a thread (sm_80), or need more tensor memory than there is
    (sm_100), and there are as few as possible.
    """
    most = 32 if least == 1 else least
    if least > 1 and sizes.split and sizes.size_k <= 128 and settings.chip == CHIPS["sm_90"]:
        most = CHUNK
    rows, cols = power_of_two(sizes.size_k), min(power_of_two(sizes.size_v), most)
    return Columns(max(rows, least), max(cols, least), 4 if sizes.split or least == 1 else 8)


def stages_of(sizes: Sizes) -> int:
    """Return the chunks of which a walk has the tensors on the chip: of 16-bit ones the next one beside the first.

    An AMD processor has 64 KB for them, of which two chunks take 72. Before Triton 3.8, a walk on sm_100 with two has
    another result each time (triton-lang/triton#9871, #10590).
    """
    unsafe = settings.chip == CHIPS["sm_100"] and TRITON < (3, 8)
    return 2 if sizes.split and settings.chip.nvidia and not unsafe else 1


def slice_of(sizes: Sizes) -> int:
    """Return the columns of q and k that a program has at a time beside the products of a chunk."""
    return min(SLICE >> (not sizes.split), max(power_of_two(sizes.size_k), sizes.least_side))


@cached_by_layout
def _parts_launch(sizes: Sizes, normalize: bool) -> Launch:
    size_k, unit_k = units(sizes)[0][0], units(sizes)[1]["UNIT_K"]
    pairs = TYPES[sizes.pairs] if isinstance(_chunk_parts, JITFunction) else tl.float32
    constants = {
        "UNIT_K": unit_k, "NORMALIZE": normalize, "STEPS": (sizes.sequences - 1).bit_length(), "C": sizes.chunk,
        "LEVELS": (sizes.chunk // BLOCK).bit_length() - 1, "BLOCK": BLOCK,
        "BK": slice_of(sizes), "SPLIT": types_of(_chunk_parts, sizes.split)["SPLIT"], "OF": pairs,
        "PRECISION": precision_of(_chunk_parts),
    }  # fmt: skip
    numbers = (sizes.sequences, sizes.positions, sizes.chunks, sizes.heads, sizes.group, size_k)
    # of 8 warps on sm_90, two groups of 4 compute the same products: of 64 rows, as many as one group has
    return Launch(_chunk_parts, (sizes.numbers * sizes.heads,), numbers, constants, 4)


# -------------------------------------------------------------------------------------------------------- jit functions


@triton.jit
def low_of(x, SPLIT: tl.constexpr):
    """Return what bfloat16 leaves of x, as bfloat16: within 2**-17 of x. "separate": times 256, which is exact."""
    low = x.to(tl.float32) - x.to(tl.bfloat16).to(tl.float32)
    return ((256.0 * low) if SPLIT == "separate" else low).to(tl.bfloat16)


@triton.jit
def product(a, b, SPLIT: tl.constexpr, OF: tl.constexpr, PRECISION: tl.constexpr, low_b=None, total=None):
    """Return ``a @ b`` in float32, of operands that are multiplied as OF, added to ``total``.

    SPLIT: an operand is the sum of two of bfloat16; one that has bfloat16 is itself, or its first part, with ``low_b``.
    "chained": the products are added to one another. "separate": each has an accumulator of its own. Without the factor
    of 256 Triton would chain them.
    """
    if total is None:
        total = tl.zeros((a.shape[0], b.shape[1]), tl.float32)
    if SPLIT == "":
        total = tl.dot(a.to(OF), b.to(OF), total, input_precision=PRECISION, out_dtype=tl.float32)
    else:
        high_a, high_b = a.to(tl.bfloat16).to(OF), b.to(tl.bfloat16).to(OF)
        if b.dtype != tl.bfloat16:
            low_b = low_of(b, SPLIT)
        if low_b is not None:
            if SPLIT == "separate":
                total += tl.dot(high_a, low_b.to(OF), out_dtype=tl.float32) * (1 / 256)
            else:
                total = tl.dot(high_a, low_b.to(OF), total, out_dtype=tl.float32)
        if a.dtype != tl.bfloat16:
            if SPLIT == "separate":
                total += tl.dot(low_of(a, SPLIT).to(OF), high_b, out_dtype=tl.float32) * (1 / 256)
            else:
                total = tl.dot(low_of(a, SPLIT).to(OF), high_b, total, out_dtype=tl.float32)
        total = tl.dot(high_a, high_b, total, out_dtype=tl.float32)
    return total


@triton.jit
def store_matrix(to_ptr, number, matrix, C: tl.constexpr, SPLIT: tl.constexpr):
    """Store a matrix of a chunk, with SPLIT as two of bfloat16, one after the other."""
    at = tl.arange(0, C)
    if SPLIT == "":
        tl.store(to_ptr + number * C * C + at[:, None] * C + at[None, :], matrix)
    else:
        to_ptr += number * 2 * C * C + at[:, None] * C + at[None, :]
        tl.store(to_ptr, matrix.to(tl.bfloat16))
        tl.store(to_ptr + C * C, low_of(matrix, SPLIT))


@triton.jit
def load_matrix(ptr, number, C: tl.constexpr, SPLIT: tl.constexpr):
    """Return what ``store_matrix`` has stored, in float32."""
    at = tl.arange(0, C)
    if SPLIT == "":
        matrix = tl.load(ptr + number * C * C + at[:, None] * C + at[None, :])
    else:
        ptr += number * 2 * C * C + at[:, None] * C + at[None, :]
        low = tl.load(ptr + C * C).to(tl.float32)
        matrix = tl.load(ptr).to(tl.float32) + low * ((1 / 256) if SPLIT == "separate" else 1.0)
    return matrix


@triton.jit
def product_by_matrix(
    a, ptr, number, TURNED: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, OF: tl.constexpr,
    PRECISION: tl.constexpr, total=None,
):  # fmt: skip
    """Return the product of a and what ``store_matrix`` has stored, as ``product`` does. TURNED: transposed."""
    at = tl.arange(0, C)
    square = at[:, None] * C + at[None, :]
    if SPLIT == "":
        high, low = tl.load(ptr + number * C * C + square), None
    else:
        ptr += number * 2 * C * C + square
        high, low = tl.load(ptr), tl.load(ptr + C * C)
    if TURNED:
        high = tl.trans(high)
        if SPLIT != "":
            low = tl.trans(low)
    return product(a, high, SPLIT, OF, PRECISION, low, total)


@triton.jit
def rnorm_of(squares, NORMALIZE: tl.constexpr):
    """Return the factors that normalize rows with these sums of squares; ones without NORMALIZE."""
    if NORMALIZE:
        return tl.rsqrt(squares + 1e-6)
    return squares * 0.0 + 1.0


@triton.jit
def place_of(bounds_ptr, number, count, positions, chunks, STEPS: tl.constexpr, C: tl.constexpr):
    """Return the row of position 0, as 64 bits, and the first position of a chunk and the end of its sequence.

    The first position of a number without a chunk is not below the end. count: of the sequences. chunks: of each one
    without bounds. STEPS: of a search among ``count``.
    """
    if bounds_ptr is None:
        base, first, end = (number // chunks).to(tl.int64) * positions, (number % chunks) * C, positions
    else:
        sequence, highest = tl.full([], 0, tl.int32), count - 1
        for _ in range(STEPS):  # a binary search
            middle = (sequence + highest + 1) // 2
            reached = tl.load(bounds_ptr + middle) // C + middle <= number
            sequence, highest = tl.where(reached, middle, sequence), tl.where(reached, highest, middle - 1)
        start = tl.load(bounds_ptr + sequence)
        own = number - start // C - sequence  # below 0 before the first sequence
        base, end = tl.full([], 0, tl.int64), tl.load(bounds_ptr + sequence + 1)
        first = tl.where(own < 0, end, start + own * C)
    return base, first, end


@triton.jit
def weights_of(decay_ptr, places, there, next_there, heads, C: tl.constexpr):
    """Return the decays between the positions of a chunk: (C, C), 0 above the diagonal; up to each one; after each one.

    places: of the positions in the decays. next_there: the position after one is in the chunk.
    """
    at = tl.arange(0, C)
    lower = at[:, None] >= at[None, :]
    if decay_ptr is None:
        weights, started = tl.where(lower, 1.0, 0.0), tl.full((C,), 1.0, tl.float32)
        ended = started
    else:
        logs = read(decay_ptr + places, there)
        spans = tl.cumsum(tl.where(at[:, None] > at[None, :], logs[:, None], 0.0), 0)
        weights, started = tl.where(lower, exp(spans), 0.0), exp(tl.cumsum(logs, 0))
        ended = exp(tl.cumsum(read(decay_ptr + places + heads, next_there), 0, reverse=True))
    return weights, started, ended


@triton.jit
def _inverse_of_blocks(lower, C: tl.constexpr, BLOCK: tl.constexpr):
    """Return the inverse of the blocks on the diagonal of ``I + lower``, (C, C), which has 0 on and above its diagonal.

    One row after another, of all blocks at a time, by plain instructions: products have no smaller sides than 16.
    """
    number, at = tl.arange(0, C // BLOCK), tl.arange(0, BLOCK)
    same = (number[:, None] == number[None, :])[:, None, :, None]
    blocks = tl.sum(tl.where(same, tl.reshape(lower, (C // BLOCK, BLOCK, C // BLOCK, BLOCK)), 0.0), 2)
    inverse = tl.where((at[:, None] == at[None, :])[None], 1.0, tl.zeros_like(blocks))
    for one in range(BLOCK - 1):
        row = tl.sum(tl.where((at == one)[None, :, None], inverse, 0.0), 1)
        column = tl.sum(tl.where((at == one)[None, None, :], blocks, 0.0), 2)
        inverse -= column[:, :, None] * row[:, None, :]
    return tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), (C, C))


@profiled(do_not_specialize=["scale", "count", "positions", "chunks", "heads", "group", "size_k"])
def _chunk_parts(
    products_ptr, inverse_ptr, factors_ptr, q_ptr, k_ptr, decay_ptr, beta_ptr, bounds_ptr, scale,
    count, positions, chunks, heads, group, size_k,
    UNIT_K: tl.constexpr, NORMALIZE: tl.constexpr, STEPS: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    OF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the parts of one chunk and value head. Grid (numbers * Hv,). See ``Parts``.

    size_k: over UNIT_K. LEVELS: how often BLOCK is doubled up to C.
    """
    size = size_k * UNIT_K
    number, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    base, first, end = place_of(bounds_ptr, number, count, positions, chunks, STEPS, C)
    if first < end:
        at, col = tl.arange(0, C), tl.arange(0, BK)
        there = first + at < end
        row = base + first + at  # 64-bit
        lines = (row * (heads // group) + head // group) * size
        of_keys, of_queries = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
        squares_q, squares_k = tl.zeros((C,), tl.float32), tl.zeros((C,), tl.float32)
        for start in range(0, size, BK):
            places = lines[:, None] + (start + col)[None, :]
            fits = there[:, None] & (start + col < size)[None, :]
            q, k = tl.load(q_ptr + places, fits, 0.0), tl.load(k_ptr + places, fits, 0.0)
            if NORMALIZE:
                wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
                squares_q += tl.sum(wide_q * wide_q, 1)
                squares_k += tl.sum(wide_k * wide_k, 1)
            turned = tl.trans(k.to(OF))
            of_queries += product(q, turned, "", OF, PRECISION)
            if inverse_ptr is not None:
                of_keys += product(k, turned, "", OF, PRECISION)
        factor_q, factor_k = rnorm_of(squares_q, NORMALIZE) * scalar(scale), rnorm_of(squares_k, NORMALIZE)
        place, next_there = row * heads + head, (first + at + 1 < end) & (at + 1 < C)
        weights, started, ended = weights_of(decay_ptr, place, there, next_there, heads, C)
        to = tl.program_id(0).to(tl.int64)
        of_queries = of_queries * weights * factor_q[:, None] * factor_k[None, :]
        store_matrix(products_ptr, to, of_queries, C, SPLIT)
        vectors = factors_ptr + to * FACTORS * C + at
        tl.store(vectors, factor_q)
        tl.store(vectors + C, factor_k)
        tl.store(vectors + 2 * C, started)
        tl.store(vectors + 3 * C, ended)
        tl.store(vectors + 5 * C, factor_q * started)
        tl.store(vectors + 6 * C, factor_k * started)
        tl.store(vectors + 7 * C, factor_k * ended)
        if beta_ptr is not None:
            tl.store(vectors + 4 * C, read(beta_ptr + place, there))
        if inverse_ptr is not None:
            lower = tl.where(at[:, None] > at[None, :], of_keys * weights, 0.0)
            lower = lower * factor_k[:, None] * factor_k[None, :]
            beta = read(beta_ptr + place, there)[:, None]
            inverse = _inverse_of_blocks(beta * lower, C, BLOCK)
            # pairs of blocks, up to all: the inverse of [[a, 0], [c, b]] has -b**-1 @ c @ a**-1 below its diagonal
            size_b = BLOCK
            for _ in range(LEVELS):
                below = (at[:, None] // (2 * size_b) == at[None, :] // (2 * size_b)) & (
                    at[:, None] // size_b > at[None, :] // size_b
                )
                # in this order: beta * lower, which no level changes, would be held in registers beside lower
                factor = beta * tl.where(below, lower, 0.0)
                middle = product(factor, inverse, "", tl.float32, PRECISION)
                inverse -= product(inverse, middle, "", tl.float32, PRECISION)
                size_b *= 2
            # the same again: else its parts of 11 bits are held in registers through all levels
            lower = tl.where(at[:, None] > at[None, :], lower, 0.0)
            store_matrix(inverse_ptr, to, product(lower, inverse, "", tl.float32, PRECISION), C, SPLIT)
