"""The draw of a token in Triton: a program goes through one row of logits, in blocks.

The limits of top_k and top_p are found by their bits: of the numbers as integers in the same order, 2 bits a pass, each
of which adds up the weights of the numbers from three candidates on. So nothing is sorted, nothing is added up by
atomics, and no one waits for the device. After that one pass computes the noise of every token.

All numbers that select a token are computed as fusedops/ops/sampling/formulas.py has them, bit for bit: no product is
fused with a sum, and sums of probabilities are of integers.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.sampling import formulas
from fusedops.ops.sampling.arguments import LOG_PROBS, SampleArgs
from fusedops_triton._jit._common import widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.bias._bias_dropout import philox
from fusedops_triton.launch.launcher import Launch, cached_by_layout, compiles_ptx
from fusedops_triton.launch.settings import power_of_two

_BLOCK = 2048  # of 16 warps, each thread has 4 tokens: one call of Philox


def sample(a: SampleArgs) -> tuple[Tensor, Tensor]:
    """Draw a token for each row; logits of any rank and strides."""
    rows, columns = a.logits.shape[:-1], a.logits.shape[-1]
    token = a.logits.new_empty(rows, dtype=torch.int64)
    log_prob = a.logits.new_empty(rows, dtype=torch.float32)
    if token.numel():
        mask = None if a.mask is None else a.mask.expand(a.logits.shape).contiguous().view(torch.uint8)
        numbers = (a.temperature, a.top_k, a.top_p, a.min_p, a.seed, a.position)
        of_rows = [None if each is None else each.resolve_neg().contiguous() for each in numbers]
        launch = _launch(token.numel(), columns, LOG_PROBS.index(a.return_log_prob))
        launch(token, token, log_prob, a.logits.resolve_neg().contiguous(), mask, *of_rows)
    return token, log_prob


@cached_by_layout
def _launch(rows: int, columns: int, log_prob: int) -> Launch:
    block = max(16, min(_BLOCK, power_of_two(columns)))
    constants = {"LOG_PROB": log_prob, "BLOCK": block, "PTX": compiles_ptx(_sample)}
    return Launch(_sample, (rows,), (columns,), constants, max(1, block // 128), fuses=False)


# ------------------------------------------------------------------------------------------------------ jit functions

_UNIT = tl.constexpr(formulas.UNIT)
_LN_2_HIGH, _LN_2_LOW = (tl.constexpr(each) for each in formulas.LN_2)
_LOG2_E, _ROUNDS = tl.constexpr(formulas.LOG2_E), tl.constexpr(formulas.ROUNDS)
_LOWEST_EXPONENT = tl.constexpr(formulas.LOWEST_EXPONENT)
_SMALLEST_FACTOR, _LARGEST_FACTOR = tl.constexpr(formulas.SMALLEST_FACTOR), tl.constexpr(formulas.LARGEST_FACTOR)
_SQRT_HALF_BITS, _NEAR_ONE = tl.constexpr(formulas.SQRT_HALF_BITS), tl.constexpr(formulas.NEAR_ONE)
_LOG, _EXP = tl.constexpr(formulas.LOG), tl.constexpr(formulas.EXP)
_NONE, _UNFILTERED, _FILTERED = (tl.constexpr(each) for each in range(3))
_INF = tl.constexpr(float("inf"))
_MANY = tl.constexpr(0x7FFFFFFF)  # above every id


@triton.jit
def _exponential(d):
    """Return exp(d) of d <= 0."""
    c = tl.maximum(d, _LOWEST_EXPONENT)
    n = (c * _LOG2_E + _ROUNDS) - _ROUNDS
    r = (c - n * _LN_2_HIGH) - n * _LN_2_LOW
    y = r * _EXP.value[0] + _EXP.value[1]
    for i in tl.static_range(2, 6):
        y = y * r + _EXP.value[i]
    e = y * (r * r) + r + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(d < _LOWEST_EXPONENT, 0.0, e * power)


@triton.jit
def _split(x):
    """Return e and f of x = 2^e * (1 + f)."""
    bits = x.to(tl.int32, bitcast=True)
    e = (bits - _SQRT_HALF_BITS) >> 23
    return e.to(tl.float32), (bits - (e << 23)).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _logarithm(e, f):
    """Return log(2^e * (1 + f))."""
    f2 = f * f
    p = f * _LOG.value[0] + _LOG.value[1]
    for i in tl.static_range(2, 9):
        p = p * f + _LOG.value[i]
    y = f * f2 * p
    y = y + e * _LN_2_LOW
    y = y - f2 * 0.5
    return (f + y) + e * _LN_2_HIGH


@triton.jit
def _noise(words):
    """Return -log(-log(u)) of words as int32."""
    near_one = words < 0
    v = (tl.where(near_one, ~words, words).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    e, f = _split(v)
    small = v < _NEAR_ONE
    e = tl.where(near_one, tl.where(small, 0.0, -1.0), e)
    f = tl.where(near_one, tl.where(small, -v, 1.0 - 2.0 * v), f)
    e, f = _split(-_logarithm(e, f))
    return -_logarithm(e, f)


@triton.jit
def _loaded(x_ptr, mask_ptr, start, columns, BLOCK: tl.constexpr):
    """Return a block of logits, and of the allowed ones, -inf elsewhere."""
    at = start + tl.arange(0, BLOCK)
    z = widened(tl.load(x_ptr + at, at < columns, float("-inf"))) + 0.0  # not -0
    if mask_ptr is not None:
        return z, tl.where(tl.load(mask_ptr + at, at < columns, 0) != 0, -_INF, z)
    return z, z


@triton.jit
def _key(z):
    """Return integers without a sign in the order of the numbers."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _weight_from(
    x_ptr, mask_ptr, columns, least, low, top, factor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the sums of the weights of the numbers whose keys are at least ``low`` and each of three candidates."""
    first, second, third = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    step, base = least
    for start in range(0, columns, BLOCK):
        _, z = _loaded(x_ptr, mask_ptr, start, columns, BLOCK)
        key = _key(z)
        if WEIGHTED:
            weight = (_exponential((z - top) * factor) * _UNIT).to(tl.int64)
        else:
            weight = (start + tl.arange(0, BLOCK) < columns).to(tl.int64)
        weight = tl.where(key >= low, weight, 0)
        first += tl.sum(tl.where(key >= base + step, weight, 0), 0)
        second += tl.sum(tl.where(key >= base + 2 * step, weight, 0), 0)
        third += tl.sum(tl.where(key >= base + 3 * step, weight, 0), 0)
    return first, second, third


@triton.jit
def _limit(
    x_ptr, mask_ptr, columns, needed, low, top, factor, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Return the largest key from which on the weights sum to at least ``needed``."""
    limit, step = tl.full([], 0, tl.uint32), tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        first, second, third = _weight_from(x_ptr, mask_ptr, columns, (step, limit), low, top, factor, WEIGHTED, BLOCK)
        limit += step * (
            (first >= needed).to(tl.uint32) + (second >= needed).to(tl.uint32) + (third >= needed).to(tl.uint32)
        )
        step >>= 2
    return limit


@profiled()
def _sample(
    token_ptr, log_prob_ptr, x_ptr, mask_ptr, temperature_ptr, k_ptr, p_ptr, m_ptr, seed_ptr, position_ptr, columns,
    LOG_PROB: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row. Grid (rows,).

    x_ptr: (rows, columns). mask_ptr: the same in bytes, or None. temperature_ptr, k_ptr, p_ptr, m_ptr: (rows,) each, or
    None. seed_ptr, position_ptr, token_ptr, log_prob_ptr: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * columns
    if mask_ptr is not None:
        mask_ptr += row * columns
    top, whole_top, wrong = tl.full([], -_INF, tl.float32), tl.full([], -_INF, tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, columns, BLOCK):
        all_z, z = _loaded(x_ptr, mask_ptr, start, columns, BLOCK)
        wrong = tl.maximum(wrong, tl.max((~(all_z < _INF)).to(tl.int32), 0))
        top, whole_top = tl.maximum(top, tl.max(z, 0)), tl.maximum(whole_top, tl.max(all_z, 0))
    right = (wrong == 0) & (top > -_INF)
    temperature, factor = tl.full([], 1.0, tl.float32), tl.full([], 1.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        right = right & (temperature >= 0) & (temperature < _INF)
        factor = tl.minimum(tl.maximum(tl.div_rn(factor, temperature), _SMALLEST_FACTOR), _LARGEST_FACTOR)
        factor = tl.where(temperature == 0, 1.0, factor)
    low = tl.full([], 0, tl.uint32)
    if k_ptr is not None:
        k = tl.load(k_ptr + row)
        right = right & (k >= 0)
        if (k > 0) & (k < columns):
            low = _limit(x_ptr, mask_ptr, columns, k, low, top, factor, False, BLOCK)
    # the key of the last ones that are kept, and the sum that those of it and of lower ids stay below
    limit, left = low, tl.full([], 1 << 62, tl.int64)
    if p_ptr is not None:
        p = tl.load(p_ptr + row)
        right = right & (p > 0) & (p <= 1)
        if (p < 1) & right:
            step = tl.full([], 0, tl.uint32)
            total, _, _ = _weight_from(x_ptr, mask_ptr, columns, (step, low), low, top, factor, True, BLOCK)
            needed = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            needed = tl.maximum(needed, 1)
            limit = _limit(x_ptr, mask_ptr, columns, needed, low, top, factor, True, BLOCK)
            step += 1
            above, _, _ = _weight_from(x_ptr, mask_ptr, columns, (step, limit), low, top, factor, True, BLOCK)
            left = needed - above
    m = tl.full([], 0.0, tl.float32)
    if m_ptr is not None:
        m = tl.load(m_ptr + row)
        right = right & (m >= 0) & (m <= 1)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    best, token, equal = tl.full([], -_INF, tl.float32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    best_d, kept_sum = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int64)
    for start in range(0, columns, BLOCK):
        _, z = _loaded(x_ptr, mask_ptr, start, columns, BLOCK)
        id = start + tl.arange(0, BLOCK)
        key, d = _key(z), (z - top) * factor
        kept = (z > -_INF) & (key >= limit)
        if p_ptr is not None or m_ptr is not None or LOG_PROB == _FILTERED:
            e = _exponential(d)
            weight = (e * _UNIT).to(tl.int64)
        if p_ptr is not None:
            is_last = (kept & (key == limit)).to(tl.int64)
            before = equal + tl.cumsum(is_last, 0) - is_last
            equal += tl.sum(is_last, 0)
            kept = kept & ((is_last == 0) | (before * weight < left))
        if m_ptr is not None:
            kept = kept & (e >= m)
        if LOG_PROB == _FILTERED:
            kept_sum += tl.sum(tl.where(kept, weight, 0), 0)
        counter = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        w0, w1, w2, w3 = philox(seed, counter, tl.zeros_like(counter), position, PTX)
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCK])  # in the order of the tokens
        noise = _noise(words.to(tl.int32, bitcast=True))
        score = tl.where(kept, d + tl.where(temperature == 0, 0.0, noise), -_INF)
        largest = tl.max(score, 0)
        first = tl.min(tl.where(score == largest, id, _MANY), 0)
        if largest > best:
            best, token = largest, first
            best_d = tl.max(tl.where(id == first, d, -_INF), 0)
    tl.store(token_ptr + row, tl.where(right, token, -1).to(tl.int64))
    log_prob = tl.full([], 0.0, tl.float32)
    if LOG_PROB == _UNFILTERED:
        total = tl.full([], 0.0, tl.float32)
        whole_top = tl.div_rn(whole_top, temperature)
        for start in range(0, columns, BLOCK):
            all_z, _ = _loaded(x_ptr, mask_ptr, start, columns, BLOCK)
            total += tl.sum(tl.exp(tl.div_rn(all_z, temperature) - whole_top), 0)
        chosen = widened(tl.load(x_ptr + token))
        log_prob = (tl.div_rn(chosen, temperature) - whole_top) - tl.log(total)
    if LOG_PROB == _FILTERED:
        log_prob = best_d - tl.log((kept_sum.to(tl.float64) / _UNIT).to(tl.float32))
    if LOG_PROB != _NONE:
        log_prob = tl.where(right, tl.where(temperature == 0, 0.0, log_prob), float("nan"))
    tl.store(log_prob_ptr + row, log_prob)
