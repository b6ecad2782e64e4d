"""Evidence of rotary_embedding: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusedops._contract.evidence import Evidence
from fusedops._contract.values import Case
from fusedops.ops.rotary import formulas


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    angles = (batch, length, 2)
    return {"q": (batch, 2, length, 6), "k": (batch, 1, length, 6), "cos": angles, "sin": angles, "interleaved": True}


_LLAMA = {"q": (1, 32, 2048, 128), "k": (1, 8, 2048, 128), "cos": (2048, 64), "sin": (2048, 64)}


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
    tolerance=formulas.TOLERANCE,
    gradient_tolerance=formulas.TOLERANCE,
    error=formulas.error,
    gradient_error=formulas.backward_error,
    min_bytes=formulas.min_bytes,
    unfused=formulas.unfused,
    sample=_sample,
    large=[Case("half", {**_LLAMA, "q": (4, 32, 2048, 128), "k": (4, 8, 2048, 128)})],
    peers="""
| peer | pairs | partial | cos, sin | in 16 bits |
|---|---|---|---|---|
| transformers, `apply_rotary_pos_emb` | by model | by model | doubled, in the dtype of x | each step rounded |
| Liger, `liger_rotary_pos_emb` | halves | yes | doubled, in their own dtype | q and k overwritten |
| torch_npu, `npu_rotary_mul` | both | no | doubled, rounded to the dtype of x | rounded once |
| fusedops | both | yes | one entry for each pair, not rounded | rounded once |
""",
)
