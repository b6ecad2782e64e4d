"""attention by flash-attn, whose causal mask is aligned at the lower right, with its lse and its backward.

It takes no mask, two dtypes, and heads of one size for queries, keys and values. Such calls are refused here.
Corrections:

- Queries that see no key, and keys that no query sees, are left out of the call: the lse of such a query is inf in
  release 2, and a NaN at such a key reaches rows, as 0 * NaN.
- The lse of a row with NaN among its scores is inf in release 2 and -inf in release 3, by which backward gives finite
  gradients. It is set to NaN.
- The kernels read 16 bytes at a time: a tensor that is not so aligned is copied. So is an expanded one, whose strides
  of 0 a tensor map of CUDA, which release 3 reads by, has no place for.

Source: flash-attn 2.8.3, ``csrc/flash_attn/flash_api.cpp``, ``src/softmax.h``, ``src/mask.h``; flash-attn 3.0,
``hopper/flash_api.cpp``, ``hopper/softmax.h``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops import Deviation, kernel, ops
from fusedops.constraints import Alignment, Capability, Dim, DType, Finite, NotLarger, Present, SameDims, Scalar, When
from fusedops.ops.attention.arguments import AttentionArgs, AttentionGradArgs
from fusedops_flash_attn import _package
from fusedops_flash_attn._package import Band

_LIMITS = (
    DType("q", torch.float16, torch.bfloat16),
    Present(
        "mask", False, fix="pass what it masks by causal and window where they can, else leave it to another backend"
    ),
    SameDims("v", "q", (3,)),
    Dim("q", (3,), at_least=8, at_most=256, multiple_of=8),
    Dim("q", (0, 1), at_most=65535),  # dims of CUDA's grid
    Alignment("causal", "q", "k", "lower_right"),
    # release 2 opens a side of at least Sk, which with more queries than keys masks some on the right
    When(
        Present("window"),
        When(
            Scalar("causal", one_of=("none",)),
            NotLarger("q", "k", 2, "pass at most Sk queries, or leave it to another backend"),
        ),
    ),
    # masked scores are -inf before they are scaled: -inf * 0 is NaN, -inf * -1 is inf
    Finite("scale", 1e-30, optional=True),
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
        "lse is NaN wherever a score is NaN or inf; a row whose scores are all -inf is 0",
    ),
)


@kernel(
    ops.attention,
    *_LIMITS,
    source="flash_attn._flash_attn_forward",
    deviations=_DEVIATIONS,
    rows_independent="flash-attn cuts the keys into parts by the number of queries and of heads",
)
def attention(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op without a mask, for one head size, with the diagonal at the lower right."""
    dead, unseen = _outside(a.q, a.k, a.causal, a.window)
    if dead >= a.q.shape[2] or not (a.q.numel() and a.k.numel()):
        return a.q.new_zeros(a.q.shape), a.q.new_full(a.q.shape[:3], -math.inf, dtype=torch.float32)
    rows, keys, values = _as_package(a.q, dead), _as_package(a.k, unseen), _as_package(a.v, unseen)
    out, lse = _package.forward(rows, keys, values, _band(a.q, a.k, a.scale, a.causal, a.window))
    out = out.transpose(1, 2)
    lse = lse.nan_to_num_(math.nan, math.nan, math.nan)
    if not dead:
        return out.contiguous(), lse.contiguous()
    whole, whole_lse = a.q.new_zeros(a.q.shape), lse.new_full(a.q.shape[:3], -math.inf)
    whole[:, :, dead:], whole_lse[:, :, dead:] = out, lse
    return whole, whole_lse


@kernel(
    ops.attention,
    *_LIMITS,
    Scalar("return_lse", one_of=(False,)),  # the kernels have no gradient of lse
    direction="backward",
    source="flash_attn._flash_attn_backward",
    deviations=_DEVIATIONS[:1],
    rows_independent="flash-attn cuts the keys into parts by the number of queries and of heads",
)
def attention_backward(a: AttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, where lse has none."""
    dead, unseen = _outside(a.q, a.k, a.causal, a.window)
    empty = dead >= a.q.shape[2] or not (a.q.numel() and a.k.numel())
    dq, dk, dv = (
        (torch.zeros_like if empty or first else torch.empty_like)(each, memory_format=torch.contiguous_format)
        for each, first in ((a.q, dead), (a.k, unseen), (a.v, unseen))
    )
    if not empty:
        given = _as_package(a.q, dead), _as_package(a.k, unseen), _as_package(a.v, unseen)
        gradients = tuple(
            each[:, :, first:].transpose(1, 2) for each, first in ((dq, dead), (dk, unseen), (dv, unseen))
        )
        _package.backward(
            _as_package(a.grad_out, dead),
            given,
            _as_package(a.out, dead),
            a.lse[:, :, dead:].contiguous(),
            (gradients[0], gradients[1], gradients[2]),
            _band(a.q, a.k, a.scale, a.causal, a.window),
        )
    return tuple(gradient if need else None for gradient, need in zip((dq, dk, dv), a.needs))


def _outside(q: Tensor, k: Tensor, causal: str, window: tuple[int, int] | None) -> tuple[int, int]:
    """Return how many queries see no key, the first ones, and how many keys no query sees, the first ones too."""
    if causal == "none" and window is None:
        return 0, 0
    diagonal = k.shape[2] - q.shape[2]
    return max(0, -diagonal), 0 if window is None else max(0, diagonal - window[0])


def _band(q: Tensor, k: Tensor, scale: float | None, causal: str, window: tuple[int, int] | None) -> Band:
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    # a C++ int holds the number of keys
    left, right = (-1, -1) if window is None else (min(size, k.shape[2]) for size in window)
    return Band(factor, causal != "none", left, right)


def _as_package(tensor: Tensor, first: int) -> Tensor:
    """Return (B, N, S, D) from the row ``first`` on as (B, S, N, D), with rows that are aligned to 16 bytes."""
    tensor = tensor.resolve_neg()[:, :, first:]
    aligned = tensor.stride(3) == 1 and all(stride and stride % 8 == 0 for stride in tensor.stride()[:3])
    if not aligned or tensor.data_ptr() % 16:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.transpose(1, 2)
