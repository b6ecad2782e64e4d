"""Evidence of quantized_linear: cases, tolerances, error bounds, bytes, the unfused form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, tolerances
from fusedops._contract.rounding import error_bound_of
from fusedops.ops.quantized.quantized_linear import backward, reference
from fusedops.quantization import FORMATS, dequantize

_TOLERANCE = tolerances((5e-7, 5e-6), (1e-14, 1e-13))


def unfused(x: Tensor, packed: Tensor, bias: Tensor | None, format: str) -> Tensor:
    """Compute the op as models do without fused ops: the whole weight is unpacked."""
    return torch.nn.functional.linear(
        x, dequantize(packed, format, x.dtype), None if bias is None else bias.to(x.dtype)
    )


def min_bytes(x: Any, packed: Any, bias: Any, format: str) -> Mapping[Any, int]:
    """Read x and packed, write y; read grad and packed, write dx. The bias, and its gradient, once."""
    rows, itemsize = prod(x.shape[:-1]), x.dtype.itemsize
    vector = 0 if bias is None else prod(bias.shape) * bias.dtype.itemsize
    moved = itemsize * (prod(x.shape) + rows * packed.shape[0]) + prod(packed.shape)
    return {"forward": moved + vector, "backward": moved + vector}


def _linear(rows: int, columns: int, outputs: int, format: str, **others: Any) -> dict[str, Any]:
    """Return the call of rows of x."""
    sizes = FORMATS[format]
    packed = (outputs, columns // sizes.weights * sizes.bytes)
    return {"x": (rows, columns), "packed": packed, "format": format, **others}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    return {"x": (batch, length, 64), "packed": (6, 68), "bias": (6,), "format": "Q8_0"}


_CASES = [
    Case("every_option", _linear(3, 512, 7, "Q4_K", bias=(7,))),
    Case("one_row", _linear(1, 512, 70, "Q6_K")),
    Case("smollm2_down", _linear(9, 1536, 96, "Q5_0"), "SmolLM2-135M, some outputs of a down projection"),
    *(Case(f"each_{name.lower()}", _linear(5, 512, 13, name, bias=(13,))) for name in FORMATS),
    Case("llama_3_8b", {**_linear(1, 4096, 4096, "Q4_K"), "x": (1, 1, 4096)}, "Llama 3 8B, one token"),
    Case("smollm2_head", _linear(1, 576, 49152, "Q8_0"), "SmolLM2-135M, the head, one token"),
]


def _token_rows(format: str, columns: int, count: int) -> Mapping[str, Any]:
    return _linear(count, columns, 137, format, bias=(137,))


QUANTIZED_LINEAR = Evidence(
    formula="x @ dequantize(packed).T + bias",
    cases=_CASES,
    tolerance=_TOLERANCE,
    gradient_tolerance=_TOLERANCE,
    error_bound=error_bound_of(reference, dtype_of=(0,)),
    gradient_error_bound=error_bound_of(backward, dtype_of=(4,)),
    min_bytes=min_bytes,
    unfused=unfused,
    sample=_sample,
    large=[Case(f"token_{name.lower()}", _linear(1, 4096, 4096, name)) for name in ("Q8_0", "Q4_1", "Q4_K")],
    sweep=lambda rows, width: _linear(rows, max(width // 256, 1) * 256, 4096, "Q8_0"),
    rows=[
        Rows(f"tokens of {columns}, {format}", partial(_token_rows, format, columns), {"x": 0, "y": 0})
        for format, columns in (("Q8_0", 96), ("Q4_K", 2048))
    ],
    peers="""
| peer | activation | formats | backward | CPU |
|---|---|---|---|---|
| gguf + torch's `linear` | exact | all; the whole weight is unpacked | yes | yes |
| transformers' GGUF layers | exact | some, by a kernel | no | unpacked |
| llama.cpp | rounded to 8 bits | all | no | yes |
| torchao, int8 and int4 weights | 16 bits | its own | no | yes |
| torch_npu, `npu_weight_quant_batchmatmul` | 16 bits | int8 and int4 in groups | no | no |
| fusedops | exact | the eight of its table | of x and bias | yes |
""",
    sharded=(
        "any dim except the last; or the outputs, the first dim of `packed`",
        "rows: `packed` and `bias` replicated; outputs: `bias` as `packed`, `x` replicated",
        "of x: as x, `Partial` with sharded outputs; of bias: `Partial` with sharded rows, as it is with outputs",
    ),
)
