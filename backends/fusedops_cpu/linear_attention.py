"""linear_attention in the compiled library (``src/linear_attention.cpp``): forward. eager has the gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import Deviation, ops
from fusedops.ops.linear_attention.arguments import bounds_of
from fusedops.ops.linear_attention.formulas import scale_of
from fusedops_cpu._calls import LibraryCall, library_kernel, results_of
from fusedops_cpu._constraints import any_dtype, one_dtype
from fusedops_cpu._library import DTYPE_CODES, dense, library


@library_kernel(
    ops.linear_attention,
    *one_dtype("q", "k", "v"),
    *any_dtype("decay", "beta", "initial_state"),
    source="fusedops_cpu/src/linear_attention.cpp",
    deviations=(Deviation("no-backward", "the gradients are those of eager"),),
)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    normalize: bool,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> LibraryCall | tuple[Tensor, Tensor]:
    """Compute the op one position after another; q, k and v of one dtype, the others of any dtype of the library."""
    (batch, positions, heads, columns), (key_heads, rows) = v.shape, q.shape[2:]
    count, bounds = batch, None
    if cu_seqlens is not None:
        bounds = torch.tensor(bounds_of("linear_attention", cu_seqlens, positions), device="cpu")
        count = bounds.shape[0] - 1
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    state = torch.empty((count, heads, rows, columns), dtype=torch.float32, device="cpu")
    by_row = int(decay is not None and decay.dim() == 4)
    sizes = (batch, positions, key_heads, heads, rows, columns, count, by_row, int(normalize))
    given = (dense(q), dense(k), dense(v), _wide(decay), _wide(beta), _wide(initial_state), bounds, out, state)
    fields = (*given, DTYPE_CODES[q.dtype], *sizes, scale_of(q, scale))
    call = LibraryCall(library().linear_attention_forward, fields, (out, state))
    # the bounds of packed sequences are checked by the launcher: such a call is not remembered
    return call if bounds is None else results_of(call)


def _wide(tensor: Tensor | None) -> Tensor | None:
    """Return a contiguous tensor of float32."""
    return None if tensor is None else dense(tensor).float()
