"""A backend whose kernels are each op's own references: the conformance kit must pass on it, on any device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import fusedops
from fusedops.testing import OPS


def _own(result: torch.Tensor) -> torch.Tensor:
    """Return a contiguous result, of what a reference returns as a view of much memory a copy."""
    result = result.contiguous()
    return result.clone() if result.untyped_storage().nbytes() > result.nbytes else result


def contiguous(function: Callable[..., Any], *parameters: str) -> Callable[..., Any]:
    """Return ``function`` with contiguous results, as kernels have; references have the strides of their inputs.

    Args:
        function: takes its arguments by position.
        *parameters: their names, which the registration of a kernel compares with the op's.
    """

    def run(*args: Any) -> Any:
        results = function(*args)
        if isinstance(results, torch.Tensor):
            return _own(results)
        return tuple(None if each is None else _own(each) for each in results)

    return with_parameters(run, *parameters)


def with_parameters(function: Callable[..., Any], *parameters: str) -> Callable[..., Any]:
    """Return a function of ``*args`` with the signature of named parameters."""

    def kernel(*args: Any) -> Any:
        return function(*args)

    named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in parameters]
    kernel.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return kernel


def forward_parameters(op: fusedops.Op) -> tuple[str, ...]:
    """Return the parameters of a forward kernel."""
    return (*op.parameters, *(["save"] if op.saved else []))


def reference_kernels(op: fusedops.Op, *constraints: Any, backward: bool = True) -> list[fusedops.Kernel]:
    """Return an op's own references as kernels."""
    forward = contiguous(op.reference_with_saved, *forward_parameters(op))
    kernels = [fusedops.kernel(op.name, *constraints, source="the reference")(forward)]
    if backward:
        function = contiguous(op.backward, *op.backward_parameters)
        kernels.append(fusedops.kernel(op.name, direction="backward", source="the reference")(function))
    return kernels


def backend(name: str = "loopback") -> fusedops.Backend:
    """Return a backend with every op, forward and backward, without constraints."""
    return fusedops.Backend(name, ("*",), -50, [item for op in OPS.values() for item in reference_kernels(op)])


@contextmanager
def registered(plugin: fusedops.Backend) -> Iterator[fusedops.Backend]:
    """Register a backend for a block."""
    fusedops.register(plugin)
    try:
        yield plugin
    finally:
        fusedops.unregister(plugin.name)


@contextmanager
def loopback() -> Iterator[fusedops.Backend]:
    """Register the loopback backend for a block."""
    with registered(backend()) as plugin:
        yield plugin
