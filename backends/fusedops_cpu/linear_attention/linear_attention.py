"""linear_attention in the compiled library (``src/dot/linear_attention.cpp``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops import ops
from fusedops.ops.linear_attention.arguments import LinearAttentionArgs, LinearAttentionGradArgs, bounds_of
from fusedops.ops.linear_attention.formulas import scale_of
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu.launch.calls import library_kernel, results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall

_CONSTRAINTS = *one_dtype("q", "k", "v"), *any_dtype("decay", "beta", "initial_state")


@library_kernel(
    ops.linear_attention,
    *_CONSTRAINTS,
    source="fusedops_cpu/src/dot/linear_attention.cpp",
    rows_independent=True,
)
def linear_attention(a: LinearAttentionArgs) -> LibraryCall | tuple[Tensor, Tensor]:
    """Compute the op; q, k and v of one dtype, the others of any dtype of the library."""
    bounds = _bounds(a.cu_seqlens, a.q.shape[1])
    inputs = _inputs(a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, bounds)
    out = torch.empty_like(a.v, memory_format=torch.contiguous_format)
    count = a.v.shape[0] if bounds is None else bounds.shape[0] - 1
    shape = (count, a.v.shape[2], a.q.shape[3], a.v.shape[3])
    state = torch.empty(shape, dtype=torch.float32, device="cpu")
    call = LibraryCall(library().linear_attention_forward, (*inputs, out, state), (out, state))
    # the bounds of packed sequences are checked by the launcher: such a call is not remembered
    return call if bounds is None else results_of(call)


@library_kernel(
    ops.linear_attention,
    *_CONSTRAINTS,
    direction="backward",
    source="fusedops_cpu/src/dot/linear_attention_backward.cpp",
    rows_independent=True,
)
def linear_attention_backward(a: LinearAttentionGradArgs) -> LibraryCall | tuple[Tensor | None, ...]:
    """Compute the gradients in chunks, from the state before each of them."""
    bounds = _bounds(a.cu_seqlens, a.q.shape[1])
    inputs = _inputs(a.q, a.k, a.v, a.decay, a.beta, a.scale, a.normalize, a.initial_state, bounds)
    given = (a.q, a.k, a.v, a.decay, a.beta, a.initial_state)
    make: Any = torch.empty_like if bounds is None else torch.zeros_like  # positions of no sequence
    results = [
        None
        if each is None or not need
        else make(each, dtype=each.dtype if n < 3 else torch.float32, memory_format=torch.contiguous_format)
        for n, (each, need) in enumerate(zip(given, a.needs))
    ]
    of_state = dense(a.grad_state) if a.return_state else None
    call = LibraryCall(
        library().linear_attention_backward, (*inputs, dense(a.grad_out), of_state, *results), tuple(results)
    )
    if bounds is None and all(each is None or each.dtype == torch.float32 for each in given[3:]):
        return call
    return tuple(
        None if result is None or own is None else result.to(own.dtype) for own, result in zip(given, results_of(call))
    )


def _bounds(cu_seqlens: Tensor | None, positions: int) -> Tensor | None:
    """Return the checked bounds of packed sequences as int64."""
    if cu_seqlens is None:
        return None
    return torch.tensor(bounds_of("linear_attention", cu_seqlens, positions), device="cpu")


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: bool,
    initial_state: Tensor | None,
    bounds: Tensor | None,
) -> tuple[Any, ...]:
    """Return ``LinearAttention`` of ``src/api.h``."""
    (batch, positions, heads, columns), (key_heads, rows) = v.shape, q.shape[2:]
    count = batch if bounds is None else bounds.shape[0] - 1
    by_row = int(decay is not None and decay.dim() == 4)
    sizes = (batch, positions, key_heads, heads, rows, columns, count, by_row, int(normalize))
    tensors = (dense(q), dense(k), dense(v), _wide(decay), _wide(beta), _wide(initial_state), bounds)
    return (*tensors, DTYPE_CODES[q.dtype], *sizes, scale_of(q, scale))


def _wide(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor of float32."""
    return None if tensor is None else dense(tensor).float()
