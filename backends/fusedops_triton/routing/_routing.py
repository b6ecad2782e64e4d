"""The routing of experts in Triton: the choice and the weights in one pass over the logits, and their gradient.

    forward     A program reads some rows of logits once, each as a tile of groups and their experts. It takes the
                largest number out of each tile, k times; of equal numbers that of the lowest index. Without a bias,
                these numbers are the scores of the chosen.
    backward    A program computes the scores of some rows again, and adds the terms of the chosen in their order.

Numbers are compared by their bits as integers: NaN is the largest, 0 and -0 are equal. Every element of a row has its
score from the same instructions, so that equal logits are a tie. Nothing is added up by atomics, and no one waits for
the device: a row with a given number of no expert is NaN.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.routing.arguments import TopKRoutingArgs, TopKRoutingGradArgs
from fusedops.ops.routing.formulas import SCORES
from fusedops_triton._jit._common import exp, read, scalar, widened
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.launch.settings import ceil_div, power_of_two

_BYTES = 4096  # of the logits of a program, once they are widened


class Routing(NamedTuple):
    """The options of a call. The docstring of the op has their meaning."""

    k: int
    score: str
    groups: int
    top_groups: int
    group_score: str
    normalize: bool
    eps: float
    scale: float


# ---------------------------------------------------------------------------------------------------------- launchers


def top_k_routing(a: TopKRoutingArgs) -> tuple[Tensor, Tensor]:
    """Choose experts and compute their weights; logits of any rank and strides."""
    options = Routing(a.k, a.score, a.groups, a.top_groups, a.group_score, a.normalize, a.eps, a.scale)
    return routing_forward(a.logits, a.bias, a.index, options)


def top_k_routing_backward(a: TopKRoutingGradArgs) -> Tensor:
    """Compute the gradient of the logits."""
    return routing_backward(*a)


def routing_forward(
    logits: Tensor, bias: Tensor | None, index: Tensor | None, options: Routing
) -> tuple[Tensor, Tensor]:
    """Compute the weights and the index of the chosen experts, (..., k); logits (..., E) of any strides."""
    shape = (*logits.shape[:-1], options.k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(shape, dtype=torch.int64, device=logits.device)
    if weights.numel():
        logits, bias, index = (_plain(each) for each in (logits, bias, index))
        rows, grouped = weights.numel() // options.k, 1 < options.groups != options.top_groups
        groups, top = (options.groups, options.top_groups) if grouped else (1, 1)
        sizes = (logits.shape[-1], options.k, groups, top, options.group_score == "top2", options.normalize)
        launch = _forward_launch(rows, options.score, index is not None, *sizes)
        launch(weights, weights, chosen, logits, bias, index, float(options.eps), float(options.scale))
    return weights, chosen


def routing_backward(
    grad: Tensor, logits: Tensor, chosen: Tensor, k: int, score: str, normalize: bool, eps: float, scale: float
) -> Tensor:
    """Compute the gradient of the logits, contiguous."""
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if dx.numel():
        rows, experts = dx.numel() // dx.shape[-1], dx.shape[-1]
        grad, logits, chosen = (_plain(each) for each in (grad, logits, chosen))
        launch = _backward_launch(rows, score, experts, k, normalize)
        launch(dx, dx, grad, logits, chosen, float(eps), float(scale))
    return dx


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.resolve_neg().contiguous()


@cached_by_layout
def _forward_launch(
    rows: int,
    score: str,
    given: bool,
    experts: int,
    k: int,
    groups: int,
    top_groups: int,
    by_two: bool,
    normalize: bool,
) -> Launch:
    width, setting = power_of_two(experts // groups), _setting(experts, rows)
    constants = {
        "SCORE": SCORES.index(score), "GIVEN": given, "BY_TWO": by_two, "NORMALIZE": normalize, "ROWS": setting.rows,
        "GROUPS": power_of_two(groups), "WIDTH": width, "K": k, "CHOICES": power_of_two(k),
    }  # fmt: skip
    grid, sizes = (ceil_div(rows, setting.rows),), (rows, experts, groups, top_groups)
    return Launch(_forward, grid, sizes, constants, setting.warps)


@cached_by_layout
def _backward_launch(rows: int, score: str, experts: int, k: int, normalize: bool) -> Launch:
    setting = _setting(experts, rows)
    constants = {
        "SCORE": SCORES.index(score), "NORMALIZE": normalize, "ROWS": setting.rows, "BLOCK": power_of_two(experts),
        "CHOICES": power_of_two(k),
    }  # fmt: skip
    return Launch(_backward, (ceil_div(rows, setting.rows),), (rows, experts, k), constants, setting.warps)


class _Setting(NamedTuple):
    """The rows and the warps of a program."""

    rows: int
    warps: int


def _setting(experts: int, rows: int) -> _Setting:
    """Return programs of 4 KiB of numbers with 4 warps; of one row where it is longer, fewer for few."""
    elements = power_of_two(experts)
    fitting = min(max(1, _BYTES // 4 // elements), power_of_two(rows))
    return _Setting(fitting, 4 if fitting * elements > 256 else 1)


# ------------------------------------------------------------------------------------------------------ jit functions

_SOFTMAX, _SIGMOID, _SQRT_SOFTPLUS, _TOPK_SOFTMAX = (tl.constexpr(each) for each in range(4))
_MANY = tl.constexpr(0x7FFFFFFF)  # above every index
_LARGEST = tl.constexpr(0x7FFFFFFF)  # of the integers of _order
_UNROLLED = tl.constexpr(16)  # the most choices that are no loop
_LOW = tl.constexpr(-0x7FFFFFFF)  # below those of all numbers but -NaN


@triton.jit
def _log_of_one_and(e):
    """Return log(1 + e) for e in [0, 1], as 2 * atanh(e / (2 + e)): 3 to the power of -2 * TERMS is its error."""
    TERMS: tl.constexpr = 8
    u = e / (2.0 + e)
    q = u * u
    p = tl.zeros_like(u)
    for i in tl.static_range(TERMS):
        p = p * q + 1.0 / (2 * (TERMS - i) - 1)
    return 2.0 * u * p


@triton.jit
def _score(z, SCORE: tl.constexpr):
    """Return the score of each number by itself."""
    e = exp(-tl.abs(z))
    if SCORE == _SIGMOID:
        return tl.where(z >= 0, 1.0, e) / (1.0 + e)
    return tl.sqrt(tl.where(z >= 0, z, 0.0) + _log_of_one_and(e))  # NaN by e


@triton.jit
def _exponentials(z):
    """Return exp(z - top) of rows, top, and the sum of the exponentials. A row with NaN, or inf, is NaN."""
    top = tl.max(z, 1)
    e = exp(z - top[:, None])
    return e, top, tl.sum(e, 1)


@triton.jit
def _order(x):
    """Return integers in the order of the numbers: NaN is the largest, 0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ _LARGEST, bits), _LARGEST)


@triton.jit
def _of_chosen(z, fit):
    """Return the softmax of the logits of the chosen."""
    e, _, total = _exponentials(tl.where(fit, z, float("-inf")))
    return e / total[:, None]


@triton.jit
def _picked(x_ptr, row, experts, chosen, fit, top, total, SCORE: tl.constexpr):
    """Return the logits of the chosen of rows, and their scores; 0 for the rest."""
    z = read(x_ptr + row[:, None] * experts + chosen, fit)
    if SCORE == _SOFTMAX:
        s = exp(z - top[:, None]) / total[:, None]
    elif SCORE == _TOPK_SOFTMAX:
        s = _of_chosen(z, fit)
    else:
        s = _score(z, SCORE)
    return z, tl.where(fit, s, 0.0)


@profiled()
def _forward(
    weights_ptr, chosen_ptr, x_ptr, bias_ptr, index_ptr, eps, scale, rows, experts, groups, top_groups,
    K: tl.constexpr, SCORE: tl.constexpr, GIVEN: tl.constexpr, BY_TWO: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, CHOICES)[None, :]
    there = (row[:, None] < rows) & (j < K)
    at = row[:, None] * K + j
    width = experts // groups
    # exponentials have the order of their shares of the total
    BY_RATIO: tl.constexpr = SCORE == _SOFTMAX and bias_ptr is None and GROUPS == 1 and not GIVEN
    expert = (tl.arange(0, GROUPS)[:, None] * width + tl.arange(0, WIDTH)[None, :])[None, :, :]
    of_row = ((tl.arange(0, GROUPS)[:, None] < groups) & (tl.arange(0, WIDTH)[None, :] < width))[None, :, :]
    top = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SCORE == _SOFTMAX or not GIVEN:
        known = of_row & (row[:, None, None] < rows)
        s = widened(tl.load(x_ptr + row[:, None, None] * experts + expert, known, float("-inf")))
        if SCORE == _SOFTMAX:
            top = tl.max(tl.max(s, 2), 1)
            s = exp(s - top[:, None, None])
            total = tl.sum(tl.sum(s, 2), 1)
            if BY_RATIO:
                s += (total * 0.0)[:, None, None]  # a row with NaN, or inf, is NaN
            else:
                s = s / total[:, None, None]
        elif SCORE != _TOPK_SOFTMAX:
            s = _score(s, SCORE)
    if GIVEN:
        chosen = tl.load(index_ptr + at, there, 0).to(tl.int64)
        wrong = ((chosen < 0) | (chosen >= experts)) & there
        _, picked = _picked(x_ptr, row, experts, chosen, there & ~wrong, top, total, SCORE)
    else:
        if bias_ptr is not None:
            s += read(bias_ptr + expert, of_row)
        order = tl.where(of_row, _order(s), _LOW)
        if GROUPS > 1:
            kept = _best_groups(order, expert, groups, top_groups, BY_TWO, ROWS, GROUPS)
            order = tl.where(kept[:, :, None], order, _LOW)
        chosen, picked = _largest(order, expert, K, ROWS, CHOICES)
        if bias_ptr is not None:
            _, picked = _picked(x_ptr, row, experts, chosen, there, top, total, SCORE)
        else:
            if SCORE == _TOPK_SOFTMAX:
                picked = _of_chosen(picked, there)
            if BY_RATIO:
                picked = picked / total[:, None]
            picked = tl.where(there, picked, 0.0)
    tl.store(chosen_ptr + at, chosen.to(tl.int64), there)
    if NORMALIZE:
        picked = picked / (tl.sum(picked, 1) + scalar(eps))[:, None]
    picked *= scalar(scale)
    if GIVEN:
        picked = tl.where(tl.max(wrong.to(tl.int32), 1)[:, None] > 0, float("nan"), picked)
    tl.store(weights_ptr + at, picked, there)


@triton.jit
def _best_groups(
    order, expert, groups, top_groups,
    BY_TWO: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Return True for the groups of each row from which experts are chosen, (ROWS, GROUPS)."""
    group = tl.arange(0, GROUPS)[None, :]
    score = tl.max(order, 2)
    if BY_TWO:
        at = tl.min(tl.where(order == score[:, :, None], expert, _MANY), 2)
        second = tl.max(tl.where(expert == at[:, :, None], _LOW, order), 2)
        score = _order(_number(score) + _number(second))
    score = tl.where(group < groups, score, _LOW)
    kept = tl.zeros((ROWS, GROUPS), tl.int1)
    for _ in range(top_groups):
        best = tl.min(tl.where(score == tl.max(score, 1)[:, None], group, _MANY), 1)[:, None]
        kept = kept | (group == best)
        score = tl.where(group == best, _LOW, score)
    return kept


@triton.jit
def _largest(order, expert, K: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr):
    """Return the experts of the K largest of each row and their numbers, in the first K of CHOICES elements."""
    j = tl.arange(0, CHOICES)[None, :]
    chosen, numbers = tl.zeros((ROWS, CHOICES), tl.int32), tl.zeros((ROWS, CHOICES), tl.int32)
    if K <= _UNROLLED:
        for place in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
            order, chosen, numbers = _take(order, expert, j, place, chosen, numbers)
    else:
        for place in range(K):
            order, chosen, numbers = _take(order, expert, j, place, chosen, numbers)
    return chosen, _number(numbers)


@triton.jit
def _take(order, expert, j, place, chosen, numbers):
    """Move the largest of each row to ``place`` of the chosen."""
    largest = tl.max(tl.max(order, 2), 1)
    at = tl.min(tl.min(tl.where(order == largest[:, None, None], expert, _MANY), 2), 1)
    chosen, numbers = tl.where(j == place, at[:, None], chosen), tl.where(j == place, largest[:, None], numbers)
    return tl.where(expert == at[:, None, None], _LOW, order), chosen, numbers


@triton.jit
def _number(order):
    """Return the number of an integer of _order."""
    return tl.where(order < 0, order ^ _LARGEST, order).to(tl.float32, bitcast=True)


@profiled()
def _backward(
    dx_ptr, grad_ptr, x_ptr, chosen_ptr, eps, scale, rows, experts, k,
    SCORE: tl.constexpr, NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j, expert = tl.arange(0, CHOICES)[None, :], tl.arange(0, BLOCK)[None, :]
    there = (row[:, None] < rows) & (j < k)
    known = (row[:, None] < rows) & (expert < experts)
    chosen = tl.load(chosen_ptr + row[:, None] * k + j, there, 0)
    wrong = ((chosen < 0) | (chosen >= experts)) & there
    top = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SCORE == _SOFTMAX:
        s, top, total = _exponentials(widened(tl.load(x_ptr + row[:, None] * experts + expert, known, float("-inf"))))
        s = s / total[:, None]
    z, picked = _picked(x_ptr, row, experts, chosen, there & ~wrong, top, total, SCORE)
    g = tl.load(grad_ptr + row[:, None] * k + j, there, 0.0).to(tl.float32) * scalar(scale)
    if NORMALIZE:
        divisor = (tl.sum(picked, 1) + scalar(eps))[:, None]
        g = (g - tl.sum(g * (picked / divisor), 1)[:, None]) / divisor
    terms = tl.where(there, g * picked, 0.0)
    d = tl.zeros((ROWS, BLOCK), tl.float32)
    if SCORE == _SOFTMAX:
        d = -s * tl.sum(terms, 1)[:, None]
    elif SCORE == _TOPK_SOFTMAX:
        terms = picked * (g - tl.sum(terms, 1)[:, None])
    else:
        e = exp(-tl.abs(z))
        below = 1.0 / (1.0 + e)
        if SCORE == _SIGMOID:
            terms = g * (e * below * below)
        else:
            half = tl.where(z >= 0, below, e * below) * 0.5
            terms = g * tl.where(picked == 0.0, 0.0, half / picked)
    for place in range(k):  # in their order: an expert may be there twice
        at = tl.sum(tl.where(j == place, chosen, 0), 1)[:, None]
        d += tl.where(expert == at, tl.sum(tl.where(j == place, terms, 0.0), 1)[:, None], 0.0)
    is_wrong = tl.max(wrong.to(tl.int32), 1)[:, None] > 0
    tl.store(dx_ptr + row[:, None] * experts + expert, tl.where(is_wrong, float("nan"), d), known)
