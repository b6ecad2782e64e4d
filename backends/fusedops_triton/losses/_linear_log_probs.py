"""linear_log_probs with Triton: the chunks of linear_cross_entropy, with a kernel for each direction between matmuls.

- Forward reads a row of logits once: the running maximum, the sum of exponentials and, for the entropy, their sum
  weighted by the distance from the maximum, which is rescaled when the maximum changes. The logits are not written.
- Backward computes each element by itself from lse and the entropy of forward, in place, without a barrier.
- The rows of ignored targets are not read. Offsets of rows are 64-bit. There are no atomics.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false
# Triton is not typed, and the body of a jit function is Triton's own language with Python's syntax.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedops.ops.losses.arguments import LinearLogProbsArgs, LinearLogProbsGradArgs
from fusedops.ops.losses.formulas import Wanted
from fusedops_triton._jit._common import exp, scalar
from fusedops_triton._jit._profiled import profiled
from fusedops_triton.launch.launcher import Launch, cached_by_layout
from fusedops_triton.losses._linear_cross_entropy import Chunk, in_chunks
from fusedops_triton.losses._logits import read_logits, slope
from fusedops_triton.losses._loss_settings import class_tile


class Options(NamedTuple):
    """The options of a call, as the op's."""

    temperature: float
    softcap: float | None
    ignore_index: int
    return_entropy: bool

    @property
    def numbers(self) -> tuple[float, float, int]:
        """The rate by which the kernels multiply logits, the softcap or 1, and the ignored target."""
        return 1.0 / self.temperature, 1.0 if self.softcap is None else float(self.softcap), self.ignore_index


# ----------------------------------------------------------------------------------------------------------- launcher


def linear_log_probs(a: LinearLogProbsArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the log probabilities and the entropy in chunks of rows."""
    flat, options = a.target.reshape(-1), Options(a.temperature, a.softcap, a.ignore_index, a.return_entropy)
    logp, entropy, lse = row_statistics(a.x.reshape(flat.numel(), a.x.shape[-1]), a.weight, flat, a.bias, options)
    shape = a.target.shape
    return logp.view(shape), entropy.view(shape), lse.view(shape) if save else None


def linear_log_probs_backward(a: LinearLogProbsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the chunks again, and the gradients of x, weight and bias."""
    flat, options = a.target.reshape(-1), Options(a.temperature, a.softcap, a.ignore_index, a.return_entropy)
    rows = [each.reshape(-1).resolve_neg().contiguous() for each in (a.grad_logp, a.grad_entropy, a.entropy, a.lse)]
    wanted = Wanted(a.needs[0], a.needs[1], a.needs[2] and a.bias is not None)
    given = (a.x.reshape(flat.numel(), a.x.shape[-1]), a.weight, flat, a.bias)
    dx, dweight, dbias = row_gradients(rows[0], rows[1], rows[2], rows[3], *given, options=options, wanted=wanted)
    return (
        None if dx is None else dx.view(a.x.shape),
        None if dweight is None else dweight.to(a.weight.dtype),
        None if dbias is None or a.bias is None else dbias.to(a.bias.dtype),
    )


def row_statistics(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log probabilities, the entropies (0 where not wanted) and lse: (N,), 0 for an ignored row.

    Args:
        x: (N, H), any strides.
        weight: (V, H), any strides.
        target: (N,), int64.
        bias: (V,), or None.
        options: see the op.
    """
    logp, lse = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(2))
    entropy = (torch.empty_like if options.return_entropy else torch.zeros_like)(logp)

    def turn(chunk: Chunk) -> None:
        statistics(chunk, logp[chunk.at], entropy[chunk.at] if options.return_entropy else None, lse[chunk.at], options)

    in_chunks(x, weight, target, bias, options.ignore_index, None, Wanted(False, False, False), turn)
    return logp, entropy, lse


def row_gradients(
    of_logp: Tensor,
    of_entropy: Tensor,
    entropy: Tensor,
    lse: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: Options,
    wanted: Wanted,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias that are wanted.

    Args:
        of_logp: (N,), contiguous, the gradient of the log probabilities, as ``of_entropy`` is of the entropies.
        entropy: (N,), contiguous, of forward, as ``lse``.
        x: (N, H), any strides.
        weight: (V, H), any strides.
        target: (N,), int64.
        bias: (V,), or None.
        options: see the op.
        wanted: the gradients to compute.
    """

    def turn(chunk: Chunk) -> None:
        at = chunk.at
        gradients(chunk, of_logp[at], of_entropy[at], entropy[at], lse[at], options)

    return in_chunks(x, weight, target, bias, options.ignore_index, None, wanted, turn)[:3]


def statistics(chunk: Chunk, logp: Tensor, entropy: Tensor | None, lse: Tensor, options: Options) -> None:
    """Launch the kernel of forward for a chunk. logp, entropy, lse: (n,), written; entropy may be None."""
    if chunk.logits.shape[0] == 0:
        return
    launch = _launch_of(*_layout(chunk), options.softcap is not None, entropy is not None, False)
    launch(lse, chunk.logits, logp, entropy, lse, chunk.target, chunk.bias, *options.numbers)


def gradients(
    chunk: Chunk, of_logp: Tensor, of_entropy: Tensor, entropy: Tensor, lse: Tensor, options: Options
) -> None:
    """Launch the kernel of backward for a chunk, which turns the logits into their gradient. The others: (n,)."""
    if chunk.logits.shape[0] == 0:
        return
    launch = _launch_of(*_layout(chunk), options.softcap is not None, options.return_entropy, True)
    given = (of_logp, of_entropy if options.return_entropy else None, entropy, lse, chunk.target, chunk.bias)
    launch(lse, chunk.logits, *given, *options.numbers)


def _layout(chunk: Chunk) -> tuple[int, int, int, torch.dtype]:
    return chunk.logits.shape[0], chunk.logits.shape[1], chunk.padded, chunk.logits.dtype


@cached_by_layout
def _launch_of(
    n_rows: int, size: int, padded: int, dtype: torch.dtype, caps: bool, entropy: bool, backward: bool
) -> Launch:
    """Return the launch for (n_rows, size). caps, entropy: softcap and entropy are not left out."""
    setting = class_tile(padded, dtype.itemsize)
    constants = {"CAPS": caps, "ENTROPY": entropy, "BLOCK": setting.block}
    if not backward:
        constants["GROUP"] = 16 // dtype.itemsize
    kernel = _gradient if backward else _statistics
    return Launch(kernel, (n_rows,), (size, padded), constants, setting.warps)


# ------------------------------------------------------------------------------------------------------------- kernels


@profiled(do_not_specialize=["rate", "softcap", "ignore_index", "size"])
def _statistics(
    logits_ptr, logp_ptr, entropy_ptr, lse_ptr, target_ptr, bias_ptr, rate, softcap, ignore_index, size, padded,
    CAPS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute the log probability, the entropy and lse of a row. Grid (n_rows,).

    logits_ptr: (n_rows, padded), of which ``size`` columns are logits. logp_ptr, lse_ptr, target_ptr: (n_rows,), as
    entropy_ptr, or None. bias_ptr: (padded,), or None. rate: one by the temperature, as softcap see ``scalar``.
    """
    row = tl.program_id(0).to(tl.int64)
    line = logits_ptr + row * padded
    target = tl.load(target_ptr + row)
    ignored = target == ignore_index
    wrong = (target < 0) | (target >= size)
    at_target = tl.where(wrong, 0, target) + tl.arange(0, 1)
    factor = scalar(rate)
    picked = tl.sum(read_logits(line, bias_ptr, at_target, at_target < padded, softcap, CAPS, True), axis=0) * factor

    whole = size // BLOCK * BLOCK  # columns that are read without masks
    top = tl.full([1, BLOCK // GROUP], float("-inf"), tl.float32)
    total = tl.full([1, BLOCK // GROUP], 0.0, tl.float32)
    weighted = tl.full([1, BLOCK // GROUP], 0.0, tl.float32)
    for start in range(0, tl.where(ignored, 0, whole), BLOCK):
        col = (start + tl.arange(0, BLOCK))[None, :]
        z = read_logits(line, bias_ptr, col, None, softcap, CAPS, False) * factor
        top, total, weighted = _added(top, total, weighted, z, ENTROPY, GROUP)
    if whole < padded:
        last = (whole + tl.arange(0, BLOCK))[None, :]
        z = read_logits(line, bias_ptr, last, last < tl.where(ignored, 0, padded), softcap, CAPS, True) * factor
        z = tl.where(last < tl.where(ignored, 0, size), z, float("-inf"))
        top, total, weighted = _added(top, total, weighted, z, ENTROPY, GROUP)
    highest = tl.max(tl.max(top, axis=1), axis=0)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    scale = exp(top - shift)
    total_of_row = tl.sum(tl.sum(total * scale, axis=1), axis=0)
    log_total = tl.log(tl.where(ignored, 1.0, total_of_row))
    logp = (picked - highest) - log_total
    tl.store(logp_ptr + row, tl.where(ignored, 0.0, tl.where(wrong, float("nan"), logp)))
    tl.store(lse_ptr + row, tl.where(ignored, 0.0, highest + log_total))
    if ENTROPY:
        moved = tl.where(scale == 0.0, 0.0, scale * (top - shift))
        weighted_of_row = tl.sum(tl.sum(scale * weighted + total * moved, axis=1), axis=0)
        entropy = log_total - weighted_of_row / tl.where(ignored, 1.0, total_of_row)
        tl.store(entropy_ptr + row, tl.where(ignored, 0.0, tl.where(wrong, float("nan"), entropy)))


@triton.jit
def _added(top, total, weighted, z, ENTROPY: tl.constexpr, GROUP: tl.constexpr):
    """Return the maxima, the sums of ``exp(z - top)`` and those of its product with ``z - top``, with more columns.

    top, total, weighted: (1, BLOCK // GROUP). z: (1, BLOCK), -inf where there is no column, or where it is left out.
    """
    shape: tl.constexpr = [z.shape[0], z.shape[1] // GROUP, GROUP]
    z = tl.reshape(z, shape)
    higher = tl.maximum(top, tl.max(z, axis=2))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    scale = exp(top - shift)
    below = z - shift[:, :, None]
    terms = exp(below)
    if ENTROPY:
        moved = tl.where(scale == 0.0, 0.0, scale * (top - shift))  # 0 times -inf is NaN
        products = tl.where(terms == 0.0, 0.0, terms * below)
        weighted = scale * weighted + total * moved + tl.sum(products, axis=2)
    return higher, total * scale + tl.sum(terms, axis=2), weighted


@profiled(do_not_specialize=["rate", "softcap", "ignore_index", "size"])
def _gradient(
    logits_ptr, of_logp_ptr, of_entropy_ptr, entropy_ptr, lse_ptr, target_ptr, bias_ptr, rate, softcap, ignore_index,
    size, padded, CAPS: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn a row of logits into its gradient. Grid (n_rows,). Arguments as of ``_statistics``; each is read."""
    row = tl.program_id(0).to(tl.int64)
    line = logits_ptr + row * padded
    target = tl.load(target_ptr + row)
    ignored = target == ignore_index
    wrong = (target < 0) | (target >= size)
    factor = scalar(rate)
    lse = tl.load(lse_ptr + row)
    hit = tl.where(wrong, float("nan"), tl.load(of_logp_ptr + row)) * factor
    of_entropy = hit
    entropy = hit
    if ENTROPY:
        of_entropy = tl.load(of_entropy_ptr + row) * factor
        entropy = tl.load(entropy_ptr + row)
    whole = size // BLOCK * BLOCK
    stop = tl.where(ignored, 0, whole)
    for start in range(0, stop, BLOCK):
        col = (start + tl.arange(0, BLOCK))[None, :]
        z = read_logits(line, bias_ptr, col, None, softcap, CAPS, False)
        g = _of_logits(z, col == target, lse, hit, of_entropy, entropy, factor, softcap, CAPS, ENTROPY)
        tl.store(line + col, g.to(logits_ptr.dtype.element_ty))
    for start in range(stop, whole, BLOCK):  # of an ignored row
        tl.store(line + start + tl.arange(0, BLOCK), tl.zeros([BLOCK], logits_ptr.dtype.element_ty))
    if whole < padded:
        last = (whole + tl.arange(0, BLOCK))[None, :]
        z = read_logits(line, bias_ptr, last, last < tl.where(ignored, 0, padded), softcap, CAPS, True)
        g = _of_logits(z, last == target, lse, hit, of_entropy, entropy, factor, softcap, CAPS, ENTROPY)
        g = tl.where(last < tl.where(ignored, 0, size), g, 0.0)
        tl.store(line + last, g.to(logits_ptr.dtype.element_ty), mask=last < padded)


@triton.jit
def _of_logits(
    z, is_target, lse, hit, of_entropy, entropy, factor, softcap, CAPS: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Return the gradient of logits. z: after the softcap. hit, of_entropy: multiplied by ``factor``, the rate."""
    log_p = z * factor - lse
    # at most 0, which a difference of large numbers may exceed; at least what gives 0, as 0 times -inf is NaN
    log_p = tl.where(log_p > 0.0, 0.0, tl.where(log_p < -1e4, -1e4, log_p))
    p = exp(log_p)
    if ENTROPY:
        g = tl.where(is_target, hit, 0.0) - p * (hit + of_entropy * (log_p + entropy))
    else:
        g = tl.where(is_target, hit, 0.0) - p * hit
    if CAPS:
        g *= slope(z, softcap)
    return g
