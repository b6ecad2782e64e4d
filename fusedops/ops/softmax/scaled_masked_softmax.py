"""Scaled masked softmax, the attention probabilities. Replaces Megatron's and apex's ScaledMaskedSoftmax family,
torch_npu's npu_scaled_masked_softmax, and the chain scale -> masked_fill -> softmax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Case, Padding, Sharding, Tolerance
from fusedops._dispatch.call import call
from fusedops.constraints import Broadcasts, Finite, Flag, Floating, Mask, Rank, SameDevice
from fusedops.ops.softmax.formulas import adjusted_to_shard, causal_mask, error, gradient_error, padded, padded_backward


def scaled_masked_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False, backend: str | None = None
) -> Tensor:
    """Compute the softmax over the last dimension of ``scale * x``, with masked positions left out.

    ``y = softmax(where(masked, -inf, scale * x), dim=-1)``: scale first, then mask. A masked position has probability
    exactly 0, whatever ``x`` is there; a row whose positions are all masked is exactly 0, and so is its gradient.

    Args:
        x: (..., Sq, Sk), rank >= 2, float16, bfloat16, float32 or float64. Attention scores.
        mask: bool or uint8, broadcastable to ``x``; True or non-zero means masked out (the opposite of torch's
            scaled_dot_product_attention). None masks nothing.
        scale: a number, finite in float32. Never rounded to the dtype of ``x``.
        causal: also masks key k for query q where k > q, both counted from 0 (the first query sees the first key
            only, also where Sq != Sk). Joined with ``mask`` by "or".
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (..., Sq, Sk), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64).

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Megatron-LM, ``megatron/core/fusions/fused_softmax.py``; torch_npu, ``npu_scaled_masked_softmax``.

    >>> import torch, fusedops
    >>> fusedops.scaled_masked_softmax(torch.zeros(2, 2), causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    return call(OP, (x, mask, scale, causal), backend)


def reference(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the op in plain torch."""
    wide = (x if x.dtype == torch.float64 else x.float()) * scale
    masked = None if mask is None else mask.bool()
    if causal:
        masked = causal_mask(x) if masked is None else masked | causal_mask(x)
    if masked is None:
        return torch.softmax(wide, -1).to(x.dtype)
    # softmax of a fully masked row, -inf alone, is NaN: it is computed over zeros, and set to zero after
    dead = masked.expand(x.shape).all(-1, keepdim=True)
    y = torch.softmax(wide.masked_fill(masked, -math.inf).masked_fill(dead, 0.0), -1)
    return y.masked_fill(masked, 0.0).to(x.dtype)


def backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the gradient of x from the output, which is 0 where masked."""
    wide_grad, wide_y = (grad, y) if y.dtype == torch.float64 else (grad.float(), y.float())
    return (scale * wide_y * (wide_grad - (wide_grad * wide_y).sum(-1, keepdim=True))).to(y.dtype)


def unfused(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the op as models do without fused ops: a fully masked row is NaN."""
    scores = x * scale
    if causal:
        mask = causal_mask(x) if mask is None else mask | causal_mask(x)
    return torch.softmax(scores if mask is None else scores.masked_fill(mask.bool(), -math.inf), -1)


def min_bytes(x: Any, mask: Any, scale: float, causal: bool) -> Mapping[Any, int]:
    """Read x and mask, write y; read grad and y, write dx. Causal reads nothing above the diagonal."""
    size, elements = x.dtype.itemsize, math.prod(x.shape)
    sq, sk = x.shape[-2:]
    kept = sum(min(q + 1, sk) for q in range(sq)) * (elements // max(sq * sk, 1)) if causal else elements
    mask_bytes = 0 if mask is None else math.prod(mask.shape)
    return {"forward": size * (kept + elements) + mask_bytes, "backward": size * (2 * kept + elements)}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    shape = (batch, 2, length, length + 2)
    return {"x": shape, "mask": (batch, 1, length, length + 2), "scale": 0.3, "causal": True}


_SCORES = (4, 16, 512, 1024)
_ASCEND = "torch_npu, typical cases of npu_scaled_masked_softmax"
_ASCEND_SHAPES = [
    ((1, 8, 4096, 4096), (1, 1, 4096, 4096)),
    ((4, 32, 2048, 2048), (4, 1, 2048, 2048)),
    *[((8, 16, 512, sk), (8, 16, 512, sk)) for sk in (2048, 1536, 1024, 512, 256)],
    ((4, 4, 2048, 2048), (4, 4, 2048, 2048)),
]

OP = Op(
    scaled_masked_softmax,
    constraints=[
        Floating("x"),
        Rank("x", at_least=2),
        Finite("scale"),
        Flag("causal"),
        Mask("mask"),
        SameDevice("mask", "x"),
        Broadcasts("mask", "x"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x",),
    tolerance={
        torch.float16: Tolerance(1e-3, 1e-3),  # one rounding to an 11-bit mantissa; npu scales in float16
        torch.bfloat16: Tolerance(2e-6, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(2e-6, 1e-5),  # absolute: of each score
        torch.float64: Tolerance(1e-14, 1e-12),
    },
    gradient_tolerance={
        # y * (g - sum(g * y)) from the rounded y: half a unit in the last place of y, times |g| + |sum| of up to 5
        torch.float16: Tolerance(2e-3, 2e-3),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2),
        torch.float32: Tolerance(5e-6, 1e-5),
        torch.float64: Tolerance(1e-13, 1e-12),
    },
    error=error,
    gradient_error=gradient_error,
    cases=[
        Case("gpt2_small", {"x": (2, 12, 64, 64), "mask": (2, 1, 1, 64), "scale": 0.125}, "GPT-2, 12 heads of 64"),
        Case("causal", {"x": (2, 4, 64, 64), "scale": 0.125, "causal": True}, "decoder, training"),
        Case("causal_padded", {"x": (2, 4, 64, 96), "mask": (2, 1, 1, 96), "causal": True}, "decoder, padded batch"),
        Case("ragged", {"x": (3, 5, 100), "mask": (3, 5, 100)}, "a length that Ascend refuses"),
        Case("decode", {"x": (4, 8, 1, 129), "mask": (4, 1, 1, 129), "scale": 0.088}, "one query, cached keys"),
        *[Case(f"ascend_{i}", {"x": x, "mask": mask}, _ASCEND) for i, (x, mask) in enumerate(_ASCEND_SHAPES, 1)],
    ],
    min_bytes=min_bytes,
    unfused=unfused,
    formula="softmax(where(masked, -inf, scale * x), dim=-1)",
    sharding=Sharding(whole=(-1,), adjust=adjusted_to_shard),
    padding=Padding((-2, -1), padded, padded_backward),
    sample=_sample,
    large=[
        Case("mask [b,1,sq,sk]", {"x": _SCORES, "mask": (4, 1, 512, 1024), "scale": 0.125}),
        Case("mask [b,h,sq,sk]", {"x": _SCORES, "mask": _SCORES, "scale": 0.125}),
        Case("mask [b,1,1,sk]", {"x": _SCORES, "mask": (4, 1, 1, 1024), "scale": 0.125}),
        Case("causal", {"x": (2, 16, 1024, 1024), "scale": 0.125, "causal": True}),
        Case("no mask", {"x": _SCORES, "scale": 0.125}),
    ],
    sweep=lambda rows, width: {"x": (1, 1, rows, width), "mask": (1, 1, rows, width), "scale": 0.125},
    peers="""
| peer | rank | Sk | other | dtypes | mask shapes |
|---|---|---|---|---|---|
| Megatron-LM | 4 | 16 < Sk <= 4096 | Sq, Sk and b * heads divisible by 4 | float16, bfloat16 | [b, 1, Sq, Sk] |
| apex | 4 | <= 16384 in Python, 4096 in the kernel | | float16, bfloat16 | [b, 1, Sq, Sk] |
| TransformerEngine | 4 | 16 < Sk < 16384, divisible by 8 | | float16, bfloat16 | [b, 1, Sq, Sk] |
| torch_npu | 4 | [32, 4096], divisible by 32 | Sq the same | float16, bfloat16, float32 | last two sizes as x's |

A fully masked row is 0 in the CUDA kernels of the first three, uniform (1 / Sk) in their own torch fallbacks and on
Ascend, NaN from `masked_fill(-inf)` and `softmax`. In fusedops it is 0 everywhere, and so is its gradient.
""",
)
