"""linear_cross_entropy on Triton: the kernels with their constraints. ``_linear_cross_entropy.py`` launches."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses import formulas
from fusedops.ops.losses.formulas import LossOptions
from fusedops_triton._constraints import PRODUCTS, row_length, supported

_SOURCE = "torch.mm, fusedops_triton/_linear_cross_entropy.py"
_CLASSES = row_length("weight", 0)


@kernel(
    ops.linear_cross_entropy,
    *supported("x", "weight"),
    _CLASSES,
    source=_SOURCE,
    rows_independent=PRODUCTS,
)
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
    """Compute the loss in chunks of rows, and the gradients of its sum over the rows that are wanted.

    Those of weight and bias are empty for reduction="none", where each row has its own incoming gradient. An argument
    that does not require a gradient has None; if none does, as in a compiled graph, all are computed.
    """
    from fusedops_triton._linear_cross_entropy import row_losses  # imports triton, so not at module level

    asks = [tensor is not None and tensor.requires_grad for tensor in (x, weight, bias)]
    if not any(asks):
        asks = [True] * 3
    summed = reduction != "none"
    exists = (True, summed, summed and bias is not None)
    wanted = (save and asks[0], save and asks[1] and exists[1], save and asks[2] and exists[2])
    flat = target.reshape(-1)
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    losses, dx, dweight, dbias = row_losses(
        x.reshape(flat.numel(), x.shape[-1]), weight, flat, bias, options, chunk, wanted
    )
    if save and not exists[1] and asks[1]:
        dweight = losses.new_empty(0)
    if save and not exists[2] and (asks[2] or bias is None):
        dbias = losses.new_empty(0)
    gradients = (None if dx is None else dx.view(x.shape), dweight, dbias)
    return formulas.reduced(losses.view(target.shape), target, options), *gradients


@kernel(
    ops.linear_cross_entropy,
    *supported("x", "weight"),
    _CLASSES,
    direction="backward",
    source=_SOURCE,
    rows_independent=PRODUCTS,
)
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
    """Multiply the gradients of forward by the incoming one; compute again what forward could not."""
    from fusedops_triton._linear_cross_entropy import row_losses
    from fusedops_triton._scaled import scaled

    flat, given = target.reshape(-1), (x, weight, bias)
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    factor = grad.reshape(-1) if reduction == "none" else grad
    if reduction == "mean":
        factor = factor / formulas.divisor(flat, options, grad.dtype)
    scale = factor.expand(flat.shape).masked_fill(flat == ignore_index, 0)
    results: list[Tensor | None] = [None, None, None]
    if needs[0] and x_grad is not None:
        by_row = scale.view(target.shape)[..., None]
        results[0] = torch.mul(x_grad, by_row, out=torch.empty_like(x_grad, dtype=x.dtype))
    for at, value in ((1, weight_grad), (2, bias_grad)) if reduction != "none" else ():
        like = given[at]
        if needs[at] and value is not None and like is not None:
            results[at] = scaled(value, factor, like.dtype, reuse)
    lacks = [need and like is not None and r is None for need, like, r in zip(needs, given, results)]
    if any(lacks):
        rows = x.reshape(flat.numel(), x.shape[-1])
        again = row_losses(rows, weight, flat, bias, options, chunk, (lacks[0], lacks[1], lacks[2]), scale)
        for at, (like, gradient) in enumerate(zip(given, again[1:])):
            if gradient is not None and like is not None:
                results[at] = gradient.view(like.shape).to(like.dtype)
    return tuple(results)
