"""top_k_routing in the compiled library (``src/elementwise/routing.cpp``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.ops.routing.formulas import SCORES
from fusedops_cpu._calls import library_kernel
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu._library import DTYPE_CODES, dense, library
from fusedops_cpu._struct_call import LibraryCall


@library_kernel(
    ops.top_k_routing,
    *any_dtype("logits", "bias"),
    source="fusedops_cpu/src/elementwise/routing.cpp",
    rows_independent=True,
)
def top_k_routing(
    logits: Tensor,
    k: int,
    score: str,
    bias: Tensor | None,
    groups: int,
    top_groups: int,
    group_score: str,
    normalize: bool,
    eps: float,
    scale: float,
    index: Tensor | None,
) -> LibraryCall:
    """Choose experts and compute their weights; logits of any rank and strides."""
    shape = (*logits.shape[:-1], k)
    weights = logits.new_empty(shape, dtype=torch.float32)
    chosen = logits.new_empty(shape, dtype=torch.int64)
    settings = _settings(logits, k, score, normalize, eps, scale, bias, (groups, top_groups, group_score), index)
    bias, index = (None if each is None else dense(each) for each in (bias, index))
    fields = (dense(logits), bias, index, weights, chosen, *settings)
    return LibraryCall(library().routing_forward, fields, (weights, chosen))


@library_kernel(
    ops.top_k_routing,
    *any_dtype("logits"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/routing.cpp",
    rows_independent=True,
)
def top_k_routing_backward(
    grad_weights: Tensor, logits: Tensor, chosen: Tensor, k: int, score: str, normalize: bool, eps: float, scale: float
) -> LibraryCall:
    """Compute the gradient of the logits, contiguous."""
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    settings = _settings(logits, k, score, normalize, eps, scale)
    fields = (dense(grad_weights.float()), dense(logits), dense(chosen), dx, *settings)
    return LibraryCall(library().routing_backward, fields, dx)


def _settings(
    logits: Tensor,
    k: int,
    score: str,
    normalize: bool,
    eps: float,
    scale: float,
    bias: Tensor | None = None,
    groups: tuple[int, int, str] = (1, 1, "max"),
    index: Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the fields of ``Routing`` in ``src/api.h``."""
    columns = logits.shape[-1]
    return (
        DTYPE_CODES[logits.dtype],
        0 if bias is None else DTYPE_CODES[bias.dtype],
        logits.numel() // columns,
        columns,
        k,
        SCORES.index(score),
        groups[0],
        groups[1],
        int(groups[2] == "top2"),
        int(normalize),
        int(index is not None and index.dtype is torch.int64),
        eps,
        scale,
    )
