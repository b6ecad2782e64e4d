"""A small call of each op, for the tests of torch's own features: tensors in, a tensor out, the rest fixed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops._op import OPS

OPTIONS: dict[str, dict[str, Any]] = {
    "scaled_masked_softmax": {"scale": 0.3, "causal": True},
    "bias_gelu": {"approximate": "tanh"},
    "bias_dropout": {"p": 0.4, "seed": 3},
    "bias_dropout_add": {"p": 0.4, "seed": 3},
}
every_op = pytest.mark.parametrize("op", OPTIONS)


def inputs(op: str, length: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0, batch: int = 3) -> list[Tensor]:
    """The op's tensors, x first: (batch, length, ...), and one for each other tensor parameter."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    if op == "scaled_masked_softmax":
        return [numbers(batch, 2, length, length + 2), numbers(batch, 1, length, length + 2) > 0.5]
    x, bias = numbers(batch, length, 6), numbers(6)
    return [x, bias, numbers(batch, length, 6)] if op == "bias_dropout_add" else [x, bias]


def public(op: str) -> Callable[..., Tensor]:
    """The public function of the tensors alone."""
    function = getattr(fusedops, op)
    return lambda *tensors: function(*tensors, **OPTIONS[op])


def arguments(op: str, tensors: list[Tensor]) -> tuple[Any, ...]:
    """The arguments of the registered op, and of the reference, in order."""
    return OPS[op].complete(OPS[op].bind(tensors, OPTIONS[op]))


def registered(op: str) -> Callable[..., Tensor]:
    """``torch.ops.fusedops.<op>`` as a function of the tensors alone."""
    return lambda *tensors: getattr(torch.ops.fusedops, op)(*arguments(op, list(tensors)))


def reference(op: str) -> Callable[..., Tensor]:
    """The op's reference as a function of the tensors alone."""
    return lambda *tensors: OPS[op].call_reference(arguments(op, list(tensors)))


def growing(tensors: list[Tensor]) -> list[Tensor]:
    """Copies, with requires_grad where they are floating."""
    return [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors]


def gradients(y: Tensor, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """The gradients of ``y.square().sum()`` by the tensors that require them."""
    return list(torch.autograd.grad(y.square().sum(), [t for t in tensors if t.requires_grad], **options))


def close(got: Any, want: Any) -> None:
    """Equal but for the rounding of float64."""
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def noting_backend(op: str, name: str, ran: list[tuple[Any, ...]], priority: int = -9) -> None:
    """Registers a backend for the CPU, the op's reference, that appends (its name or "<name> backward", arguments)."""
    contract = OPS[op]

    def noting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            ran.append((what, args))
            return function(*args, **kwargs)

        run.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return run

    forward = fusedops.kernel(op)(noting(name, contract.reference))
    backward = fusedops.kernel(op, direction="backward")(noting(f"{name} backward", contract.backward))
    fusedops.register(fusedops.Backend(name, ("cpu",), priority, (forward, backward)))
