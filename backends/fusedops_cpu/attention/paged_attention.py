"""paged_attention in the compiled library (``src/dot/attention_paged.cpp``): pages are read where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import DType
from fusedops.ops.attention.arguments import PagedAttentionArgs, check_lengths, sequences_of
from fusedops_cpu.launch.calls import results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.replay import LibraryReplay, record
from fusedops_cpu.launch.struct_call import LibraryCall

CACHE_CODES = {**DTYPE_CODES, torch.int8: 3, torch.float8_e4m3fn: 4}
_CAUSAL = {"none": 0, "upper_left": 1, "lower_right": 2}


def _again(function: Callable[..., Any], *args: Any) -> tuple[Any, LibraryReplay | None]:
    return record(_call, PagedAttentionArgs(*args))


@kernel(
    ops.paged_attention,
    DType("q", *DTYPE_CODES),
    source="fusedops_cpu/src/dot/attention_paged.cpp",
    rows_independent=True,
    record=_again,
)
def paged_attention(a: PagedAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op for any number of tokens and keys; those of a page are read once for the heads that share them."""
    results: tuple[Tensor, Tensor] = results_of(_call(a))
    return results


def _call(a: PagedAttentionArgs) -> LibraryCall | tuple[Tensor, Tensor]:
    q, k, v = contiguous_last(a.q), contiguous_last(a.k), contiguous_last(a.v)
    tokens, heads, size = q.shape
    pages, page, key_heads, value_size = v.shape
    out = q.new_zeros(tokens, heads, value_size)
    lse = q.new_full((tokens, heads), -torch.inf, dtype=torch.float32)
    sequences_of(a.cu_seqlens_q, None, tokens, tokens)  # the bounds are checked
    check_lengths(a.seqused_k, a.block_table.shape[1] * page)
    if not lse.numel() or not k.shape[0] * page:
        return out, lse
    integers = [dense(each.long()) for each in (a.cu_seqlens_q, a.seqused_k, a.block_table)]
    scales = [
        None if each is None else each.resolve_neg().float().expand(pages, page, key_heads, 1)
        for each in (a.k_scale, a.v_scale)
    ]
    left, right = (-1, -1) if a.window is None else a.window
    fields = (
        *(q, k, v, *integers, *scales, out, lse),
        *(DTYPE_CODES[q.dtype], CACHE_CODES[k.dtype], a.seqused_k.shape[0], a.block_table.shape[1], pages, page, heads),
        *(key_heads, size, value_size, *q.stride()[:2], *k.stride()[:3], *v.stride()[:3]),
        *(stride for each in scales for stride in ((0, 0, 0) if each is None else each.stride()[:3])),
        *(_CAUSAL[a.causal], left, right, max(size, 1) ** -0.5 if a.scale is None else a.scale),
    )
    return LibraryCall(library().paged_attention, fields, (out, lse))


def contiguous_last(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where the elements of its last dim do not lie one after another."""
    tensor = tensor.resolve_neg()
    return tensor if tensor.shape[-1] < 2 or tensor.stride(-1) == 1 else tensor.contiguous()
