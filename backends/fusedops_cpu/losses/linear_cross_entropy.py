"""linear_cross_entropy: products on chunks of rows, and between them ``src/dot/linear_loss.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import LinearCrossEntropyArgs, LinearCrossEntropyGradArgs, check_targets
from fusedops.ops.losses.formulas import LossOptions, Results, Wanted, loss_and_gradients, scaled_gradients
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu.launch.calls import results_of
from fusedops_cpu.launch.library import dense, library
from fusedops_cpu.launch.struct_call import LibraryCall
from fusedops_cpu.losses._linear_logits import Rows, through_chunks

_LIMITS = (*one_dtype("x", "weight"), *any_dtype("bias"))
_SOURCE = "fusedops_cpu/src/dot/linear_loss.cpp, fusedops_cpu/src/dot/linear_product.cpp"


@kernel(ops.linear_cross_entropy, *_LIMITS, source=_SOURCE, rows_independent=True)
def linear_cross_entropy(
    a: LinearCrossEntropyArgs, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the loss in chunks of rows, and the gradients of its sum over the rows."""
    check_targets("linear_cross_entropy", a.target, a.ignore_index, a.weight.shape[0])
    return loss_and_gradients(_row_losses, a, save)


@kernel(ops.linear_cross_entropy, *_LIMITS, direction="backward", source=_SOURCE, rows_independent=True)
def linear_cross_entropy_backward(a: LinearCrossEntropyGradArgs) -> tuple[Tensor | None, ...]:
    """Multiply the gradients of forward by the incoming one; compute again those that forward could not."""
    return scaled_gradients(_row_losses, a)


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
    """Compute the loss of each row, and the gradients of the sum of ``scale * loss``.

    Args:
        x: (N, H).
        weight: (V, H).
        target: (N,).
        bias: (V,) or None.
        options: of the loss.
        chunk: the rows of a chunk, or None.
        wanted: the gradients to compute.
        scale: (N,), float32, or None for 1.
    """
    losses = x.new_zeros(target.numel(), dtype=torch.float32)
    wide_bias = None if bias is None else dense(bias.float())
    numbers = (any(wanted), options.label_smoothing, options.z_loss)

    def between(rows: Rows) -> None:
        found = losses[rows.at] if isinstance(rows.at, slice) else losses.new_empty(rows.target.shape)
        weights = None if scale is None else dense(scale[rows.at])
        fields = (*rows.fields(wide_bias, options.softcap), weights, found, *numbers)
        results_of(LibraryCall(library().linear_loss, fields, found))
        if not isinstance(rows.at, slice):
            losses[rows.at] = found

    return Results(losses, *through_chunks(x, weight, dense(target), options.ignore_index, chunk, wanted, between))
