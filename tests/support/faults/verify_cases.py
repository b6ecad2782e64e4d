"""Wrong kernels, and paths of a call, for the tests of verify."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops.testing import OPS

OP = OPS["scaled_masked_softmax"]

softmax = fusedops.scaled_masked_softmax

X = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))


def wrong(y: Tensor) -> Tensor:
    y = y.clone()
    y.view(-1)[min(5, y.numel() - 1)] += 0.25
    return y


def changed(function: Callable[..., Any], change: Callable[[Any], Any] | None) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        results = function(*args, **kwargs)
        return results if change is None else change(results)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run
