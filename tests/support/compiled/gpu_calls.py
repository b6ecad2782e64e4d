"""Calls of the tests in tests/gpu: which device they are on, and the results of a call on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops import Case, Op, testing

DEVICE = os.environ.get("GPU_TESTS_ON", "cuda")
CUDA = DEVICE == "cuda"
HERE = not CUDA or (os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available())
SOFTMAX = testing.OPS["scaled_masked_softmax"]


def softmax_of(x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Return the softmax with a scale."""
    return fusedops.scaled_masked_softmax(x, mask, 0.125, causal=causal)


def of_backends() -> Iterator[tuple[str, Op]]:
    """Yield each backend that is made for this device, with each of its ops."""
    for info in fusedops.backends():
        if info.state == "ready" and DEVICE in info.device_types:
            yield from ((info.name, testing.OPS[name]) for name in dict.fromkeys(info.ops) if name in testing.OPS)


def small_cases(op: Op) -> list[Case]:
    """Return calls whose rows end inside a block."""
    if op.evidence.sweep is None:
        return [testing.shrunk(case, 2**11, rows=1) for case in op.evidence.cases[:2]]
    return [Case(f"{width} columns", dict(op.evidence.sweep(21, width))) for width in (33, 1000)]


def results(op: Op, args: tuple[Any, ...], want: testing.Expected) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Return the outputs of a call, and the gradients by parameter name."""
    leaves = [
        arg.detach().requires_grad_() if name in want.gradients else arg for name, arg in zip(op.parameters, args)
    ]
    outputs = op.as_tuple(op.call_public(*leaves))
    inputs = {name: leaves[op.parameters.index(name)] for name in want.gradients}
    pairs = [(y, grad.to(y.dtype).to(y.device)) for y, grad in zip(outputs, want.grads) if _has_gradient(y)]
    gradients = torch.autograd.grad([y for y, _ in pairs], [*inputs.values()], [g for _, g in pairs], allow_unused=True)
    found = {name: each for name, each in zip(inputs, gradients) if each is not None}
    return tuple(y.detach() if isinstance(y, Tensor) else y for y in outputs), found


def _has_gradient(y: Any) -> bool:
    return isinstance(y, Tensor) and y.requires_grad


def assert_right(op: Op, args: tuple[Any, ...], want: testing.Expected) -> tuple[Tensor, ...]:
    """Assert that a call and its gradients are within the op's limits; return them all."""
    outputs, gradients = results(op, args, want)
    for name, y, wide in zip(op.outputs, outputs, want.outputs):
        if y is not None:
            testing.assert_within(y.cpu(), wide, want.limits[f"output {name}"], f"{op.name} {name}")
    for name, gradient in gradients.items():
        what = f"gradient of {name}"
        testing.assert_within(gradient.cpu(), want.gradients[name], want.limits[what], f"{op.name} {what}")
    return *(y for y in outputs if y is not None), *gradients.values()
