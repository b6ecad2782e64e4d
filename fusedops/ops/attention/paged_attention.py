"""Attention of packed sequences to keys in pages, which may be codes of 8 bits (Kwon et al. 2023, arXiv:2309.06180)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops._contract.constraint import is_tensor
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops._dispatch.call import call
from fusedops.constraints import (
    Between,
    Broadcasts,
    Classes,
    Dim,
    DimMultiple,
    DType,
    Finite,
    Flag,
    Floating,
    Lengths,
    Offsets,
    OneOf,
    Present,
    Rank,
    SameDevice,
    SameDims,
    SameDType,
    SameSize,
    When,
    Window,
)
from fusedops.dtypes import CODES, STORAGE, compute_dtype, no_autocast
from fusedops.errors import InvalidInputError
from fusedops.ops.attention import arguments, varlen_attention
from fusedops.ops.attention.arguments import PagedAttentionArgs

_FLOATING = tuple(STORAGE)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Compute :func:`fusedops.varlen_attention` of sequences whose keys and values are in pages of a cache.

    Sequence n has the queries from ``cu_seqlens_q[n]`` up to ``cu_seqlens_q[n + 1]``, and the first ``seqused_k[n]``
    keys of the pages ``block_table[n]``, in their order. No other key, page or entry of the table is read. There are no
    gradients.

    Args:
        q: (T, Nq, D), float16, bfloat16, float32 or float64.
        k: (pages, size, Nk, D), the dtype of ``q``, int8 or float8_e4m3fn. Nq is a multiple of Nk: consecutive query
            heads share a key head.
        v: (pages, size, Nk, Dv), the dtype of ``k``.
        cu_seqlens_q: (B + 1,), int32 or int64, as in :func:`fusedops.varlen_attention`.
        block_table: (B, M), int32 or int64, the pages of each sequence. One outside of the cache, of a key that is
            used, is an InvalidInputError on a CPU, and counts as the nearest page on another device.
        seqused_k: (B,), int32 or int64, from 0 to M * size. Beyond, as of ``block_table``.
        k_scale: what the numbers of an int8 or float8_e4m3fn ``k`` are multiplied by, floating: (Nk,), (pages, Nk), or
            (pages, size, Nk) for each token. Required with these dtypes alone. It is rounded to float32.
        v_scale: the same for ``v``.
        scale: a number, finite in float32; None is ``1 / sqrt(D)``.
        causal: "upper_left" or "lower_right", for the queries and keys of each sequence, or False.
        window: ``(left, right)``, as in :func:`fusedops.attention`, for each sequence. None: no window.
        return_lse: also return the logarithm of the sum of exponentials of each row's scores.
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Returns:
        out (T, Nq, Dv), contiguous, the dtype of ``q``; with ``return_lse`` the pair (out, lse), lse (T, Nq),
        contiguous, float32 (float64 for float64). A query of a sequence without keys, or of no sequence, is 0, and its
        lse -inf. The same as on the keys and values in the order of the sequences, multiplied by their scales.

    Raises:
        InvalidInputError: an argument is not as above, or requires a gradient.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: vLLM, ``flash_attn_varlen_func``; torch, ``torch.nn.attention.varlen.varlen_attn``.

    >>> import torch, fusedops
    >>> q, pages = torch.zeros(1, 1, 4), torch.arange(4.0).view(4, 1, 1, 1)  # one key a page
    >>> table, used = torch.tensor([[3, 1, 0]]), torch.tensor([2])
    >>> fusedops.paged_attention(q, pages.expand(4, 1, 1, 4), pages, torch.tensor([0, 1]), table, used)
    tensor([[[2.]]])
    """
    args = (q, k, v, cu_seqlens_q, block_table, seqused_k, k_scale, v_scale, scale, causal, window, return_lse)
    prepared = prepare_args(args)
    has_gradient = torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in prepared[:8])
    if has_gradient and OP.invalid(prepared) is None:
        raise InvalidInputError(
            "paged_attention: got a tensor that requires a gradient, expected none, as keys in pages have no "
            "gradients; to fix: call it under torch.no_grad(), or fusedops.varlen_attention on the keys themselves"
        )
    return arguments.wanted(call(OP, prepared, backend), return_lse)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with scales of 4 dims, (pages or 1, size or 1, Nk, 1), and ``causal`` as a text."""
    changed = (*args[:6], *map(_of_pages, args[6:8]), args[8], "none" if args[9] is False else args[9], *args[10:])
    return args if all(before is after for before, after in zip(args, changed)) else changed


def _of_pages(scale: Any) -> Any:
    if not is_tensor(scale) or scale.is_nested or scale.layout is not torch.strided or not 1 <= scale.dim() <= 3:
        return scale
    sizes = scale.shape
    shape = {1: (1, 1, *sizes, 1), 2: (*sizes[:1], 1, *sizes[1:], 1), 3: (*sizes, 1)}[scale.dim()]
    return scale.replace(shape=shape) if isinstance(scale, TensorSpec) else scale.reshape(shape)


def dense(a: PagedAttentionArgs) -> arguments.VarlenAttentionArgs:
    """Return the call of varlen_attention on the keys and values in the order of the sequences.

    Codes are multiplied by their scales, and q is as wide.
    """
    pages = arguments.pages_of(a.block_table, a.seqused_k, *a.k.shape[:2])
    options = (a.scale, a.causal, a.window, a.return_lse)
    k, v = (_gathered(each, scale, pages.tokens, a.q) for each, scale in ((a.k, a.k_scale), (a.v, a.v_scale)))
    return arguments.VarlenAttentionArgs(a.q.to(k.dtype), k, v, a.cu_seqlens_q, pages.bounds, *options)


def _gathered(cache: Tensor, scale: Tensor | None, index: Tensor, q: Tensor) -> Tensor:
    """Return the keys or values of some tokens of a cache: (Tk, Nk, D)."""
    tokens = cache.flatten(0, 1)[index]
    if scale is None:
        return tokens
    wide = compute_dtype(q.dtype)
    scales = scale.expand(*cache.shape[:3], 1).flatten(0, 1)[index]
    return tokens.to(wide) * scales.float().to(wide)


def reference(a: PagedAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    with no_autocast(a.q.device.type):
        out, lse = varlen_attention.reference(dense(a))
    return out.to(a.q.dtype), lse


def empty(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    return q.new_empty((*q.shape[:2], v.shape[3])), q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype))


_ARE_CODES, _ARE_FLOATING = DType("k", *CODES), DType("k", *_FLOATING)
OP = Op(
    paged_attention,
    constraints=[
        Floating("q"),
        Floating("k", or_codes=True),
        Floating("v", or_codes=True),
        Rank("q", 3),
        Rank("k", 4),
        Rank("v", 4),
        SameDevice("k", "q"),
        SameDevice("v", "q"),
        When(_ARE_FLOATING, SameDType("k", "q")),
        SameDType("v", "k"),
        SameSize("k", 3, "q", 2),
        SameDims("v", "k", (0, 1, 2)),
        DimMultiple("q", "k", 1, other_dim=2),
        Offsets("cu_seqlens_q", bounds=True),
        SameDevice("cu_seqlens_q", "q"),
        Rank("cu_seqlens_q", 1),
        Dim("cu_seqlens_q", (0,), at_least=1),
        Classes("block_table", "k", 0, integers=True),
        SameDevice("block_table", "q"),
        Rank("block_table", 2),
        SameSize("block_table", 0, "cu_seqlens_q", 0, less=1),
        Lengths("seqused_k", ("block_table", 1), ("k", 1)),
        SameDevice("seqused_k", "q"),
        Rank("seqused_k", 1),
        SameSize("seqused_k", 0, "block_table", 0),
        *(
            constraint
            for name, of in (("k_scale", "k"), ("v_scale", "v"))
            for constraint in (
                Between(name, 0.002, 0.02),
                SameDevice(name, "q"),
                Rank(name, 4),
                Broadcasts(name, of),
                Dim(name, (-1,), at_most=1),
                When(_ARE_CODES, Present(name)),
                When(_ARE_FLOATING, Present(name, False)),
            )
        ),
        Finite("scale", optional=True),
        OneOf("causal", "none", "upper_left", "lower_right"),
        Window("window"),
        Flag("return_lse"),
    ],
    reference=reference,
    outputs=("out", "lse"),
    empty=empty,
    prepare_args=prepare_args,
    sharding="fusedops.ops.attention.sharding:PAGED",
    evidence="fusedops.ops.attention.evidence:PAGED",
)
