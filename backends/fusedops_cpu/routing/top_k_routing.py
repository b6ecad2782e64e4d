"""top_k_routing in the compiled library (``src/elementwise/routing.cpp``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.ops.routing.arguments import TopKRoutingArgs, TopKRoutingGradArgs
from fusedops.ops.routing.formulas import SCORES
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall


@library_kernel(
    ops.top_k_routing,
    *any_dtype("logits", "bias"),
    source="fusedops_cpu/src/elementwise/routing.cpp",
    rows_independent=True,
)
def top_k_routing(a: TopKRoutingArgs) -> LibraryCall:
    """Choose experts and compute their weights; logits of any rank and strides."""
    shape = (*a.logits.shape[:-1], a.k)
    weights = a.logits.new_empty(shape, dtype=torch.float32)
    chosen = a.logits.new_empty(shape, dtype=torch.int64)
    settings = _settings(
        a.logits, a.k, a.score, a.normalize, a.eps, a.scale, a.bias, (a.groups, a.top_groups, a.group_score), a.index
    )
    bias, index = (None if each is None else dense(each) for each in (a.bias, a.index))
    fields = (dense(a.logits), bias, index, weights, chosen, *settings)
    return LibraryCall(library().routing_forward, fields, (weights, chosen))


@library_kernel(
    ops.top_k_routing,
    *any_dtype("logits"),
    direction="backward",
    source="fusedops_cpu/src/elementwise/routing.cpp",
    rows_independent=True,
)
def top_k_routing_backward(a: TopKRoutingGradArgs) -> LibraryCall:
    """Compute the gradient of the logits, contiguous."""
    dx = torch.empty_like(a.logits, memory_format=torch.contiguous_format)
    settings = _settings(a.logits, a.k, a.score, a.normalize, a.eps, a.scale)
    fields = (dense(a.grad_weights.float()), dense(a.logits), dense(a.chosen), dx, *settings)
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
