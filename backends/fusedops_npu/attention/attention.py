"""attention on Ascend: torch_npu's fused attention and its gradient, within their documented limits. Corrections:

- The vendor takes keys and values of one shape, so narrower values are padded with 0, and the result is cropped.
- The vendor's mask does not broadcast, so a mask is expanded to the batches or heads that differ.
- The vendor fills with the lowest finite number, so a fully masked row is the mean of the values. It is set to 0.
- The vendor returns a max and a sum for each row, eight times. lse is max + log(sum); backward is given lse and 1.

The function's first version is called: all releases have it. The third is for captured graphs, and refuses Ascend 950.

Source: torch_npu.npu_fusion_attention and npu_fusion_attention_grad; op-plugin, ``FlashAttentionKernelNpuOpApi.cpp``;
ops-transformer, ``attention/flash_attention_score`` and ``flash_attention_score_grad``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import Dim, DType, NotLarger, Scalar
from fusedops.ops.attention import formulas
from fusedops.ops.attention.arguments import AttentionArgs, AttentionGradArgs
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.attention._attention_masks import TRIANGLE, band_of, expanded_bytes, vendor_mask
from fusedops_npu.attention._attention_sizes import COPIES, as_wide, cropped

_LIMITS = (
    DType("q", torch.float16, torch.bfloat16, torch.float32),
    Dim("q", (3,), at_most=768),
    NotLarger("v", "k", 3, "split v into parts that are no wider than k, and concatenate the results"),
    Dim("q", (1,), at_most=256),
    Dim("q", (2,), at_most=1_000_000),
    Dim("k", (2,), at_most=1_000_000),
    Dim("q", (0,), at_most=2_000_000),
)
_DEVIATION = Deviation(
    "nonfinite-under-mask",
    "a masked weight of 0 is multiplied: inf or NaN at a masked key makes rows of its head NaN, and their gradients",
)


def _mask_cost(q: Any, k: Any, v: Any, mask: Any, scale: Any, causal: str, window: Any, *_: Any) -> int | None:
    return None if mask is None else expanded_bytes(q, k, mask, causal, window)


def _triangle_cost(q: Any, k: Any, v: Any, mask: Any, scale: Any, causal: str, window: Any, *_: Any) -> int | None:
    masks_nothing = band_of(q.shape[2], k.shape[2], causal, window) == (None, None)
    return None if mask is not None or masks_nothing else TRIANGLE * TRIANGLE


def _padded_cost(times: int, q: Any, k: Any, v: Any, *_: Any) -> int | None:
    """Return the bytes of v and out in the width of k, ``times`` each; None where v has that."""
    rows = math.prod(q.shape[:3]) + math.prod(k.shape[:3])
    return None if v.shape[3] == k.shape[3] else times * rows * k.shape[3] * q.dtype.itemsize


def _statistics_cost(grad_out: Any, grad_lse: Any, q: Any, *_: Any) -> int:
    return 2 * 4 * COPIES * math.prod(q.shape[:3])


def _adaptations(direction: str) -> tuple[Adaptation, ...]:
    """Return the adaptations for the arguments of a direction."""

    def of_direction(cost: Callable[..., int | None]) -> Callable[..., int | None]:
        return cost if direction == "forward" else lambda *args: cost(*args[2:6], *args[8:])

    return (
        Adaptation(
            "mask",
            "the mask is expanded to bool (B, Nq, Sq, Sk), (B, 1, Sq, Sk) or (1, 1, Sq, Sk), once per mask",
            of_direction(_mask_cost),
        ),
        Adaptation(
            "triangle",
            "the vendor's mask for an alignment or a window, bool (2048, 2048), is made once per device",
            of_direction(_triangle_cost),
        ),
        Adaptation(
            "head-size",
            "v is padded to the head size of k, and the result is cropped; backward, so are the tensors of out",
            of_direction(partial(_padded_cost, 1 if direction == "forward" else 2)),
        ),
    )


_STATISTICS = Adaptation("statistics", "lse is repeated to the vendor's (B, Nq, Sq, 8), beside ones", _statistics_cost)


@kernel(
    ops.attention,
    *_LIMITS,
    source="torch_npu.npu_fusion_attention",
    deviations=(_DEVIATION,),
    adapts=_adaptations("forward"),
    rows_independent=NOT_PROMISED,
)
def attention(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op for any mask, alignment and window."""
    if not (a.q.numel() and a.k.numel()):  # the vendor documents sizes from 1
        out, lse = ops.OPS["attention"].reference(*a)
        return out.contiguous(), lse.contiguous()
    given = vendor_mask(a.q, a.k, a.mask, a.causal, a.window)
    wide = as_wide(a.v, a.k)
    out, top, total = _vendor_forward(a.q, a.k, wide, a.q.shape[1], formulas.scale_of(a.q, a.scale), *given[:4])
    out = cropped(out, a.v)
    lse = top[..., 0] + total[..., 0].log()
    if given.dead is not None:
        out.masked_fill_(given.dead, 0.0)
        lse.masked_fill_(given.dead[..., 0], -math.inf)
    return out, lse.contiguous()


@kernel(
    ops.attention,
    *_LIMITS,
    Scalar("return_lse", one_of=(False,)),  # the vendor has no gradient of lse
    direction="backward",
    source="torch_npu.npu_fusion_attention_grad",
    adapts=(*_adaptations("backward"), _STATISTICS),
    rows_independent=NOT_PROMISED,
)
def attention_backward(a: AttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, where lse has none."""
    grad_out = a.grad_out
    lse = a.lse
    if not (a.q.numel() and a.k.numel()):
        rest = (a.mask, a.out, lse, a.scale, a.causal, a.window, a.return_lse, a.needs)
        each = ops.OPS["attention"].backward(grad_out, a.grad_lse, a.q, a.k, a.v, *rest)
        return tuple(None if gradient is None else gradient.contiguous() for gradient in each)
    given = vendor_mask(a.q, a.k, a.mask, a.causal, a.window)
    if given.dead is not None:  # the weights exp(lowest - 0) are 0; 0 * NaN of the gradient is not
        grad_out, lse = grad_out.masked_fill(given.dead, 0.0), lse.masked_fill(given.dead[..., 0], 0.0)
    wide, grad, result = (as_wide(tensor, a.k) for tensor in (a.v, grad_out, a.out))
    dq, dk, dv = _vendor_backward(
        a.q, a.k, wide, grad, a.q.shape[1], result, lse, formulas.scale_of(a.q, a.scale), *given[:4]
    )
    results = dq.contiguous(), dk.contiguous(), cropped(dv, a.v)
    return tuple(gradient if need else None for gradient, need in zip(results, a.needs))


def _vendor_forward(
    q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, mask: Tensor | None, mode: int, before: int, after: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, and the max and the sum of each row, (B, Nq, Sq, 8)."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    results: tuple[Any, ...] = vendor.npu_fusion_attention(
        q,
        k,
        v,
        heads,
        "BNSD",
        atten_mask=mask,
        scale=scale,
        pre_tockens=before,
        next_tockens=after,
        sparse_mode=mode,
    )
    return results[0], results[1], results[2]


def _vendor_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    heads: int,
    out: Tensor,
    lse: Tensor,
    scale: float,
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
        "BNSD",
        atten_mask=mask,
        softmax_max=top,
        softmax_sum=total,
        attention_in=out,
        scale_value=scale,
        pre_tockens=before,
        next_tockens=after,
        sparse_mode=mode,
    )
    return results[0], results[1], results[2]
