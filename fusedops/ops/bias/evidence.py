"""Evidence of the ops with a bias: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, Tolerance
from fusedops._contract.rounding import error_bound_of
from fusedops.dtypes import promoted
from fusedops.ops.bias import bias_dropout, bias_dropout_add, bias_gelu

_BIAS_SHARDED = "`bias` likewise; replicated where it lacks the dim or its size is 1"
_GRADIENTS_SHARDED = "of x: as x; of a replicated bias with a sharded x: `Partial`, not yet summed"


def _backward_bytes(x: Any, bias: Any, dtype: torch.dtype, p: float, training: bool) -> int:
    """Return the bytes of reading grad (of ``dtype``), writing dx unless it is grad itself, and the bias's gradient."""
    elements = math.prod(x.shape)
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    if (p == 0 or not training) and x.dtype is dtype:
        return 0 if bias is None else elements * dtype.itemsize + small
    return elements * (dtype.itemsize + x.dtype.itemsize) + small


# -------------------------------------------------------------------------------------------------------- bias_dropout


def bias_dropout_unfused(x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> Tensor:
    """Compute the op as models do without fused ops, with torch's own random numbers."""
    return torch.nn.functional.dropout(x if bias is None else x + bias, p, training)


def bias_dropout_min_bytes(x: Any, bias: Any, p: float, training: bool, seed: Any) -> Mapping[Any, int]:
    """Read x, write y; read grad, write dx. The bias, and its gradient, move once; no mask is stored."""
    elements, dtype = math.prod(x.shape), promoted(x, bias)
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    return {
        "forward": elements * (x.dtype.itemsize + dtype.itemsize) + small,
        "backward": _backward_bytes(x, bias, dtype, p, training),
    }


def _bias_dropout_sample(batch: int, length: int) -> Mapping[str, Any]:
    return {"x": (batch, length, 6), "bias": (6,), "p": 0.4, "seed": 3}


BIAS_DROPOUT = Evidence(
    formula="dropout(x + bias, p)",
    cases=[
        Case("gpt2_small", {"x": (8, 1024, 768), "bias": (768,), "p": 0.1, "seed": 1}, "GPT-2, after the MLP"),
        Case("ragged", {"x": (3, 1001), "bias": (1001,), "p": 0.5, "seed": 2**40 + 7}, "elements not divisible by 4"),
        Case("no_bias", {"x": (4, 33, 96), "p": 0.9, "seed": -5}),
        Case("evaluation", {"x": (4, 128), "bias": (128,), "p": 0.1, "training": False}),
        Case("all_dropped", {"x": (4, 128), "bias": (128,), "p": 1.0, "seed": 3}),
    ],
    tolerance={
        torch.float16: Tolerance(1e-6, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(1e-6, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(1e-6, 1e-6),
        torch.float64: Tolerance(2e-15, 1e-12),
    },
    gradient_tolerance={
        torch.float16: Tolerance(1e-6, 2e-3),
        torch.bfloat16: Tolerance(1e-6, 1.6e-2),
        torch.float32: Tolerance(1e-6, 1e-5),
        torch.float64: Tolerance(2e-15, 1e-12),
    },
    error_bound=error_bound_of(bias_dropout.reference),
    gradient_error_bound=error_bound_of(bias_dropout.backward, dtype_of=(0,)),
    min_bytes=bias_dropout_min_bytes,
    unfused=bias_dropout_unfused,
    sample=_bias_dropout_sample,
    large=[Case("training", {"x": (8192, 4096), "bias": (4096,), "p": 0.1, "seed": 1})],
    sweep=lambda rows, width: {"x": (rows, width), "bias": (width,), "p": 0.1, "seed": 1},
    sharded=(
        "any dim",
        "`bias` likewise; replicated where it lacks the dim or its size is 1",
        "of x: as x; of a replicated bias with a sharded x: `Partial`, not yet summed",
    ),
)


# ---------------------------------------------------------------------------------------------------- bias_dropout_add


def bias_dropout_add_unfused(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """Compute the op as models do without fused ops, with torch's own random numbers."""
    return residual + bias_dropout_unfused(x, bias, p, training, seed)


def bias_dropout_add_min_bytes(
    x: Any, bias: Any, residual: Any, p: float, training: bool, seed: Any
) -> Mapping[Any, int]:
    """Read x and residual, write y. Backward as bias_dropout: the residual's gradient is the output's itself."""
    elements, size = math.prod(x.shape), residual.dtype.itemsize
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    return {
        "forward": elements * (x.dtype.itemsize + 2 * size) + small,
        "backward": _backward_bytes(x, bias, residual.dtype, p, training),
    }


def _bias_dropout_add_sample(batch: int, length: int) -> Mapping[str, Any]:
    return {"x": (batch, length, 6), "bias": (6,), "residual": (batch, length, 6), "p": 0.4, "seed": 3}


BIAS_DROPOUT_ADD_LARGE = (8192, 4096)


BIAS_DROPOUT_ADD = Evidence(
    formula="residual + dropout(x + bias, p)",
    cases=[
        Case(case.name, {**case.args, "residual": case.args["x"], "bias": case.args.get("bias")}, case.source)
        for case in BIAS_DROPOUT.cases
    ],
    tolerance=BIAS_DROPOUT.tolerance,
    gradient_tolerance=BIAS_DROPOUT.gradient_tolerance,
    error_bound=error_bound_of(bias_dropout_add.reference, rounded_to=2),
    gradient_error_bound=error_bound_of(bias_dropout.backward, dtype_of=(0,)),
    min_bytes=bias_dropout_add_min_bytes,
    unfused=bias_dropout_add_unfused,
    sample=_bias_dropout_add_sample,
    large=[
        Case(
            "training",
            {"x": BIAS_DROPOUT_ADD_LARGE, "bias": (4096,), "residual": BIAS_DROPOUT_ADD_LARGE, "p": 0.1, "seed": 1},
        ),
        Case(
            "evaluation",
            {
                "x": BIAS_DROPOUT_ADD_LARGE,
                "bias": (4096,),
                "residual": BIAS_DROPOUT_ADD_LARGE,
                "p": 0.1,
                "training": False,
            },
        ),
    ],
    sweep=lambda rows, width: {
        "x": (rows, width),
        "bias": (width,),
        "residual": (rows, width),
        "p": 0.1,
        "seed": 1,
    },
    sharded=(
        "any dim",
        "`residual` as x; `bias` likewise; replicated where it lacks the dim or its size is 1",
        "of x: as x; of a replicated bias with a sharded x: `Partial`, not yet summed",
    ),
)


# ----------------------------------------------------------------------------------------------------------- bias_gelu


def bias_gelu_unfused(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute the op as models do without fused ops."""
    return torch.nn.functional.gelu(x if bias is None else x + bias, approximate=approximate)


def bias_gelu_min_bytes(x: Any, bias: Any, approximate: str) -> Mapping[Any, int]:
    """Read x, write y; read grad and x, write dx. The bias, and its gradient, are read and written once."""
    elements, size = math.prod(x.shape), promoted(x, bias).itemsize
    small = 0 if bias is None else math.prod(bias.shape) * bias.dtype.itemsize
    forward = elements * (x.dtype.itemsize + size) + small
    return {"forward": forward, "backward": elements * (size + 2 * x.dtype.itemsize) + 2 * small}


def _bias_gelu_sample(batch: int, length: int) -> Mapping[str, Any]:
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
        torch.float16: Tolerance(1e-6, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(1e-6, 1.6e-2),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(1e-6, 1.3e-6),  # the sigmoid form of tanh is within 5e-7
        torch.float64: Tolerance(2e-15, 1e-12),
    },
    gradient_tolerance={
        torch.float16: Tolerance(1e-6, 2e-3),
        torch.bfloat16: Tolerance(1e-6, 1.6e-2),
        torch.float32: Tolerance(1e-6, 1e-5),
        torch.float64: Tolerance(2e-15, 1e-12),
    },
    error_bound=error_bound_of(bias_gelu.reference),
    gradient_error_bound=error_bound_of(bias_gelu.backward),
    min_bytes=bias_gelu_min_bytes,
    unfused=bias_gelu_unfused,
    sample=_bias_gelu_sample,
    large=[
        Case("tanh", {"x": (8192, 4096), "bias": (4096,)}),
        Case("erf", {"x": (8192, 4096), "bias": (4096,), "approximate": "none"}),
    ],
    sweep=lambda rows, width: {"x": (rows, width), "bias": (width,)},
    rows=[
        Rows("rows", lambda count: {"x": (count, 67), "bias": (67,)}, {"x": 0, "y": 0}),
        Rows("rows, erf", lambda count: {"x": (count, 67), "approximate": "none"}, {"x": 0, "y": 0}),
    ],
    sharded=(
        "any dim",
        "`bias` likewise; replicated where it lacks the dim or its size is 1",
        "of x: as x; of a replicated bias with a sharded x: `Partial`, not yet summed",
    ),
)
