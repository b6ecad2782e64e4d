"""linear_log_probs: products on chunks of rows, and between them ``src/dot/linear_loss.cpp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.losses.arguments import LinearLogProbsArgs, LinearLogProbsGradArgs, check_targets
from fusedops.ops.losses.formulas import Gradients, Wanted
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu.launch.calls import results_of
from fusedops_cpu.launch.library import dense, library
from fusedops_cpu.launch.struct_call import LibraryCall, LibraryFunction
from fusedops_cpu.losses._linear_logits import Rows, through_chunks

_LIMITS = (*one_dtype("x", "weight"), *any_dtype("bias"))
_SOURCE = "fusedops_cpu/src/dot/linear_loss.cpp, fusedops_cpu/src/dot/linear_product.cpp"


@kernel(ops.linear_log_probs, *_LIMITS, source=_SOURCE, rows_independent=True)
def linear_log_probs(a: LinearLogProbsArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the log probabilities and the entropy in chunks of rows."""
    check_targets("linear_log_probs", a.target, a.ignore_index, a.weight.shape[0])
    logp, entropy, lse = (a.x.new_zeros(a.target.shape, dtype=torch.float32) for _ in range(3))
    outputs = (logp, entropy if a.return_entropy else None, lse)

    def between(logits: tuple[Any, ...], at: slice | Tensor) -> None:
        views = [None if each is None else each.view(-1)[at] for each in outputs]
        _call(library().linear_log_probs, (*logits, *views, a.temperature))
        if not isinstance(at, slice):  # the views are copies
            for each, view in zip(outputs, views):
                if each is not None and view is not None:
                    each.view(-1)[at] = view

    _through_chunks(a.x, a.weight, a.target, a.bias, a.softcap, a.ignore_index, Wanted(False, False, False), between)
    return logp, entropy, lse if save else None


@kernel(ops.linear_log_probs, *_LIMITS, direction="backward", source=_SOURCE, rows_independent=True)
def linear_log_probs_backward(a: LinearLogProbsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the chunks again, and the gradients of x, weight and bias."""
    gradients = (a.grad_logp, a.grad_entropy if a.return_entropy else None)
    inputs = [None if each is None else dense(each.float()).view(-1) for each in gradients]

    def between(logits: tuple[Any, ...], at: slice | Tensor) -> None:
        views = [None if each is None else each[at] for each in inputs]
        _call(library().linear_log_probs_backward, (*logits, *views, a.temperature))

    wanted = Wanted(a.needs[0], a.needs[1], a.needs[2] and a.bias is not None)
    dx, dweight, dbias = _through_chunks(a.x, a.weight, a.target, a.bias, a.softcap, a.ignore_index, wanted, between)
    return (
        None if dx is None else dx.view(a.x.shape),
        None if dweight is None else dweight.to(a.weight.dtype),
        None if dbias is None or a.bias is None else dbias.to(a.bias.dtype),
    )


def _call(function: LibraryFunction, fields: tuple[Any, ...]) -> None:
    results_of(LibraryCall(function, fields, ()))


def _through_chunks(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    ignore_index: int,
    wanted: Wanted,
    between: Any,
) -> Gradients:
    """Call ``between`` with the fields of ``LogitRows`` in ``src/api.h``, and the rows, for each chunk."""
    wide_bias = None if bias is None else dense(bias.float())

    def of_rows(rows: Rows) -> None:
        between(rows.fields(wide_bias, softcap), rows.at)

    flat = dense(target).view(-1)
    x_rows = x.reshape(flat.numel(), x.shape[-1])
    return through_chunks(x_rows, weight, flat, ignore_index, None, wanted, of_rows)
