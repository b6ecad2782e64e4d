"""varlen_attention on Ascend: torch_npu's fused attention and its gradient, in the layout TND of packed sequences.

The limits and the corrections of ``attention.py``, and

- The vendor takes the ends of the sequences as lists on the host, without the 0 before them. The device is waited for:
  once for each tensor of bounds in a block of ``fusedops.tensor_cache.reuse()``, else in each call.
- Its page excludes fully masked rows here. Queries that see no key, keys that no query sees, rows of no sequence, and
  sequences without the one or the other are left out: the rest is copied together where there are any.
- By default the max and the sum of rows have their heads first. With ``softmax_layout="TND"``, of CANN 8.3.RC1, tokens
  are first.

Source: torch_npu.npu_fusion_attention and npu_fusion_attention_grad; op-plugin, ``FlashAttentionKernelNpuOpApi.cpp``
and the page ``torch_npu-npu_fusion_attention.md``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import Dim, DType, NotLarger, Present, Scalar, When
from fusedops.ops.attention.arguments import VarlenAttentionArgs, VarlenAttentionGradArgs, parts_of
from fusedops.ops.attention.formulas import scale_of
from fusedops.tensor_cache import cached_for
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.attention._attention_masks import TRIANGLE, VendorMask, packed_mask
from fusedops_npu.attention._attention_sizes import COPIES, as_wide, cropped

_LIMITS = (
    DType("q", torch.float16, torch.bfloat16, torch.float32),
    Dim("q", (2,), at_most=768),
    NotLarger("v", "k", 2, "split v into parts that are no wider than k, and concatenate the results"),
    Dim("q", (1,), at_most=256),
    Dim("q", (0,), at_most=1_000_000),
    Dim("k", (0,), at_most=1_000_000),
    Dim("cu_seqlens_q", (0,), at_most=1025),
    When(
        Scalar("causal", one_of=("upper_left",)),
        Present("cu_seqlens_k", False, fix="leave the upper left to another backend"),
    ),
)
_DEVIATION = Deviation(
    "nonfinite-under-mask",
    "a masked weight of 0 is multiplied: inf or NaN at a masked key makes rows of its head and sequence NaN, and their "
    "gradients",
)


def _triangle_cost(q: Any, k: Any, v: Any, of_q: Any, of_k: Any, scale: Any, causal: str, window: Any, *_: Any) -> Any:
    return None if causal == "none" and window is None else TRIANGLE * TRIANGLE


def _padded_cost(times: int, q: Any, k: Any, v: Any, *_: Any) -> int | None:
    """Return the bytes of v and out in the width of k, ``times`` each; None where v has that."""
    rows = math.prod(q.shape[:2]) + math.prod(k.shape[:2])
    return None if v.shape[2] == k.shape[2] else times * rows * k.shape[2] * q.dtype.itemsize


def _statistics_cost(grad_out: Any, grad_lse: Any, q: Any, *_: Any) -> int:
    return 2 * 4 * COPIES * math.prod(q.shape[:2])


def _adaptations(direction: str) -> tuple[Adaptation, ...]:
    """Return the adaptations for the arguments of a direction."""

    def of_direction(cost: Callable[..., int | None]) -> Callable[..., int | None]:
        return cost if direction == "forward" else lambda *args: cost(*args[2:7], *args[9:])

    return (
        Adaptation(
            "triangle",
            "the vendor's mask for an alignment or a window, bool (2048, 2048), is made once per device",
            of_direction(_triangle_cost),
        ),
        Adaptation(
            "head-size",
            "v is padded to the head size of k, and the result is cropped; backward, so are the tensors of out",
            of_direction(lambda *args: _padded_cost(1 if direction == "forward" else 2, *args)),
        ),
    )


_STATISTICS = Adaptation("statistics", "lse is repeated to the vendor's (T, Nq, 8), beside ones", _statistics_cost)


@kernel(
    ops.varlen_attention,
    *_LIMITS,
    source="torch_npu.npu_fusion_attention",
    deviations=(_DEVIATION,),
    adapts=_adaptations("forward"),
    rows_independent=NOT_PROMISED,
)
def varlen_attention(a: VarlenAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op for any window, with the diagonal at the lower right of each sequence."""
    if not (a.q.numel() and a.k.numel()):  # the vendor documents sizes from 1
        args = (a.q, a.k, a.v, a.cu_seqlens_q, a.cu_seqlens_k, a.scale, a.causal, a.window, a.return_lse)
        out, lse = ops.OPS["varlen_attention"].reference(*args)
        return out.contiguous(), lse.contiguous()
    packed = _packed(a.q, a.k, a.cu_seqlens_q, a.cu_seqlens_k, a.causal, a.window)
    if packed is None:
        return a.q.new_zeros((*a.q.shape[:2], a.v.shape[2])), a.q.new_full(
            a.q.shape[:2], -math.inf, dtype=torch.float32
        )
    rows, keys = packed.rows, packed.keys
    tensors = _taken(a.q, rows), _taken(a.k, keys), _taken(as_wide(a.v, a.k), keys)
    out, top, total = _vendor_forward(*tensors, a.q.shape[1], scale_of(a.q, a.scale), *packed.ends, *packed.mask[:4])
    out, lse = cropped(out, a.v), (top[..., 0] + total[..., 0].log()).contiguous()
    return _placed(out, rows, a.q.shape[0], 0.0), _placed(lse, rows, a.q.shape[0], -math.inf)


@kernel(
    ops.varlen_attention,
    *_LIMITS,
    Scalar("return_lse", one_of=(False,)),  # the vendor has no gradient of lse
    direction="backward",
    source="torch_npu.npu_fusion_attention_grad",
    adapts=(*_adaptations("backward"), _STATISTICS),
    rows_independent=NOT_PROMISED,
)
def varlen_attention_backward(a: VarlenAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, where lse has none."""
    has_elements = a.q.numel() and a.k.numel()
    packed = _packed(a.q, a.k, a.cu_seqlens_q, a.cu_seqlens_k, a.causal, a.window) if has_elements else None
    if packed is None:
        results = tuple(torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (a.q, a.k, a.v))
    else:
        rows, keys = packed.rows, packed.keys
        tensors = _taken(a.q, rows), _taken(a.k, keys), _taken(as_wide(a.v, a.k), keys)
        grad, result = (_taken(as_wide(each, a.k), rows) for each in (a.grad_out, a.out))
        options = scale_of(a.q, a.scale), *packed.ends, *packed.mask[:4]
        dq, dk, dv = _vendor_backward(*tensors, grad, result, _taken(a.lse, rows), a.q.shape[1], *options)
        places = (rows, a.q), (keys, a.k), (keys, a.k)
        of = dq.contiguous(), dk.contiguous(), cropped(dv, a.v)
        results = tuple(_placed(each, where, whole.shape[0], 0.0) for each, (where, whole) in zip(of, places))
    return tuple(gradient if need else None for gradient, need in zip(results, a.needs))


class _Packed(NamedTuple):
    """The vendor's arguments for packed sequences.

    Attributes:
        rows: the queries that are passed, int64 on their device; None for all.
        keys: the same of the keys.
        ends: the ends of the sequences in these, of queries and of keys.
        mask: the mask, and how it is meant.
    """

    rows: Tensor | None
    keys: Tensor | None
    ends: tuple[list[int], list[int]]
    mask: VendorMask


def _packed(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    causal: str,
    window: tuple[int, int] | None,
) -> _Packed | None:
    """Return the vendor's arguments; None where no query sees a key."""
    of_q = torch.tensor(_on_host(cu_seqlens_q), device="cpu")
    of_k = None if cu_seqlens_k is None else torch.tensor(_on_host(cu_seqlens_k), device="cpu")
    parts: tuple[Tensor, Tensor] = parts_of(of_q, of_k, q.shape[0], k.shape[0], causal, window)
    lengths = [bounds.diff() for bounds in parts]
    used = (lengths[0] > 0) & (lengths[1] > 0)
    if not used.any():
        return None
    ends, rows = [], []
    for own, whole in zip(lengths, (q, k)):
        ends.append([int(end) for end in cast("Any", own[used].cumsum(0)).tolist()])
        index = used.repeat_interleave(own).nonzero()[:, 0]
        rows.append(None if len(index) == whole.shape[0] else index.to(whole.device))
    return _Packed(rows[0], rows[1], (ends[0], ends[1]), packed_mask(q.device, causal, window))


def _on_host(cu_seqlens: Tensor) -> list[int]:
    def values() -> list[int]:
        return cast("Any", cu_seqlens).tolist()

    return cached_for(cu_seqlens, "on the host", values)


def _taken(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor.index_select(0, rows)


def _placed(tensor: Tensor, rows: Tensor | None, count: int, other: float) -> Tensor:
    """Return ``count`` rows, those of the tensor at ``rows`` and others."""
    return tensor if rows is None else tensor.new_full((count, *tensor.shape[1:]), other).index_copy_(0, rows, tensor)


def _vendor_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    scale: float,
    ends_q: list[int],
    ends_k: list[int],
    mask: Tensor | None,
    mode: int,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, and the max and the sum of each row, (T, Nq, 8)."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    results: tuple[Any, ...] = vendor.npu_fusion_attention(
        q,
        k,
        v,
        heads,
        "TND",
        atten_mask=mask,
        scale=scale,
        pre_tockens=before,
        next_tockens=after,
        actual_seq_qlen=ends_q,
        actual_seq_kvlen=ends_k,
        sparse_mode=mode,
        softmax_layout="TND",
    )
    return results[0], results[1], results[2]


def _vendor_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    heads: int,
    scale: float,
    ends_q: list[int],
    ends_k: list[int],
    mask: Tensor | None,
    mode: int,
    before: int,
    after: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. Some releases return one tensor more after these than others."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    top = lse.unsqueeze(-1).expand(*lse.shape, COPIES).contiguous()
    total = torch.ones_like(top)
    results: tuple[Tensor, ...] = vendor.npu_fusion_attention_grad(
        q,
        k,
        v,
        grad_out,
        heads,
        "TND",
        atten_mask=mask,
        softmax_max=top,
        softmax_sum=total,
        attention_in=out,
        scale_value=scale,
        pre_tockens=before,
        next_tockens=after,
        actual_seq_qlen=ends_q,
        actual_seq_kvlen=ends_k,
        sparse_mode=mode,
        softmax_layout="TND",
    )
    return results[0], results[1], results[2]
