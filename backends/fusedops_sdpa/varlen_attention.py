"""varlen_attention on a CPU: attention's kernel on each sequence, by views, without padding and without copies.

So a sequence has the same bits beside others as alone; the corrections are those of ``attention.py``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim, Finite, OneOf, Present, SameDims, Scalar, When
from fusedops.dtypes import compute_dtype
from fusedops.ops.attention.arguments import sequences_of
from fusedops.ops.attention.formulas import heads_first
from fusedops_sdpa import attention

_SOURCE = "aten::_scaled_dot_product_flash_attention_for_cpu"
_LIMITS = (
    SameDims("v", "q", (2,)),
    Dim("q", (2,), at_least=1),
    Present("window", False),
    OneOf("causal", "none", "upper_left"),
    When(Scalar("causal", one_of=("upper_left",)), Finite("scale", 1e-30, optional=True)),  # see attention.py
)


@kernel(ops.varlen_attention, *_LIMITS, source=_SOURCE, device_types=("cpu",))
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the op where the head sizes are one, and the diagonal is at the upper left of each sequence."""
    out, lse = q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=compute_dtype(q.dtype))
    end = 0
    for each in sequences_of(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
        rows, keys = each
        _without_keys(out[end : rows.start], lse[end : rows.start])
        tensors = heads_first(q[rows]), heads_first(k[keys]), heads_first(v[keys])
        results = attention.attention.function(*tensors, None, scale, causal, None, True)
        out[rows], lse[rows] = results[0][0].transpose(0, 1), results[1][0].transpose(0, 1)
        end = rows.stop
    _without_keys(out[end:], lse[end:])
    return out, lse


@kernel(
    ops.varlen_attention,
    *_LIMITS,
    # the kernel has no gradient of lse
    Scalar("return_lse", one_of=(False,)),
    direction="backward",
    source=f"{_SOURCE}_backward",
    device_types=("cpu",),
)
def varlen_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, where lse has none."""
    gradients = [torch.zeros(x.shape, dtype=x.dtype) if need else None for x, need in zip((q, k, v), needs)]
    none: Any = None  # the gradient of lse is not read
    for each in sequences_of(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
        rows, keys = each
        own = heads_first(q[rows]), heads_first(k[keys]), heads_first(v[keys])
        kept = heads_first(out[rows]), lse[rows].transpose(0, 1)[None].contiguous()
        grad = heads_first(grad_out[rows])
        results = attention.attention_backward.function(
            grad, none, *own, None, *kept, scale, causal, None, False, needs
        )
        for whole, part, at in zip(gradients, results, (rows, keys, keys)):
            if whole is not None and part is not None:
                whole[at] = part[0].transpose(0, 1)
    return tuple(gradients)


def _without_keys(out: Tensor, lse: Tensor) -> None:
    """Write the results of rows of no sequence."""
    if len(lse):
        out.zero_()
        lse.fill_(-math.inf)
