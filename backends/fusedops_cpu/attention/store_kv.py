"""store_kv in the compiled library (``src/elementwise/store_kv.cpp``): one pass over the new keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import DType
from fusedops.ops.attention.arguments import StoreKvArgs, check_written
from fusedops.ops.attention.store_kv import results_of as written_of
from fusedops.ops.attention.store_kv import written
from fusedops_cpu.attention.paged_attention import CACHE_CODES, contiguous_last
from fusedops_cpu.launch.calls import results_of
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.replay import LibraryReplay, record
from fusedops_cpu.launch.struct_call import LibraryCall


def _again(function: Callable[..., Any], *args: Any) -> tuple[Any, LibraryReplay | None]:
    return record(_call, StoreKvArgs(*args))


@kernel(
    ops.store_kv,
    DType("k", *DTYPE_CODES),
    source="fusedops_cpu/src/elementwise/store_kv.cpp, torch.index_put_",
    rows_independent=True,
    record=_again,
)
def store_kv(a: StoreKvArgs) -> tuple[Tensor, ...]:
    """Compute the op, by torch's functions where the numbers of a head do not lie one after another in a cache."""
    results: tuple[Tensor, ...] = results_of(_call(a))
    return results


def _call(a: StoreKvArgs) -> LibraryCall | tuple[Tensor, ...]:
    caches = (a.k_cache, a.v_cache)
    if any(each.shape[-1] > 1 and each.stride(-1) != 1 for each in caches):
        return written(a)
    if any(each is not None and each.is_neg() for each in (*caches, a.k_scale, a.v_scale)):
        return written(a)
    check_written(a)
    k, v = contiguous_last(a.k), contiguous_last(a.v)
    tokens, heads, size = k.shape
    pages, page = a.k_cache.shape[:2]
    scales = (a.k_scale, a.v_scale)
    fields = (
        *(k, v, dense(a.slots), *caches, *scales),
        *(DTYPE_CODES[k.dtype], CACHE_CODES[a.k_cache.dtype], tokens, pages, page, heads, size, v.shape[2]),
        *(int(each is not None and each.dim() == 3) for each in scales),
        *(*k.stride()[:2], *v.stride()[:2], *a.k_cache.stride()[:3], *a.v_cache.stride()[:3]),
        *(stride for each in scales for stride in _strides(each)),
    )
    return LibraryCall(library().store_kv, fields, written_of(a))


def _strides(scale: Tensor | None) -> tuple[int, ...]:
    """Return the strides of pages, tokens and heads."""
    if scale is None:
        return (0, 0, 0)
    strides = scale.stride()
    return {1: (0, 0, *strides), 2: (strides[0], 0, strides[-1]), 3: strides}[len(strides)]
