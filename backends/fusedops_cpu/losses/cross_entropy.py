"""cross_entropy in the compiled library (``src/elementwise/cross_entropy.cpp``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.ops.losses.arguments import CrossEntropyArgs, CrossEntropyGradArgs, check_targets
from fusedops_cpu._constraints import one_dtype
from fusedops_cpu.launch.calls import library_kernel, results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

#: As ``src/api.h`` has them; 3 is "mean" with a denominator.
_REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
_BY_DENOMINATOR = 3


@library_kernel(
    ops.cross_entropy,
    *one_dtype("logits"),
    source="fusedops_cpu/src/elementwise/cross_entropy.cpp",
    rows_independent=True,
)
def cross_entropy(a: CrossEntropyArgs, save: bool) -> LibraryCall | tuple[Tensor, Tensor | None, None]:
    """Compute the op; logits of any rank and strides. log_prob is not kept: lse serves.

    The library checks the targets too: a remembered call whose targets it refuses comes here, where the error is made.
    """
    check_targets("cross_entropy", a.target, a.ignore_index, a.logits.shape[-1])
    logits, place = _with_rows(a.logits)
    target = dense(a.target)
    loss = logits.new_empty(target.shape if a.reduction == "none" else (), dtype=torch.float32)
    lse = logits.new_empty(target.shape, dtype=torch.float32) if save else None
    settings = _settings(
        logits, place, a.ignore_index, a.label_smoothing, a.z_loss, a.softcap, a.reduction, a.denominator
    )
    call = LibraryCall(library().cross_entropy_forward, (logits, target, loss, lse, *settings), (loss, lse, None))
    return call if a.denominator is None else results_of(call)  # its value is a field


@library_kernel(
    ops.cross_entropy,
    *one_dtype("logits"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/cross_entropy.cpp",
    rows_independent=True,
)
def cross_entropy_backward(a: CrossEntropyGradArgs) -> LibraryCall | Tensor:
    """Compute the gradient of the logits from lse, contiguous."""
    dx = torch.empty_like(a.logits, memory_format=torch.contiguous_format)
    logits, place = _with_rows(a.logits)
    grad, lse, target = dense(a.grad.float()), dense(a.lse.float()), dense(a.target)
    settings = _settings(
        logits, place, a.ignore_index, a.label_smoothing, a.z_loss, a.softcap, a.reduction, a.denominator
    )
    call = LibraryCall(library().cross_entropy_backward, (grad, logits, lse, target, dx, *settings), dx)
    return call if a.denominator is None else results_of(call)


def _settings(
    logits: Tensor,
    place: tuple[int, int, int],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
) -> tuple[Any, ...]:
    """Return the fields of ``CrossEntropy`` in ``src/api.h``."""
    columns = logits.shape[-1]
    return (
        DTYPE_CODES[logits.dtype],
        logits.numel() // columns,
        columns,
        *place,
        ignore_index,
        _REDUCTIONS[reduction] if denominator is None else _BY_DENOMINATOR,
        label_smoothing,
        z_loss,
        softcap or 0.0,
        1.0 if denominator is None else denominator.item(),
    )


def _with_rows(logits: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return the logits, or a contiguous copy, and where its rows are.

    That is the number of rows after which a stride begins again, that stride, and the one from row to row, in
    elements. The logits of all positions but the last, a cut of (B, S, V), are read where they are.
    """
    columns = logits.shape[-1]
    if logits.is_contiguous() or logits.is_neg() or logits.dim() > 3 or logits.stride(-1) != 1:
        logits = dense(logits)
        return logits, (max(1, logits.numel() // columns), 0, columns)
    if logits.dim() == 2:
        return logits, (logits.shape[0], 0, logits.stride(0))
    return logits, (logits.shape[1], logits.stride(0), logits.stride(1))
