"""linear_cross_entropy in plain torch: the rows in chunks, each of whose logits become their own gradient in place.

On a CPU the arithmetic is in float32 (float64 for float64), weights of 16 bits are widened in blocks of rows, and rows
whose target is ignored are left out of the matmuls. Elsewhere the matmuls run in the promoted dtype of x and weight,
and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, no_autocast, promoted
from fusedops.ops.losses import formulas
from fusedops.ops.losses.formulas import LossOptions
from fusedops_eager._slabs import SLAB

# Rows of a chunk, at least. Each chunk reads and writes the whole gradient of the weight, and a matmul of few rows
# reads the whole weight for little work: of 1024 rows of 576 and 49,152 classes, chunks of 171 rows took as long as of
# 256, and of 128 rows 4 % longer (Intel Xeon, one thread).
LEAST_ROWS = 192
_WIDENED = 1024 * 1024  # elements of a block of a 16-bit weight in float32


class Wanted(NamedTuple):
    """The gradients to compute."""

    x: bool
    weight: bool
    bias: bool


class Results(NamedTuple):
    """The results of all rows; None for one that is not wanted.

    Attributes:
        losses: (N,), 0 for an ignored row.
        x: (N, H), the dtype of x: the gradient of the weighted sum of the losses.
        weight: (V, H), the dtype of the arithmetic, as is ``bias`` (V,).
    """

    losses: Tensor
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def rows_of_chunk(n_rows: int, size: int, classes: int, chunk: int | None) -> int:
    """Return the rows of a chunk: those whose logits take about the size of x, and at least LEAST_ROWS.

    Args:
        n_rows: rows of x.
        size: columns of x.
        classes: columns of the logits.
        chunk: the rows that the caller asks for, or None.
    """
    rows = chunk or max(LEAST_ROWS, n_rows * size // max(classes, 1))
    if chunk is None and rows < n_rows:
        rows = ceil(n_rows / ceil(n_rows / rows))  # the same number of chunks, as equal as possible
    return max(1, min(rows, n_rows))


def loss_and_gradients(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    chunk: int | None,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the loss and, where ``save``, the gradients of the sum of the losses that are wanted.

    Those of weight and bias are empty for reduction="none", where each row has its own incoming gradient. An argument
    that does not require a gradient has None; if none does, as in a compiled graph, all are computed.
    """
    given = (x, weight, bias)
    asks = [tensor is not None and tensor.requires_grad for tensor in given]
    if not any(asks):
        asks = [True] * 3
    exists = (True, options.reduction != "none", options.reduction != "none" and bias is not None)
    wanted = Wanted(*(save and ask and has for ask, has in zip(asks, exists)))
    flat = target.reshape(-1)
    results = row_losses(x.reshape(flat.numel(), x.shape[-1]), weight, flat, bias, options, chunk, wanted)
    losses = results.losses
    loss = formulas.reduced(losses.view(target.shape), target, options)
    dx, dweight, dbias = results[1:]
    if save and not exists[1] and asks[1]:
        dweight = losses.new_empty(0)
    if save and not exists[2] and (asks[2] or bias is None):
        dbias = losses.new_empty(0)
    return loss, None if dx is None else dx.view(x.shape), dweight, dbias


def scaled_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    saved: tuple[Tensor | None, ...],
    options: LossOptions,
    chunk: int | None,
    needs: tuple[bool, ...],
    reuse: bool,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias from those of the sum of the losses, ``saved``.

    What is not saved is computed by the chunks again. With ``reuse``, ``saved`` may be changed: a second tensor of the
    size of weight would be most of the memory that the op takes.
    """
    given, flat, total = (x, weight, bias), target.reshape(-1), options.reduction != "none"
    grad = grad.reshape(-1) if not total else grad
    factor = grad / formulas.divisor(flat, options, grad.dtype) if options.reduction == "mean" else grad
    scale = factor.expand(flat.shape).masked_fill(flat == options.ignore_index, 0)
    results: list[Tensor | None] = [None, None, None]
    if needs[0] and saved[0] is not None:
        rows = scale.view(target.shape)[..., None]
        results[0] = (saved[0].mul_(rows) if reuse and rows.dtype is x.dtype else saved[0] * rows).to(x.dtype)
    for at in (1, 2) if total else ():
        value, like = saved[at], given[at]
        if needs[at] and value is not None and like is not None:
            product = value.mul_(factor) if reuse else value * factor
            results[at] = product.to(like.dtype)
    lacking = Wanted(*(need and like is not None and r is None for need, like, r in zip(needs, given, results)))
    if any(lacking):
        again = row_losses(x.reshape(flat.numel(), x.shape[-1]), weight, flat, bias, options, chunk, lacking, scale)
        for at, (like, gradient) in enumerate(zip(given, again[1:])):
            if gradient is not None and like is not None:
                results[at] = gradient.view(like.shape).to(like.dtype)
    return tuple(results)


def row_losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    chunk: int | None,
    wanted: Wanted,
    scale: Tensor | None = None,
) -> Results:
    """Compute the loss of each row, and the gradients of the sum of ``scale * loss``.

    Args:
        x: (N, H).
        weight: (V, H).
        target: (N,), int64.
        bias: (V,) or None.
        options: of the loss.
        chunk: the rows of a chunk, or None.
        wanted: the gradients to compute.
        scale: (N,), the weight of each row in the sum, or None for 1.
    """
    with no_autocast(x.device.type):
        return _row_losses(x, weight, target, bias, options, chunk, wanted, scale)


def _row_losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    chunk: int | None,
    wanted: Wanted,
    scale: Tensor | None,
) -> Results:
    """Compute :func:`row_losses`."""
    classes, size = weight.shape
    common = promoted(x, weight)
    wide = compute_dtype(common)
    bias = None if bias is None else bias.to(wide)
    on_cpu = x.device.type == "cpu"
    kept = (target != options.ignore_index).nonzero().view(-1) if on_cpu else None
    n_rows = x.shape[0] if kept is None else kept.numel()
    every_row = n_rows == x.shape[0]
    losses = x.new_zeros(x.shape[0], dtype=wide)
    dx = (x.new_empty if every_row else x.new_zeros)(x.shape) if wanted.x else None
    dweight = x.new_zeros(weight.shape, dtype=wide) if wanted.weight else None
    dbias = x.new_zeros(classes, dtype=wide) if wanted.bias else None
    product = _Product(weight, wide if on_cpu else common)
    rows = rows_of_chunk(n_rows, size, classes, chunk)
    memory = x.new_empty((rows, classes), dtype=wide)
    starts = range(0, n_rows, rows)
    for start in starts[:1] if x.is_meta else starts:  # no data: the sizes are those of one chunk
        at: slice | Tensor = slice(start, min(start + rows, n_rows))
        if kept is not None and not every_row:
            at = kept[at]
        x_rows, targets = x[at], target[at]
        weights = None if scale is None else scale[at].to(wide)
        if not on_cpu:
            x_rows = x_rows.masked_fill((targets == options.ignore_index)[:, None], 0)
        x_rows = x_rows.to(product.dtype)
        logits = memory[: x_rows.shape[0]]
        product.logits(x_rows, bias, logits)
        losses[at] = _softmax_gradient(logits, targets, options, weights, any(wanted))
        if not any(wanted):
            continue
        gradient = logits.to(product.dtype)
        if dx is not None:
            dx[at] = product.rows(gradient, x.dtype)
        if dweight is not None:
            product.accumulate(gradient, x_rows, dweight)
        if dbias is not None:
            dbias += logits.sum(0)
    return Results(losses, dx, dweight, dbias)


class _Product:
    """The three matmuls with a weight (V, H).

    Args:
        weight: any floating dtype.
        dtype: of the matmuls.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.dtype, self._weight = dtype, weight

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks of rows of the weight in the dtype of the matmuls."""
        classes, size = self._weight.shape
        step = classes if self._weight.dtype is self.dtype else max(64, _WIDENED // max(size, 1))
        for start in range(0, classes, max(step, 1)):
            at = slice(start, min(start + step, classes))
            yield at, self._weight[at].to(self.dtype)

    def logits(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Write ``x @ weight.T + bias`` into ``out``."""
        for at, block in self._blocks():
            if out.dtype is not self.dtype:
                out[:, at] = torch.mm(x, block.t())
                if bias is not None:
                    out[:, at] += bias[at]
            elif bias is None:
                torch.mm(x, block.t(), out=out[:, at])
            else:
                torch.addmm(bias[at], x, block.t(), out=out[:, at])

    def rows(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``gradient @ weight``."""
        total: Tensor | None = None
        for at, block in self._blocks():
            total = torch.mm(gradient[:, at], block) if total is None else total.addmm_(gradient[:, at], block)
        return gradient.new_zeros((gradient.shape[0], self._weight.shape[1])) if total is None else total.to(dtype)

    def accumulate(self, gradient: Tensor, x: Tensor, out: Tensor) -> None:
        """Add ``gradient.T @ x`` to ``out``."""
        if out.dtype is self.dtype:
            out.addmm_(gradient.t(), x)
        else:
            out += torch.mm(gradient.t(), x)


def _softmax_gradient(
    logits: Tensor, target: Tensor, options: LossOptions, scale: Tensor | None, gradient: bool
) -> Tensor:
    """Return the loss of each row, and turn the logits into the gradient of ``scale * loss`` in place.

    Args:
        logits: (N, V), contiguous; not written to any purpose without ``gradient``.
        target: (N,).
        options: of the loss.
        scale: (N,) or None.
        gradient: True where the gradient is wanted.
    """
    n_rows, classes = logits.shape
    step = n_rows
    if logits.device.type == "cpu":
        step = max(1, SLAB * torch.get_num_threads() // max(classes, 1))
    losses = logits.new_empty(n_rows)
    for start in range(0, n_rows, max(step, 1)):
        at = slice(start, start + step)
        weights = None if scale is None else scale[at]
        losses[at] = _rows_in_place(logits[at], target[at], options, weights, gradient)
    return losses


def _rows_in_place(z: Tensor, target: Tensor, options: LossOptions, scale: Tensor | None, gradient: bool) -> Tensor:
    """Compute what :func:`_softmax_gradient` computes, for rows that fit the cache."""
    classes, (_, smoothing, z_loss, softcap, *_) = z.shape[1], options
    on_cpu = z.device.type == "cpu"
    if classes == 0:
        nothing = torch.full_like(target, float("nan"), dtype=z.dtype)
        return nothing if on_cpu else nothing.masked_fill(target == options.ignore_index, 0)
    outside = None if on_cpu else (target < 0) | (target >= classes)
    place = (target if outside is None else target.masked_fill(outside, 0))[:, None]
    slope: Tensor | None = None
    if softcap is not None:
        z.div_(softcap).tanh_()
        if gradient:
            slope = z.square().neg_().add_(1)  # of c * tanh(x / c)
        z.mul_(softcap)
    # a row of -inf has no maximum to subtract; a row with inf has the loss that the formula gives: NaN
    largest = z.amax(1, keepdim=True)
    largest.masked_fill_(largest == -torch.inf, 0)
    z.sub_(largest)
    picked = z.gather(1, place)
    mean = z.mean(1, keepdim=True) if smoothing else None
    total = z.exp_().sum(1, keepdim=True)
    log_total = total.log()
    loss = log_total - picked * (1 - smoothing)
    if mean is not None:
        loss -= smoothing * mean
    lse = log_total + largest
    if z_loss:
        loss += (z_loss * lse).mul_(lse)  # the square alone may overflow
    if gradient:
        weights = torch.ones_like(total) if scale is None else scale[:, None]
        factor = weights * (1 + 2.0 * z_loss * lse) if z_loss else weights
        z.mul_(factor / total)
        if smoothing:
            z.sub_(weights * (smoothing / classes))
        z.scatter_add_(1, place, weights * (smoothing - 1))
        if slope is not None:
            z.mul_(slope)
    loss = loss.view(-1)
    if outside is not None:
        ignored = target == options.ignore_index
        loss = loss.masked_fill(outside, torch.nan).masked_fill_(ignored, 0)
        if gradient:
            z.masked_fill_(outside[:, None], torch.nan).masked_fill_(ignored[:, None], 0)
    return loss
