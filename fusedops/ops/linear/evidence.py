"""Evidence of linear: cases, tolerances, error bounds, bytes, the unfused form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, tolerances
from fusedops._contract.rounding import error_bound_of
from fusedops.ops.experts.arguments import PLAIN
from fusedops.ops.linear.linear import act_of, backward, reference

_TOLERANCE = tolerances((5e-7, 5e-6), (1e-14, 1e-13))


def unfused(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Compute the op as models do without fused ops."""
    y = torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return y if activation is None else act_of(activation)(y)


def min_bytes(x: Any, weight: Any, bias: Any, activation: str | None) -> Mapping[Any, int]:
    """Read x, weight and bias, write y; read grad, x and weight, write the gradients."""
    of_y = prod(x.shape[:-1]) * weight.shape[0] * x.dtype.itemsize
    read = sum(prod(each.shape) * each.dtype.itemsize for each in (x, weight, bias) if each is not None)
    return {"forward": read + of_y, "backward": 2 * read + of_y}


def _linear(rows: int, columns: int, outputs: int, **others: Any) -> dict[str, Any]:
    """Return the call of rows of x."""
    return {"x": (rows, columns), "weight": (outputs, columns), **others}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    return {"x": (batch, length, 48), "weight": (6, 48), "bias": (6,), "activation": "silu"}


def _token_rows(columns: int, count: int) -> Mapping[str, Any]:
    return _linear(count, columns, 29, bias=(29,), activation="gelu")


LINEAR = Evidence(
    formula="activation(x @ weight.T + bias)",
    cases=[
        Case("every_option", _linear(5, 70, 7, bias=(7,), activation="gelu_tanh")),
        Case("long_rows", _linear(6, 1100, 37, bias=(37,))),
        Case("one_row", _linear(1, 70, 5)),
        *(Case(f"each_{name}", _linear(7, 35, 21, bias=(21,), activation=name)) for name in PLAIN),
        Case("many_rows", _linear(203, 65, 131, bias=(131,)), "more rows than one block of a kernel"),
        Case("bert_up", _linear(128, 768, 3072, bias=(3072,), activation="gelu"), "BERT base, one sentence"),
    ],
    tolerance=_TOLERANCE,
    gradient_tolerance=_TOLERANCE,
    error_bound=error_bound_of(reference, dtype_of=(0,)),
    gradient_error_bound=error_bound_of(backward, dtype_of=(1,)),
    min_bytes=min_bytes,
    unfused=unfused,
    sample=_sample,
    large=[Case("bert_up_8x128", _linear(1024, 768, 3072, bias=(3072,), activation="gelu"), "BERT base")],
    sweep=lambda rows, width: _linear(rows, width, 4096),
    rows=[Rows(f"tokens of {columns}", partial(_token_rows, columns), {"x": 0, "y": 0}) for columns in (31, 1100)],
    peers="""
| peer | activation in the same pass | keeps a copy of the weight | backward | CPU |
|---|---|---|---|---|
| torch's `linear` (MKL, oneDNN; cuBLASLt) | no; on a GPU by `torch.compile` | no | yes | yes |
| torch's packed oneDNN linear (`inductor.freezing`) | yes | yes | no | yes |
| zentorch, `zentorch_linear_unary` | yes | no | no | yes |
| ONNX Runtime, OpenVINO | yes | yes | no | yes |
| fusedops | yes | no | yes | yes |
""",
    sharded=(
        "any dim except the last; or the outputs, the first dim of `weight`",
        "rows: `weight` and `bias` replicated; outputs: `bias` as `weight`, `x` replicated",
        "of x: as x, `Partial` with sharded outputs; of weight and bias: `Partial` with sharded rows, as they are with "
        "outputs",
    ),
)
