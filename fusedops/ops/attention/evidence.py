"""Evidence of attention: cases, bytes, the unfused form, tolerances."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops import masks
from fusedops._contract.evidence import Case, Evidence, Tolerance
from fusedops.ops.attention import formulas
from fusedops.ops.attention.error_bounds import error_bound, gradient_error_bound


def unfused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops: a fully masked row is NaN."""
    sizes = q.shape[2], k.shape[2]
    masked = masks.from_band(*sizes, masks.band(*sizes, causal, window), q.device)
    if mask is not None:
        masked = mask.bool() if masked is None else masked | mask.bool()
    keys, values = formulas.for_each_query_head(k, q), formulas.for_each_query_head(v, q)
    scores = q @ keys.transpose(-2, -1) * formulas.scale_of(q, scale)
    if masked is not None:
        scores = scores.masked_fill(masked, -math.inf)
    lse = torch.logsumexp(scores.float(), -1) if return_lse else scores.new_zeros(q.shape[:3])
    return torch.softmax(scores, -1) @ values, lse


def min_bytes(q: Any, k: Any, v: Any, mask: Any, *rest: Any) -> Mapping[Any, int]:
    """Read q, k, v and mask, write out and lse; read these again with the gradient of out, write three gradients."""
    size = q.dtype.itemsize
    inputs = size * sum(math.prod(each.shape) for each in (q, k, v))
    outputs = size * math.prod(q.shape[:3]) * v.shape[3] + max(size, 4) * math.prod(q.shape[:3])
    masked = 0 if mask is None else math.prod(mask.shape)
    return {"forward": inputs + outputs + masked, "backward": 2 * inputs + 2 * outputs + masked}


_SAMPLE = {"scale": 0.3, "causal": "lower_right", "return_lse": True}


def sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    keys = (batch, 1, length + 2, 8)
    mask = (batch, 1, length, length + 2)
    return {"q": (batch, 8, length, 8), "k": keys, "v": keys, "mask": mask, **_SAMPLE}


def _heads(b: int, nq: int, nk: int, sq: int, sk: int, d: int) -> dict[str, Any]:
    return {"q": (b, nq, sq, d), "k": (b, nk, sk, d), "v": (b, nk, sk, d)}


def sweep(rows: int, width: int) -> Mapping[str, Any]:
    """Return the call of a benchmark over lengths: the width is the number of keys."""
    return {**_heads(1, 16, 16, rows, width, 64), "causal": "lower_right"}


CASES = [  # a window is a list here: a tuple is the shape of a tensor
    Case("gpt2_small", {**_heads(1, 12, 12, 64, 64, 64), "causal": "upper_left"}, "GPT-2, 12 heads of 64"),
    Case("llama3_8b", {**_heads(1, 32, 8, 32, 32, 128), "causal": "upper_left"}, "Llama 3 8B, 8 key heads"),
    Case("bert_padded", {**_heads(2, 12, 12, 48, 48, 64), "mask": (2, 1, 1, 48)}, "BERT, a padded batch"),
    Case("mistral_window", {**_heads(1, 8, 2, 96, 96, 64), "causal": "upper_left", "window": [31, 0]}, "Mistral"),
    Case("decode", {**_heads(4, 8, 8, 1, 129, 64), "causal": "lower_right", "return_lse": True}, "cached keys"),
    Case("prefill", {**_heads(2, 4, 4, 17, 51, 32), "causal": "lower_right"}, "a part of a prompt, cached keys"),
    Case("masked", {**_heads(2, 4, 2, 40, 40, 32), "mask": (2, 4, 40, 40), "return_lse": True}),
    Case("ragged", {**_heads(1, 3, 1, 33, 45, 40), "mask": (33, 45), "scale": 0.3}, "no size is a power of two"),
]
LARGE = [
    Case("causal", {**_heads(2, 16, 16, 2048, 2048, 64), "causal": "upper_left"}),
    Case("padded", {**_heads(2, 16, 16, 2048, 2048, 64), "mask": (2, 1, 1, 2048)}),
    Case("grouped", {**_heads(2, 16, 4, 2048, 2048, 64), "causal": "upper_left"}),
]
PEERS = """
| peer | causal, Sq != Sk | True in a bool mask | fully masked row | window | grouped heads |
|---|---|---|---|---|---|
| torch, `scaled_dot_product_attention` | upper left | seen | 0 | none | `enable_gqa` |
| flash-attn, `flash_attn_func` | lower right | no mask | 0 | `window_size` | yes |
| torch_npu, `npu_fusion_attention` | by `sparse_mode` | masked out | 0 with `inner_precise=2` | `sparse_mode=4` | yes |
| fusedops | by name | masked out | 0 | `window` | yes |
"""


ATTENTION = Evidence(
    formula="softmax(where(masked, -inf, scale * q @ k.mT)) @ v",
    cases=CASES,
    tolerance={
        # absolute: of the weighted mean of |v|. Probabilities are rounded to the inputs' dtype, then the sum is
        torch.float16: Tolerance(2e-3, 1e-3),
        torch.bfloat16: Tolerance(1.2e-2, 8e-3),
        torch.float32: Tolerance(8e-6, 2e-6),
        torch.float64: Tolerance(2e-14, 1e-14),
    },
    gradient_tolerance={
        # absolute: of each term of a sum in 16 bits; out, the probabilities and their gradients are rounded
        torch.float16: Tolerance(4e-3, 1e-3),
        torch.bfloat16: Tolerance(2e-2, 8e-3),
        torch.float32: Tolerance(2e-5, 2e-6),
        torch.float64: Tolerance(5e-14, 1e-14),
    },
    error_bound=error_bound,
    gradient_error_bound=gradient_error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=sample,
    large=LARGE,
    sweep=sweep,
    peers=PEERS,
    result_dtype="of `q`",
    sharded=(
        "`q`: batch and heads",
        "`k`, `v`: batch and heads, replicated where there is one head; whole key heads on each rank; `mask` likewise, "
        "replicated where its size is 1",
        "as q, k, v; of a replicated k and v with sharded heads of q: `Partial`",
    ),
)
