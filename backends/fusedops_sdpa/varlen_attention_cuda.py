"""varlen_attention on an NVIDIA GPU by the FlashAttention 2 in torch, which needs no package.

Its limits are those of ``flash`` in ``attention_cuda.py``, with windows, and the diagonal at the lower right of each
sequence. What ``torch.nn.attention.varlen.varlen_attn`` does by a custom op is called below it. Corrections:

- Queries that see no key, keys that no query sees, and rows of no sequence are sequences of their own here, without
  keys or without queries, for which 0 is written. Their lse is inf, as that of a row with NaN, whose out is not 0.
- lse is (Nq, T) there. It is copied to the op's (T, Nq), and back for backward.
- The longest lengths may be read, for which the GPU is waited for: see ``most_of``.

Source: torch 2.10 to 2.13, ``torch/nn/attention/varlen.py``; ``aten/src/ATen/native/transformers/cuda/``:
``attention.cu``, ``attention_backward.cu``, ``flash_attn/flash_api.cpp``. No GPU has run this file.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops import Deviation, kernel, ops
from fusedops.constraints import Capability, Dim, DType, Finite, Present, SameDims, Scalar, When
from fusedops.ops.attention.arguments import VarlenAttentionArgs, VarlenAttentionGradArgs, lengths_of, lse_of_flash
from fusedops.ops.attention.formulas import scale_of
from fusedops_sdpa import _torch
from fusedops_sdpa._corrections import zero_gradients

_FLASH = _torch.flash_of_sequences
_FLASH_BACKWARD = _torch.flash_of_sequences_backward
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
    Finite("scale", 1e-30, optional=True),  # masked scores are -inf before they are scaled
    Capability("q", (8, 0)),
)
_DEVIATIONS = (
    Deviation(
        "nonfinite-under-mask",
        "NaN or inf at a key that causal or a window hides from some queries may reach the rows of those that are "
        "computed in one block with a query that sees it",
    ),
    Deviation(
        "nonfinite-scores",
        "lse is NaN wherever a score is NaN or inf; a row whose scores are all -inf is 0, and its lse -inf",
    ),
)
_ROWS = "torch selects a kernel of attention by the sizes of the call"


@kernel(
    ops.varlen_attention,
    *_LIMITS,
    source="aten::_flash_attention_forward",
    deviations=_DEVIATIONS,
    device_types=("cuda",),
    rows_independent=_ROWS,
)
def varlen_attention(a: VarlenAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op for one head size, with the diagonal at the lower right of each sequence."""
    if _is_empty(a.q, a.k, a.cu_seqlens_q):
        return a.q.new_zeros(a.q.shape), a.q.new_full(a.q.shape[:2], -math.inf, dtype=torch.float32)
    call = _Call.of(a.q, a.k, a.cu_seqlens_q, a.cu_seqlens_k, a.scale, a.causal, a.window)
    out, lse = _FLASH(
        _aligned(a.q), _aligned(a.k), _aligned(a.v), *call.lengths, 0.0, call.causal, False, **call.options
    )[:2]
    return out.contiguous(), lse_of_flash(out, lse)


@kernel(
    ops.varlen_attention,
    *_LIMITS,
    Scalar("return_lse", one_of=(False,)),  # the kernel has no gradient of lse
    direction="backward",
    source="aten::_flash_attention_backward",
    deviations=_DEVIATIONS[:1],
    device_types=("cuda",),
    rows_independent=_ROWS,
)
def varlen_attention_backward(a: VarlenAttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, where lse has none."""
    if _is_empty(a.q, a.k, a.cu_seqlens_q):
        return zero_gradients((a.q, a.k, a.v), a.needs)
    call = _Call.of(a.q, a.k, a.cu_seqlens_q, a.cu_seqlens_k, a.scale, a.causal, a.window)
    tensors = (_aligned(each) for each in (a.grad_out, a.q, a.k, a.v, a.out))
    seed, offset = a.q.new_empty(2, dtype=torch.uint64), a.q.new_empty((), dtype=torch.uint64)  # of a dropout of 0
    rows = a.lse.transpose(0, 1).contiguous()
    results = _FLASH_BACKWARD(*tensors, rows, *call.lengths, 0.0, call.causal, seed, offset, **call.options)
    return tuple(each.contiguous() if need else None for each, need in zip(results, a.needs))


def _is_empty(q: Tensor, k: Tensor, cu_seqlens_q: Tensor) -> bool:
    return not (q.numel() and k.numel()) or cu_seqlens_q.shape[0] < 2


class _Call(NamedTuple):
    """The arguments of torch's functions beside the tensors of rows.

    Attributes:
        lengths: the bounds of queries and of keys, int32, and numbers that no length of each passes.
        causal: True for no key after the diagonal.
        options: the scale and the window.
    """

    lengths: tuple[Tensor, Tensor, int, int]
    causal: bool
    options: dict[str, Any]

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None,
        scale: float | None,
        causal: str,
        window: tuple[int, int] | None,
    ) -> _Call:
        given = lengths_of(q, k, cu_seqlens_q, cu_seqlens_k, causal, window)
        options = {"window_size_left": given.left, "window_size_right": given.right}
        return _Call(given[:4], causal != "none", {"scale": float(scale_of(q, scale)), **options})


def _aligned(tensor: Tensor) -> Tensor:
    """Return (T, N, D) with rows that are aligned to 16 bytes."""
    tensor = tensor.resolve_neg()
    aligned = tensor.stride(2) == 1 and all(stride % 8 == 0 for stride in tensor.stride()[:2])
    return tensor if aligned and not tensor.data_ptr() % 16 else tensor.clone(memory_format=torch.contiguous_format)
