"""Kernels that compute the formulas of an op: its reference, and its backward in plain torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fusedops.ops import OPS


def forward_of(name: str) -> Callable[..., Any]:
    """Return a forward kernel that computes the reference of an op, with its saved values."""
    op = OPS[name]

    def forward(*args: Any) -> Any:
        # a call that changes nothing may return an argument itself
        return _each(
            op.reference_with_saved(*args),
            lambda y: y.clone() if any(y is arg for arg in args) and y.is_contiguous() else y.contiguous(),
        )

    return _with_parameters(forward, (*op.parameters, "save") if op.saved else op.parameters)


def backward_of(name: str) -> Callable[..., Any]:
    """Return a backward kernel that computes the backward formulas of an op."""
    op = OPS[name]

    def backward(*args: Any) -> Any:
        return _each(op.backward(*args), Tensor.contiguous)

    return _with_parameters(backward, op.backward_parameters)


def _with_parameters(function: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    by = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(name, by) for name in names])
    return function


def _each(results: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(results, Tensor):
        return change(results)
    return tuple(None if each is None else change(each) for each in results)
