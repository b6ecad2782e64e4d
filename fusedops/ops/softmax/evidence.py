"""Evidence of scaled_masked_softmax: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, Tolerance, rows_of_two_widths, tolerances
from fusedops.ops.softmax.error_bounds import error_bound, gradient_error_bound
from fusedops.ops.softmax.formulas import causal_mask


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


SCALED_MASKED_SOFTMAX = Evidence(
    formula="softmax(where(masked, -inf, scale * x), dim=-1)",
    cases=[
        Case("gpt2_small", {"x": (2, 12, 64, 64), "mask": (2, 1, 1, 64), "scale": 0.125}, "GPT-2, 12 heads of 64"),
        Case("causal", {"x": (2, 4, 64, 64), "scale": 0.125, "causal": True}, "decoder, training"),
        Case("causal_padded", {"x": (2, 4, 64, 96), "mask": (2, 1, 1, 96), "causal": True}, "decoder, padded batch"),
        Case("ragged", {"x": (3, 5, 100), "mask": (3, 5, 100)}, "a length that Ascend refuses"),
        Case("decode", {"x": (4, 8, 1, 129), "mask": (4, 1, 1, 129), "scale": 0.088}, "one query, cached keys"),
        *[Case(f"ascend_{i}", {"x": x, "mask": mask}, _ASCEND) for i, (x, mask) in enumerate(_ASCEND_SHAPES, 1)],
    ],
    # absolute: of each score. npu scales in float16
    tolerance=tolerances((2e-6, 1e-5), (1e-14, 1e-12)) | {torch.float16: Tolerance(1e-3, 1e-3)},
    gradient_tolerance=tolerances((5e-6, 1e-5), (1e-13, 1e-12), absolute=0.0, absolute_roundings=2.0, roundings=2.0),
    error_bound=error_bound,
    gradient_error_bound=gradient_error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=_sample,
    large=[
        Case("mask [b,1,sq,sk]", {"x": _SCORES, "mask": (4, 1, 512, 1024), "scale": 0.125}),
        Case("mask [b,h,sq,sk]", {"x": _SCORES, "mask": _SCORES, "scale": 0.125}),
        Case("mask [b,1,1,sk]", {"x": _SCORES, "mask": (4, 1, 1, 1024), "scale": 0.125}),
        Case("causal", {"x": (2, 16, 1024, 1024), "scale": 0.125, "causal": True}),
        Case("no mask", {"x": _SCORES, "scale": 0.125}),
    ],
    sweep=lambda rows, width: {"x": (1, 1, rows, width), "mask": (1, 1, rows, width), "scale": 0.125},
    rows=[
        *rows_of_two_widths(
            lambda count, width: {"x": (count, width), "mask": (count, width), "scale": 0.3}, "x", "mask", "y"
        ),
        Rows("matrices", lambda count: {"x": (count, 5, 19), "causal": True}, {"x": 0, "y": 0}),
    ],
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
    sharded=("any dim except the last", "`mask` likewise; replicated where its size is 1", "as x"),
)
