"""varlen_attention by flash-attn's kernels for packed sequences, with their lse and their backward.

The limits and the corrections are those of ``attention.py``; these are for packed sequences:

- Queries that see no key, keys that no query sees, and rows of no sequence are sequences of their own here, without
  keys or without queries, for which both releases write 0. So each row of the results is written once, and no length
  is read on the host for it. In release 2 such a row has an lse of inf, as has a row with NaN, whose out is not 0.
- lse is (Nq, T) there. It is copied to the op's (T, Nq), and back for backward.
- Bounds of int64 are converted, and bounds that fall or pass the end are moved, on the device.

The kernels need the longest lengths on the host. T is always right, and their grid has a block for each 128 rows of the
longest length in each sequence and head: with B sequences B times as many blocks as have rows. So T is passed where the
grid is small (``MOST_BLOCKS``), or where a CUDA graph is captured; elsewhere the lengths are read. The device is waited
for once for each tensor of bounds in a block of ``fusedops.tensor_cache.reuse()``, else in each call.

Source: flash-attn 2.8.3, ``csrc/flash_attn/flash_api.cpp``, ``src/flash_fwd_kernel.h``, ``src/flash_bwd_kernel.h``;
flash-attn 3.0, ``hopper/flash_api.cpp``, ``hopper/flash_bwd_launch_template.h``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fusedops import Deviation, kernel, ops
from fusedops.constraints import Capability, Dim, DType, Finite, Present, SameDims, Scalar, When
from fusedops.ops.attention.arguments import (
    Lengths,
    VarlenAttentionArgs,
    VarlenAttentionGradArgs,
    lengths_of,
    lse_of_flash,
)
from fusedops.ops.attention.formulas import scale_of
from fusedops_flash_attn import _package
from fusedops_flash_attn._package import Band

_LIMITS = (
    DType("q", torch.float16, torch.bfloat16),
    SameDims("v", "q", (2,)),
    Dim("q", (2,), at_least=8, at_most=256, multiple_of=8),
    Dim("q", (1,), at_most=65535),  # a dim of CUDA's grid, as the sequences: two parts of each, and four outside
    Dim("cu_seqlens_q", (0,), at_most=32_766),
    When(
        Scalar("causal", one_of=("upper_left",)),
        Present("cu_seqlens_k", False, fix="leave the upper left to another backend"),
    ),
    Finite("scale", 1e-30, optional=True),  # see attention.py
    Capability("q", (8, 0)),
)
_DEVIATIONS = (
    Deviation(
        "nonfinite-under-mask",
        "NaN or inf at a key that causal or a window hides from some queries may reach the rows of those that are "
        "computed in one block with a query that sees it; in release 3 also the rows of the sequence before it",
    ),
    Deviation(
        "nonfinite-scores",
        "lse is NaN wherever a score is NaN or inf; a row whose scores are all -inf is 0, and its lse -inf",
    ),
)
_ROWS = "flash-attn cuts the keys into parts by the number of queries and of heads"


@kernel(
    ops.varlen_attention,
    *_LIMITS,
    source="flash_attn._flash_attn_varlen_forward",
    deviations=_DEVIATIONS,
    rows_independent=_ROWS,
)
def varlen_attention(a: VarlenAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op for one head size, with the diagonal at the lower right of each sequence."""
    if _is_empty(a.q, a.k, a.cu_seqlens_q):
        return a.q.new_zeros(a.q.shape), a.q.new_full(a.q.shape[:2], -math.inf, dtype=torch.float32)
    call = _call(a.q, a.k, a.cu_seqlens_q, a.cu_seqlens_k, a.scale, a.causal, a.window)
    out, lse = _package.packed_forward(_aligned(a.q), _aligned(a.k), _aligned(a.v), *call)
    return out.contiguous(), lse_of_flash(out, lse)


@kernel(
    ops.varlen_attention,
    *_LIMITS,
    Scalar("return_lse", one_of=(False,)),  # the kernels have no gradient of lse
    direction="backward",
    source="flash_attn._flash_attn_varlen_backward",
    deviations=_DEVIATIONS[:1],
    rows_independent=_ROWS,
)
def varlen_attention_backward(a: VarlenAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, where lse has none."""
    empty = _is_empty(a.q, a.k, a.cu_seqlens_q)
    make = torch.zeros_like if empty else torch.empty_like
    dq, dk, dv = (make(each, memory_format=torch.contiguous_format) for each in (a.q, a.k, a.v))
    if not empty:
        given = _aligned(a.q), _aligned(a.k), _aligned(a.v)
        call = _call(a.q, a.k, a.cu_seqlens_q, a.cu_seqlens_k, a.scale, a.causal, a.window)
        rows = a.lse.transpose(0, 1).contiguous()
        _package.packed_backward(_aligned(a.grad_out), given, _aligned(a.out), rows, (dq, dk, dv), *call)
    return tuple(gradient if need else None for gradient, need in zip((dq, dk, dv), a.needs))


class _Call(NamedTuple):
    """The arguments of the package beside the tensors of rows."""

    lengths: Lengths
    band: Band


def _is_empty(q: Tensor, k: Tensor, cu_seqlens_q: Tensor) -> bool:
    return not (q.numel() and k.numel()) or cu_seqlens_q.shape[0] < 2


def _call(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
) -> _Call:
    lengths = lengths_of(q, k, cu_seqlens_q, cu_seqlens_k, causal, window)
    return _Call(lengths, Band(float(scale_of(q, scale)), causal != "none", lengths.left, lengths.right))


def _aligned(tensor: Tensor) -> Tensor:
    """Return (T, N, D) with rows that are aligned to 16 bytes."""
    tensor = tensor.resolve_neg()
    aligned = tensor.stride(2) == 1 and all(stride and stride % 8 == 0 for stride in tensor.stride()[:2])
    return tensor if aligned and not tensor.data_ptr() % 16 else tensor.clone(memory_format=torch.contiguous_format)
