"""Evidence of bias_gelu: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Tolerance
from fusedops.dtypes import promoted
from fusedops.ops.gelu.error_bounds import error_bound, gradient_error_bound


def unfused(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the op as models do without fused ops."""
    return torch.nn.functional.gelu(x if bias is None else x + bias, approximate=approximate)


def min_bytes(x: Any, bias: Any, approximate: str) -> Mapping[Any, int]:
    """Read x, write y; read grad and x, write dx. The bias, and its gradient, are read and written once."""
    elements, size = math.prod(x.shape), promoted(x, bias).itemsize
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    forward = elements * (x.dtype.itemsize + size) + small
    return {"forward": forward, "backward": elements * (size + 2 * x.dtype.itemsize) + 2 * small}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    return {"x": (batch, length, 6), "bias": (6,), "approximate": "tanh"}


BIAS_GELU = Evidence(
    formula="gelu(x + bias)",
    cases=[
        Case("gpt3_6.7b_mlp", {"x": (2048, 16384), "bias": (16384,)}, "GPT-3 6.7B, 4 * 4096, one sequence"),
        Case("bert_large_mlp", {"x": (8, 512, 4096), "bias": (4096,), "approximate": "none"}, "BERT-large, erf"),
        Case("ragged", {"x": (3, 1000), "bias": (1000,)}, "no size is a power of two"),
        Case("no_bias", {"x": (4, 128, 3072)}, "GPT-2, the bias added by the linear layer"),
        Case("row_bias", {"x": (64, 96), "bias": (64, 1)}, "a bias for each row"),
        Case("full_bias", {"x": (16, 256), "bias": (16, 256)}, "a bias of x's own shape"),
    ],
    tolerance={
        torch.float16: Tolerance(2e-6, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(2e-6, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(2e-6, 1.3e-6),  # the sigmoid form of tanh is within 5e-7
        torch.float64: Tolerance(1e-12, 1e-12),
    },
    gradient_tolerance={
        # absolute: dbias is a sum over rows in float32, in any order
        torch.float16: Tolerance(1e-4, 2e-3),
        torch.bfloat16: Tolerance(1e-4, 1.6e-2),
        torch.float32: Tolerance(1e-4, 1e-5),
        torch.float64: Tolerance(1e-11, 1e-12),
    },
    error_bound=error_bound,
    gradient_error_bound=gradient_error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=_sample,
    large=[
        Case("tanh", {"x": (8192, 4096), "bias": (4096,)}),
        Case("erf", {"x": (8192, 4096), "bias": (4096,), "approximate": "none"}),
    ],
    sweep=lambda rows, width: {"x": (rows, width), "bias": (width,)},
    peers="""
| peer | form | bias | in 16 bits |
|---|---|---|---|
| Megatron-LM, `bias_gelu_impl` | tanh | needed | each step rounded |
| Slapo, `BiasGeLUFunction` | tanh | needed | each step rounded |
| torch_npu, `npu_gelu` | tanh or exact | none: the sum is a pass of its own | |
| fusedops | tanh or exact | any shape that broadcasts, or None | computed in float32, rounded once |
""",
    result_dtype="of `x + bias`, by torch's promotion",
    sharded=(
        "any dim",
        "`bias` likewise; replicated where it lacks the dim or its size is 1",
        "of x: as x; of a replicated bias with a sharded x: `Partial`, not yet summed",
    ),
)
