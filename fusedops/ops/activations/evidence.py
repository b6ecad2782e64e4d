"""Evidence of the activations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, rows_of_two_widths, tolerances


def _unfused(x: Tensor) -> Tensor:
    return torch.square(torch.relu(x))


def _min_bytes(x: Any) -> Mapping[Any, int]:
    size = math.prod(x.shape) * x.dtype.itemsize
    return {"forward": 2 * size, "backward": 3 * size}


def _error_bound(absolute: float, x: Tensor) -> Tensor:
    y = x.double().relu().square()
    return (absolute * y).masked_fill(y > torch.finfo(x.dtype).max, math.inf)


def _gradient_error_bound(absolute: float, grad: Tensor, x: Tensor) -> Tensor:
    size = (grad.double() * 2 * x.double().relu()).abs()
    return (absolute * size).masked_fill(size > torch.finfo(x.dtype).max, math.inf)


SQUARED_RELU = Evidence(
    formula="relu(x) ** 2",
    cases=[Case("nemotron", {"x": (2, 16, 96)}, "Nemotron"), Case("ragged", {"x": (3, 5, 101)}, "sizes that divide nothing")],
    tolerance=tolerances((1e-6, 1e-6), (1e-14, 1e-14)),
    gradient_tolerance=tolerances((1e-6, 1e-6), (1e-14, 1e-14)),
    error_bound=_error_bound,
    gradient_error_bound=_gradient_error_bound,
    min_bytes=_min_bytes,
    unfused=_unfused,
    rows=rows_of_two_widths(lambda count, width: {"x": (count, width)}, "x", "y"),
)
