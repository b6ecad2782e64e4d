"""A backend that is each op's own reference: what the conformance kit must pass, on any device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import fusedops
from fusedops._op import OPS


def contiguous(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose results have the strides of the inputs, with the contiguous results that kernels have."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if isinstance(found, torch.Tensor):
            return found.contiguous()
        return tuple(None if each is None else each.contiguous() for each in found)

    run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return run


def backend(name: str = "loopback") -> fusedops.Backend:
    """Every op, forward and backward, without limits."""
    kernels = [
        made
        for op in OPS.values()
        for made in (
            fusedops.kernel(op.name, source="the reference")(contiguous(op.reference)),
            fusedops.kernel(op.name, direction="backward", source="the reference")(contiguous(op.backward)),
        )
    ]
    return fusedops.Backend(name, ("*",), -50, tuple(kernels))


@contextmanager
def registered(made: fusedops.Backend) -> Iterator[fusedops.Backend]:
    """The backend, for a while."""
    fusedops.register(made)
    try:
        yield made
    finally:
        fusedops.unregister(made.name)


@contextmanager
def loopback() -> Iterator[fusedops.Backend]:
    """The loopback backend, for a while."""
    with registered(backend()) as made:
        yield made
