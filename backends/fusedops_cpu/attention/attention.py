"""attention in the compiled library: of few queries (``src/dot/attention.cpp``), and in tiles of queries and keys.

Both have their own order of sums, so the bits of a row differ between them. A policy that asks for rows that do not
depend on others gets that of few queries with any sizes: its bits follow from the query and the keys that it sees
alone. Those of a gradient of q do so too: it has one function.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import masks, ops
from fusedops.constraints import Dim, DType, When
from fusedops.ops.attention.arguments import AttentionArgs, AttentionGradArgs
from fusedops_cpu.launch.calls import library_kernel
from fusedops_cpu.launch.library import DTYPE_CODES, dense, library
from fusedops_cpu.launch.struct_call import LibraryCall, LibraryFunction

_DTYPES = DType("q", torch.float32, torch.bfloat16, torch.float16)
# Rows that share keys, and keys, from which on tiles are faster: below, packing them takes longer than the products.
_TILES, _TILES_OF_PAIRS = (12, 24), (4, 16)
# with fewer keys, torch's products may take 0.8 of the time
_FOR_SPEED = When(
    DType("q", torch.float32, torch.float16), When(Dim("q", (2,), at_least=25), Dim("k", (2,), at_least=24))
)
_SOURCE = "fusedops_cpu/src/dot/attention"
_Window = tuple[int, int] | None
_Results = LibraryCall | tuple[Tensor, Tensor]


def attention_of_few(a: AttentionArgs) -> _Results:
    """Compute the op; keys and values of any strides are read once for all query heads that share them."""
    return _forward(library().attention_forward, a.q, a.k, a.v, a.mask, a.scale, a.causal, a.window)


@library_kernel(
    ops.attention,
    _DTYPES,
    source=f"{_SOURCE}.cpp, attention_forward.cpp",
    rows_independent=True,
    for_speed=(_FOR_SPEED,),
    for_rows=attention_of_few,
)
def attention(a: AttentionArgs) -> _Results:
    """Compute the op in tiles, or by the function of few queries where these are few."""
    function = library().attention_forward if _is_few(a.q, a.k) else library().attention_tiles
    return _forward(function, a.q, a.k, a.v, a.mask, a.scale, a.causal, a.window)


def _is_few(q: Tensor, k: Tensor) -> bool:
    """Return True where the function of few queries is faster."""
    of_pairs = q.dtype is torch.bfloat16 and library().multiplies_bfloat16
    rows, keys = _TILES_OF_PAIRS if of_pairs else _TILES
    return q.shape[2] * q.shape[1] < rows * k.shape[1] or k.shape[2] < keys


def _forward(
    function: LibraryFunction,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: str,
    window: _Window,
) -> _Results:
    q, k, v = rows_of(q), rows_of(k), rows_of(v)
    out = empty_of(q, v.shape[3])
    lse = q.new_empty(*q.shape[:3], dtype=torch.float32)  # of a torch.Size it takes 1 us longer
    if not v.shape[2]:
        return out.zero_(), lse.fill_(-torch.inf)
    if not lse.numel():
        return out, lse
    sizes = sizes_of(q, k, v, mask, out, scale, causal, window)
    return LibraryCall(function, (q, k, v, mask, out, lse, *sizes), (out, lse))


def attention_of_few_backward(a: AttentionGradArgs) -> LibraryCall | tuple[Tensor | None, ...]:
    """Compute the gradients from an lse of the function of few queries."""
    tensors = (a.grad_out, a.grad_lse if a.return_lse else None, a.q, a.k, a.v, a.mask, a.out, a.lse)
    return _backward(*tensors, a.scale, a.causal, a.window, a.needs, of_few=True)


@library_kernel(
    ops.attention,
    _DTYPES,
    direction="backward",
    source=f"{_SOURCE}_backward.cpp",
    rows_independent=True,
    for_rows=attention_of_few_backward,
)
def attention_backward(a: AttentionGradArgs) -> LibraryCall | tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v from the scores, which are computed again."""
    tensors = (a.grad_out, a.grad_lse if a.return_lse else None, a.q, a.k, a.v, a.mask, a.out, a.lse)
    return _backward(*tensors, a.scale, a.causal, a.window, a.needs, of_few=_is_few(a.q, a.k))


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: str,
    window: _Window,
    needs: tuple[bool, ...],
    of_few: bool,
) -> LibraryCall | tuple[Tensor | None, ...]:
    q, k, v, grad_out = rows_of(q), rows_of(k), rows_of(v), rows_of(grad_out)
    gradients = [torch.empty_like(tensor) if need else None for tensor, need in zip((q, k, v), needs)]
    if not (lse.numel() and v.shape[2]):
        return tuple(gradient if gradient is None else gradient.zero_() for gradient in gradients)
    sizes = sizes_of(q, k, v, mask, grad_out, scale, causal, window)
    strides = [(0, 0, 0) if gradient is None else gradient.stride()[:3] for gradient in gradients]
    out, of_lse = rows_of(out), None if grad_lse is None else dense(grad_lse)
    tensors = (q, k, v, mask, grad_out, out, of_lse, dense(lse), *gradients)
    # 16 bits round more than lse does, up to 1e3
    of_few &= q.dtype is torch.float32
    fields = (*tensors, *sizes, *strides[0], *strides[1], *strides[2], *out.stride()[:3], of_few)
    return LibraryCall(library().attention_backward, fields, tuple(gradients))


def sizes_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    scale: float | None,
    causal: str,
    window: _Window,
) -> tuple[int | float, ...]:
    """Return the fields of AttentionSizes."""
    batch, heads, queries, size = q.shape
    _, key_heads, keys, value_size = v.shape
    mask_strides = (0, 0, 0, 0) if mask is None else mask.expand(batch, heads, queries, keys).stride()
    low, high = masks.band(queries, keys, causal, window)
    return (
        *(DTYPE_CODES[q.dtype], batch, heads, key_heads, queries, keys, size, value_size),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *mask_strides),
        *(-queries if low is None else low, keys if high is None else high),
        max(size, 1) ** -0.5 if scale is None else scale,
    )


def empty_of(q: Tensor, size: int) -> Tensor:
    """Return an empty out, its dims in memory in the order of q's where it is not wider."""
    if size == q.shape[3]:
        return torch.empty_like(q)
    return torch.empty_like(q[..., :size]) if size < q.shape[3] else q.new_empty((*q.shape[:3], size))


def rows_of(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dim is contiguous, and whose memory holds its values."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()
