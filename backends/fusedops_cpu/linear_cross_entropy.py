"""linear_cross_entropy: products on chunks of rows, and between them ``src/linear_loss.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses import formulas
from fusedops.ops.losses.arguments import check_targets
from fusedops.ops.losses.formulas import Gradients, LossOptions, Wanted
from fusedops_cpu._calls import LibraryCall, results_of
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu._library import DTYPE_CODES, dense, library
from fusedops_cpu._linear_logits import CHUNKS, Rows, through_chunks

_LIMITS = (*one_dtype("x", "weight"), *any_dtype("bias"))
_SOURCE = "fusedops_cpu/src/linear_loss.cpp, fusedops_cpu/src/linear_product.cpp, torch.mm"


@kernel(ops.linear_cross_entropy, *_LIMITS, source=_SOURCE, rows_independent=CHUNKS)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    chunk: int | None,
    save: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the loss in chunks of rows, and the gradients of its sum over the rows.

    Those of weight and bias are empty for "none", where each row has its own incoming gradient. An argument that does
    not require a gradient has None; if none does, as in a compiled graph, all are computed.
    """
    check_targets("linear_cross_entropy", target, ignore_index, weight.shape[0])
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    asks = [tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]
    asks = asks if any(asks) else [True] * 3
    summed = reduction != "none"
    wanted = Wanted(save and asks[0], save and asks[1] and summed, save and asks[2] and summed and bias is not None)
    losses = x.new_zeros(target.numel(), dtype=torch.float32)
    dx, dweight, dbias = _row_losses(x, weight, target, bias, options, chunk, wanted, losses, None)
    if save and not summed and asks[1]:
        dweight = losses.new_empty(0)
    if save and (bias is None or (not summed and asks[2])):
        dbias = losses.new_empty(0)
    return formulas.reduced(losses.view(target.shape), target, options), dx, dweight, dbias


@kernel(ops.linear_cross_entropy, *_LIMITS, direction="backward", source=_SOURCE, rows_independent=CHUNKS)
def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    x_grad: Tensor | None,
    weight_grad: Tensor | None,
    bias_grad: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    chunk: int | None,
    reuse: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Multiply the gradients of forward by the incoming one; compute again those that forward could not."""
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    factor = grad.float()
    if reduction == "mean":
        factor = factor / formulas.divisor(target, options, torch.float32)
    scale = factor.expand(target.shape).masked_fill(target == ignore_index, 0)
    results: list[Tensor | None] = [None] * 3
    if needs[0] and x_grad is not None:
        results[0] = _scaled(x_grad, scale[..., None], x.dtype, reuse)
    if reduction != "none":
        for at, saved, like in ((1, weight_grad, weight), (2, bias_grad, bias)):
            if needs[at] and saved is not None and like is not None:
                results[at] = _scaled(saved, factor, like.dtype, reuse)
    given = (x, weight, bias)
    lacking = Wanted(*(need and like is not None and r is None for need, like, r in zip(needs, given, results)))
    if any(lacking):
        losses = x.new_empty(target.numel(), dtype=torch.float32)
        again = _row_losses(x, weight, target, bias, options, chunk, lacking, losses, scale.reshape(-1))
        for at, (like, gradient) in enumerate(zip(given, again)):
            if gradient is not None and like is not None:
                results[at] = gradient.to(like.dtype)
    return tuple(results)


def _scaled(saved: Tensor, factor: Tensor, dtype: torch.dtype, reuse: bool) -> Tensor:
    """Return ``saved * factor`` in a dtype, in the memory of ``saved`` where it may be reused."""
    if reuse and saved.dtype is factor.dtype:
        return saved.mul_(factor).to(dtype)
    return (saved * factor).to(dtype)


def _row_losses(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    options: LossOptions,
    chunk: int | None,
    wanted: Wanted,
    losses: Tensor,
    scale: Tensor | None,
) -> Gradients:
    """Write the losses of the rows that are not ignored, and return the gradients of the sum of ``scale * loss``.

    Args:
        x: (..., H); its gradient has that shape.
        weight: (V, H).
        target: (...).
        bias: (V,) or None.
        options: of the loss.
        chunk: the rows of a chunk, or None.
        wanted: the gradients to compute.
        losses: (N,), float32; those of ignored rows are not written.
        scale: (N,), float32, or None for 1.
    """
    wide_bias = None if bias is None else dense(bias.float())
    numbers = (any(wanted), options.label_smoothing, options.z_loss)

    def between(rows: Rows) -> None:
        found = losses[rows.at] if isinstance(rows.at, slice) else losses.new_empty(rows.target.shape)
        weights = None if scale is None else dense(scale[rows.at])
        logits = rows.logits
        settings = (DTYPE_CODES[logits.dtype], *logits.shape, options.softcap or 0.0)
        fields = (logits, wide_bias, rows.target, *settings, weights, found, *numbers)
        results_of(LibraryCall(library().linear_loss, fields, found))
        if not isinstance(rows.at, slice):
            losses[rows.at] = found

    flat = dense(target).view(-1)
    rows = x.reshape(flat.numel(), x.shape[-1])
    dx, *others = through_chunks(rows, weight, flat, options.ignore_index, chunk, wanted, between)
    return Gradients(None if dx is None else dx.view(x.shape), *others)
