"""Evidence of rotary_embedding: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, tolerances
from fusedops._contract.rounding import error_bound_of
from fusedops.ops.rotary import formulas

_TOLERANCE = tolerances((5e-7, 3e-7), (1e-15, 1e-15))
_bound_of_one = error_bound_of(formulas.rotated)


def _error_bound(absolute: float, q: Tensor | None, k: Tensor | None, *angles: Any) -> tuple[Tensor | None, ...]:
    """Return the largest errors of q and k, each in the arithmetic of its own dtype and that of cos and sin."""
    return tuple(None if x is None else _bound_of_one(absolute, x, *angles) for x in (q, k))


def _gradient_error_bound(absolute: float, grad_q: Tensor, grad_k: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    *angles, (needs_q, needs_k) = rest
    return _error_bound(absolute, grad_q if needs_q else None, grad_k if needs_k else None, *angles)


def _unfused(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor | None]:
    """Compute the op as models do without fused ops: cos and sin doubled, in the dtype of q, and each step rounded."""
    heads = -3 if seq_dim == -2 else -2
    doubled = (formulas.joined(angle, angle, interleaved) for angle in (cos, sin))
    wide_cos, wide_sin = (angle.to(q.dtype).unsqueeze(heads) for angle in doubled)
    chains = [None if x is None else _chain(x, wide_cos, wide_sin, interleaved) for x in (q, k)]
    return chains[0], chains[1]  # pyright: ignore[reportReturnType]


def _chain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    x1, x2 = formulas.pairs(turning, interleaved)
    y = turning * cos + formulas.joined(-x2, x1, interleaved) * sin
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def _min_bytes(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool, seq_dim: int) -> Mapping[Any, int]:
    """Read q, k, cos and sin, write q and k; backward the same with the gradients."""
    moved = sum(2 * math.prod(x.shape) * x.dtype.itemsize for x in (q, k) if x is not None)
    moved += sum(math.prod(x.shape) * x.dtype.itemsize for x in (cos, sin))
    return {"forward": moved, "backward": moved}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    angles = (batch, length, 2)
    return {"q": (batch, 2, length, 6), "k": (batch, 1, length, 6), "cos": angles, "sin": angles, "interleaved": True}


_LLAMA = {"q": (1, 32, 2048, 128), "k": (1, 8, 2048, 128), "cos": (2048, 64), "sin": (2048, 64)}


def _positions(count: int) -> Mapping[str, Any]:
    return {"q": (1, 3, count, 22), "k": (1, 1, count, 22), "cos": (count, 9), "sin": (count, 9)}


def _sequences(count: int) -> Mapping[str, Any]:
    return {"q": (count, 3, 5, 22), "k": (count, 1, 5, 22), "cos": (5, 11), "sin": (5, 11), "interleaved": True}


ROTARY_EMBEDDING = Evidence(
    formula="(x1 * cos - x2 * sin, x2 * cos + x1 * sin) of q and k",
    cases=[
        Case(
            "small_heads",
            {"q": (2, 4, 48, 32), "k": (2, 2, 48, 32), "cos": (48, 16), "sin": (48, 16)},
            "two heads of q for each of k",
        ),
        Case("llama3_8b", _LLAMA, "Llama 3 8B: 32 heads, 8 key heads of 128"),
        Case(
            "glm4_9b",
            {"q": (1, 32, 512, 128), "k": (1, 2, 512, 128), "cos": (512, 32), "sin": (512, 32), "interleaved": True},
            "GLM-4 9B: half of each head rotates, interleaved",
        ),
        Case(
            "decode",
            {"q": (4, 64, 1, 64), "k": (4, 8, 1, 64), "cos": (1, 1, 32), "sin": (1, 1, 32)},
            "gpt-oss 20B, one position",
        ),
        Case(
            "bsnd",
            {"q": (1, 9, 6, 20), "k": (1, 9, 3, 20), "cos": (1, 9, 7), "sin": (1, 9, 7), "seq_dim": -3},
            "flash-attention's layout, and no size is a power of two",
        ),
    ],
    tolerance=_TOLERANCE,
    gradient_tolerance=_TOLERANCE,
    error_bound=_error_bound,
    gradient_error_bound=_gradient_error_bound,
    min_bytes=_min_bytes,
    unfused=_unfused,
    sample=_sample,
    large=[Case("half", {**_LLAMA, "q": (4, 32, 2048, 128), "k": (4, 8, 2048, 128)})],
    rows=[
        Rows("positions", _positions, {**dict.fromkeys(("q", "k", "rotated_q", "rotated_k"), 2), "cos": 0, "sin": 0}),
        Rows("sequences", _sequences, dict.fromkeys(("q", "k", "rotated_q", "rotated_k"), 0)),
    ],
    peers="""
| peer | pairs | partial | cos, sin | in 16 bits |
|---|---|---|---|---|
| transformers, `apply_rotary_pos_emb` | by model | by model | doubled, in the dtype of x | each step rounded |
| Liger, `liger_rotary_pos_emb` | halves | yes | doubled, in their own dtype | q and k overwritten |
| torch_npu, `npu_rotary_mul` | both | no | doubled, rounded to the dtype of x | rounded once |
| fusedops | both | yes | one entry for each pair, not rounded | rounded once |
""",
    sharded=(
        "`q`: any dim except the last",
        "`k` likewise, its heads too; `cos`, `sin` with the positions, and with the batch where they have it; "
        "replicated with the heads",
        "as q and k",
    ),
)
