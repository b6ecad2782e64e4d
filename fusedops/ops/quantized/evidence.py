"""Evidence of quantized_linear and int8_linear: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, tolerances
from fusedops._contract.rounding import error_bound_of
from fusedops._contract.signature import spread
from fusedops.ops.quantized import int8_linear
from fusedops.ops.quantized.int8_linear import Int8LinearArgs
from fusedops.ops.quantized.quantized_linear import QuantizedLinearArgs, backward, reference, weight_of
from fusedops.quantization import FORMATS, SCALED, bytes_of_row

_TOLERANCE = tolerances((5e-7, 5e-6), (1e-14, 1e-13))


def unfused(a: QuantizedLinearArgs) -> Tensor:
    """Compute the op as models do without fused ops: the whole weight is unpacked."""
    weight = weight_of(a, a.x.dtype)
    return torch.nn.functional.linear(a.x, weight, None if a.bias is None else a.bias.to(a.x.dtype))


def min_bytes(x: Any, packed: Any, bias: Any, format: str, *parts: Any) -> Mapping[Any, int]:
    """Read x and the packed weight, write y; read grad and the weight, write dx. The bias, and its gradient, once."""
    rows, itemsize = prod(x.shape[:-1]), x.dtype.itemsize
    read = [each for each in (packed, bias, *parts) if each is not None]
    moved = itemsize * (prod(x.shape) + rows * packed.shape[0])
    moved += sum(prod(each.shape) * each.dtype.itemsize for each in read)
    return {"forward": moved, "backward": moved}


def _linear(rows: int, columns: int, outputs: int, format: str, groups: int = 0, **others: Any) -> dict[str, Any]:
    """Return the call of rows of x; ``groups``: of a row, with zeros."""
    call = {"x": (rows, columns), "packed": (outputs, bytes_of_row(columns, format)), "format": format, **others}
    if format in SCALED:
        call["scales"] = SCALED[format].scales_shape(outputs, columns, groups)
        call |= {"global_scale": ()} if SCALED[format].global_scale else {}
        call |= {"zeros": call["scales"]} if groups else {}
    return call


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    return {"x": (batch, length, 64), "packed": (6, 68), "bias": (6,), "format": "Q8_0"}


_CASES = [
    Case("every_option", _linear(3, 512, 7, "INT4_GROUP", 4, bias=(7,))),
    Case("a_global_scale", _linear(3, 512, 7, "NVFP4", bias=(7,))),
    Case("partial_blocks", _linear(3, 200, 29, "FP8_BLOCK", bias=(29,)), "neither size is a multiple of 128"),
    Case("blocks_of_rows", _linear(3, 32, 140, "FP8_BLOCK", bias=(140,)), "the second block of rows is partial"),
    Case("one_row", _linear(1, 512, 70, "Q6_K")),
    Case("smollm2_down", _linear(9, 1536, 96, "Q5_0"), "SmolLM2-135M, some outputs of a down projection"),
    *(Case(f"each_{name.lower()}", _linear(5, 512, 13, name, bias=(13,))) for name in (*FORMATS, *SCALED)),
    Case("gpt_oss_down", _linear(1, 2880, 96, "MXFP4"), "gpt-oss-20b, some outputs of an expert, one token"),
    Case("llama_3_8b", {**_linear(1, 4096, 4096, "Q4_K"), "x": (1, 1, 4096)}, "Llama 3 8B, one token"),
    Case("smollm2_head", _linear(1, 576, 49152, "Q8_0"), "SmolLM2-135M, the head, one token"),
]


def _token_rows(format: str, columns: int, count: int) -> Mapping[str, Any]:
    return _linear(count, columns, 137, format, bias=(137,))


QUANTIZED_LINEAR = Evidence(
    formula="x @ unpack(packed).T + bias",
    cases=_CASES,
    tolerance=_TOLERANCE,
    gradient_tolerance=_TOLERANCE,
    error_bound=error_bound_of(spread(reference), dtype_of=(0,)),
    gradient_error_bound=error_bound_of(spread(backward), dtype_of=(7,)),
    min_bytes=min_bytes,
    unfused=unfused,
    sample=_sample,
    large=[Case(f"token_{name.lower()}", _linear(1, 4096, 4096, name)) for name in ("Q8_0", "Q4_1", "Q4_K", "MXFP4")],
    sweep=lambda rows, width: _linear(rows, max(width // 256, 1) * 256, 4096, "Q8_0"),
    rows=[
        Rows(f"tokens of {columns}, {format}", partial(_token_rows, format, columns), {"x": 0, "y": 0})
        for format, columns in (("Q8_0", 96), ("Q4_K", 2048), ("MXFP4", 1056), ("FP8_BLOCK", 1160))
    ],
    peers="""
| peer | activation | formats | backward | CPU |
|---|---|---|---|---|
| gguf + torch's `linear` | exact | all; the whole weight is unpacked | yes | yes |
| transformers' GGUF layers | exact | some, by a kernel | no | unpacked |
| llama.cpp | rounded to 8 bits | all | no | yes |
| torchao, int8 and int4 weights | 16 bits | its own | no | yes |
| torch_npu, `npu_weight_quant_batchmatmul` | 16 bits | int8 and int4 in groups | no | no |
| fusedops | exact | those of GGUF and of the Hub | of x and bias | yes |
""",
    sharded=(
        "any dim except the last; or the outputs, the first dim of `packed`",
        "rows: `packed` and `bias` replicated; outputs: `bias` and scales of rows as `packed`, `x` replicated",
        "of x: as x, `Partial` with sharded outputs; of bias: `Partial` with sharded rows, as it is with outputs",
    ),
)


def _int8_unfused(a: Int8LinearArgs) -> Tensor:
    """Compute the op as models do without fused ops: the weight is unpacked, and x is not rounded."""
    dtype = int8_linear.output_dtype(a)
    x = (a.x if a.x_scale is None or a.x.is_floating_point() else a.x * a.x_scale[..., None]).to(dtype)
    x = x if a.smooth is None else x / a.smooth.to(dtype)
    weight = (a.weight * a.weight_scale[:, None]).to(dtype)
    return torch.nn.functional.linear(x, weight, None if a.bias is None else a.bias.to(dtype))


def _int8_error_bound(absolute: float, a: Int8LinearArgs) -> Tensor:
    """Return 0: before the result is rounded to its dtype, its bits are those of the reference."""
    return torch.zeros((*a.x.shape[:-1], a.weight.shape[0]), dtype=torch.float64)


def _int8_min_bytes(x: Any, x_scale: Any, weight: Any, *rest: Any) -> Mapping[Any, int]:
    """Read x and weight, write y; read grad and weight, write dx. The vectors once."""
    vectors = [each for each in (x_scale, *rest[:3]) if each is not None]
    moved = sum(prod(each.shape) * each.dtype.itemsize for each in (x, weight, *vectors))
    moved += prod(x.shape[:-1]) * weight.shape[0] * max(x.dtype.itemsize, 2)
    return {"forward": moved, "backward": moved}


def _int8(rows: tuple[int, ...], columns: int, outputs: int, **others: Any) -> dict[str, Any]:
    """Return the call of rows of x."""
    named = {"x": (*rows, columns), "x_scale": None, "weight": (outputs, columns), "weight_scale": (outputs,)}
    return {**named, **others}


def _int8_rows(columns: int, count: int) -> Mapping[str, Any]:
    return _int8((count,), columns, 37, bias=(37,), smooth=(columns,))


_VECTORS: dict[str, Any] = {"bias": (70,), "smooth": (70,)}
INT8_LINEAR = Evidence(
    formula="(round(x / x_scale) @ weight.T) * x_scale * weight_scale + bias",
    cases=[
        Case("every_option", _int8((5,), 70, 70, x_scale=(5,), **_VECTORS)),
        Case("rows_of_their_own_scale", _int8((9,), 70, 70, **_VECTORS)),
        Case("one_row", _int8((1,), 70, 133)),
        Case("many_rows", _int8((203,), 65, 131, bias=(131,)), "more rows than one block of a kernel"),
        Case("bert_up", _int8((128,), 768, 3072, bias=(3072,)), "BERT base, one sentence"),
    ],
    tolerance=tolerances((0.0, 0.0), (0.0, 0.0)),
    gradient_tolerance=_TOLERANCE,
    error_bound=_int8_error_bound,
    gradient_error_bound=error_bound_of(int8_linear.backward, dtype_of=(0, 5)),
    min_bytes=_int8_min_bytes,
    unfused=_int8_unfused,
    sample=lambda batch, length: _int8((batch, length), 48, 6, x_scale=(batch, length), bias=(6,)),
    large=[
        Case("bert_up_8x128", _int8((1024,), 768, 3072, bias=(3072,)), "BERT base"),
        Case("token", _int8((1,), 4096, 4096)),
    ],
    sweep=lambda rows, width: _int8((rows,), width, 4096),
    rows=[Rows(f"tokens of {k}", partial(_int8_rows, k), {"x": 0, "y": 0}) for k in (31, 1100)],
    sharded=(
        "any dim except the last; or the outputs, the first dim of `weight`",
        "rows: `x_scale` as `x`, the others replicated; outputs: `weight_scale` and `bias` as `weight`, the others "
        "replicated",
        "of x: as x, `Partial` with sharded outputs; of bias: `Partial` with sharded rows, as it is with outputs",
    ),
)
