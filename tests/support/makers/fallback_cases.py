"""Constraints and calls shared by the tests of explain, errors and warnings."""

from __future__ import annotations

from typing import Any

import torch

import fusedops
from fusedops.constraints import Dim, DType

OP = "scaled_masked_softmax"

SHORT = (Dim("x", (-1,), at_most=8), DType("x", torch.float32))

X = torch.ones(2, 4)

LONG = torch.ones(2, 9)


def softmax(x: torch.Tensor = X, *args: Any, **kwargs: Any) -> torch.Tensor:
    return fusedops.scaled_masked_softmax(x, *args, **kwargs)
