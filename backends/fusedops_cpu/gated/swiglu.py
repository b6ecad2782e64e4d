"""swiglu in the compiled library: its constraints; the launchers are in ``_gated.py``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops_cpu._constraints import one_dtype
from fusedops_cpu.gated._gated import SWISH, gated_backward, gated_forward
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.struct_call import LibraryCall


def _extra_error(gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, *_: object) -> list[float]:
    """Return inf where the factor of the powers of 2, alpha / ln 2, has no float32; else 0."""
    return [math.inf if abs(alpha) / math.log(2) > torch.finfo(torch.float32).max else 0.0]


def _extra_errors(grad: Tensor, *args: Any) -> list[float]:
    return 2 * _extra_error(*args)


@library_kernel(
    ops.swiglu,
    *one_dtype("gate", "up"),
    source="fusedops_cpu/src/elementwise/gated.cpp",
    rows_independent=True,
    extra_error=_extra_error,
)
def swiglu(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> LibraryCall:
    """Compute the op for two tensors of one dtype and for packed ones, of any shape and strides."""
    return gated_forward(gate, up, interleaved, SWISH, math.nan if limit is None else limit, alpha, offset)


@library_kernel(
    ops.swiglu,
    *one_dtype("gate", "up"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/gated.cpp",
    rows_independent=True,
    extra_error=_extra_errors,
)
def swiglu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> LibraryCall:
    """Compute the gradients of gate and up in one pass."""
    limit = math.nan if limit is None else limit
    return gated_backward(grad, gate, up, interleaved, SWISH, limit, alpha, offset, needs)
