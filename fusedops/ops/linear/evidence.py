"""Evidence of linear: cases, tolerances, error bounds, bytes, the unfused form."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, finite_size, tolerances
from fusedops.dtypes import compute_dtype
from fusedops.ops.linear.linear import ACTIVATIONS, act_of, sum_of

_TOLERANCE = tolerances((5e-7, 5e-6), (1e-14, 1e-13))
_SLOPE = 1.2  # at most, of silu and GELU, and of their slopes


def unfused(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Compute the op as models do without fused ops."""
    y = torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return y if activation is None else act_of(activation)(y)


def min_bytes(x: Any, weight: Any, bias: Any, activation: str | None) -> Mapping[Any, int]:
    """Read x, weight and bias, write y; read grad, x and weight, write the gradients."""
    of_y = prod(x.shape[:-1]) * weight.shape[0] * x.dtype.itemsize
    read = sum(prod(each.shape) * each.dtype.itemsize for each in (x, weight, bias) if each is not None)
    return {"forward": read + of_y, "backward": 2 * read + of_y}


class _Sum:
    """The sum that the activation takes, and its largest error, in float64."""

    def __init__(self, absolute: float, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.u = sum_of(x.double(), weight.double(), None if bias is None else bias.double())
        size = finite_size(x) @ finite_size(weight).t()
        self.size = size if bias is None else size + finite_size(bias)
        self.error = absolute * self.size


def _arithmetic(absolute: float, x_dtype: torch.dtype) -> float:
    """Return the tolerance of the arithmetic, which may be narrower than a result's dtype."""
    return max(absolute, _TOLERANCE[torch.float32].absolute) if compute_dtype(x_dtype) is torch.float32 else absolute


def error_bound(
    absolute: float, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *save: Any
) -> Tensor:
    """Return ``absolute`` times the sum of the magnitudes of the terms, by the slope of the activation."""
    absolute = _arithmetic(absolute, x.dtype)
    of = _Sum(absolute, x, weight, bias)
    slope, largest = 1.0, torch.finfo(compute_dtype(x.dtype)).max
    overflows = of.size >= largest / 2
    if activation == "relu2":
        slope = 2 * finite_size(of.u) + of.error
        overflows |= of.size >= math.sqrt(largest) / 2
    elif activation is not None:
        slope = _SLOPE
    error = of.error * slope + (0.0 if activation is None else 4 * absolute * finite_size(of.u))
    return error.masked_fill(overflows, math.inf)


def gradient_error_bound(
    absolute: float,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the same of the gradients of x, weight and bias."""
    absolute = _arithmetic(absolute, x.dtype)
    size = finite_size(grad)
    error, overflows = torch.zeros_like(size), size >= math.inf
    if activation is not None:
        of = _Sum(absolute, x, weight, bias)
        largest = torch.finfo(compute_dtype(x.dtype)).max
        overflows = of.size >= largest / 2  # or the slope is of another number
        if activation == "relu2":
            error, size = size * 2 * of.error, size * 2 * finite_size(of.u)
        elif activation == "relu":
            error = size * (of.u.abs() <= of.error)  # on either side of the step
        else:
            error, size = size * (_SLOPE * of.error + 4 * absolute), size * _SLOPE
    rows = (prod(grad.shape[:-1]), grad.shape[-1])
    inputs = finite_size(x).reshape(rows[0], x.shape[-1])
    unknown = overflows.reshape(rows)

    def bound(one: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        total = one(size.reshape(rows)) * absolute + one(error.reshape(rows))
        largest = torch.finfo(compute_dtype(dtype)).max
        beyond = (one(size.reshape(rows)) >= largest / 2) | (one(unknown.double()) > 0)
        return total.masked_fill(beyond, math.inf)

    of_weight = finite_size(weight)
    return (
        bound(lambda g: g @ of_weight, x.dtype).reshape(x.shape),
        bound(lambda g: g.t() @ inputs, weight.dtype),
        None if bias is None else bound(lambda g: g.sum(0), bias.dtype),
    )


def _linear(rows: int, columns: int, outputs: int, **others: Any) -> dict[str, Any]:
    """Return the call of rows of x."""
    return {"x": (rows, columns), "weight": (outputs, columns), **others}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    return {"x": (batch, length, 48), "weight": (6, 48), "bias": (6,), "activation": "silu"}


def _token_rows(count: int) -> Mapping[str, Any]:
    return _linear(count, 1100, 137, bias=(137,), activation="gelu")


LINEAR = Evidence(
    formula="activation(x @ weight.T + bias)",
    cases=[
        Case("every_option", _linear(5, 70, 7, bias=(7,), activation="gelu_tanh")),
        Case("long_rows", _linear(6, 1100, 37, bias=(37,))),
        Case("one_row", _linear(1, 70, 5)),
        *(Case(f"each_{name}", _linear(7, 35, 21, bias=(21,), activation=name)) for name in ACTIVATIONS),
        Case("many_rows", _linear(203, 65, 131, bias=(131,)), "more rows than one block of a kernel"),
        Case("bert_up", _linear(128, 768, 3072, bias=(3072,), activation="gelu"), "BERT base, one sentence"),
    ],
    tolerance=_TOLERANCE,
    gradient_tolerance=_TOLERANCE,
    error_bound=error_bound,
    gradient_error_bound=gradient_error_bound,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=_sample,
    large=[Case("bert_up_8x128", _linear(1024, 768, 3072, bias=(3072,), activation="gelu"), "BERT base")],
    sweep=lambda rows, width: _linear(rows, width, 4096),
    rows=[Rows("tokens", _token_rows, {"x": 0, "y": 0})],
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
