"""Calls that raise an error of fusedops, for the tables of error texts: ops, and backends with one kernel."""

from collections.abc import Callable
from typing import Any

import torch
from state import keep_backends

import fusedops

X = torch.ones(2, 4)
FIVE = torch.ones(2, 3, 2, 4, 4)
META = torch.ones(2, 4, device="meta")
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
SOFTMAX = "scaled_masked_softmax"
GELU = "x, bias, approximate"
DROPOUT = "x, bias, p, training, seed"
SOFTMAX_FORM = "x, mask, scale, causal"
INVALID = fusedops.InvalidInputError
POLICY = fusedops.PolicyError
PLUGIN = fusedops.PluginError
NO_BACKEND = fusedops.NoBackendError


def softmax(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fusedops.scaled_masked_softmax(*args, **kwargs)


def gated(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fusedops.swiglu(*args, **kwargs)


def gelu(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fusedops.bias_gelu(*args, **kwargs)


def dropout(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fusedops.bias_dropout(*args, **kwargs)


def made(
    *constraints: Any, op: str = "bias_gelu", direction: Any = "forward", form: str = GELU, result: str = "x"
) -> Any:
    return fusedops.kernel(op, *constraints, direction=direction)(eval(f"lambda {form}: {result}"))


def backend(*kernels: Any, name: str = "mine", devices: Any = ("cpu",), **more: Any) -> fusedops.Backend:
    return fusedops.Backend(name, devices, 500, kernels, **more)


def registering(*kernels: Any, **fields: Any) -> Callable[[], Any]:
    return lambda: fusedops.register(backend(*kernels, **fields))


def alone(*kernels: Any, **fields: Any) -> None:
    """Register a backend beside eager alone: the reasons of other backends are no part of a text here."""
    keep_backends("eager")
    fusedops.register(backend(*kernels, **fields))


def registered(
    *constraints: Any, call: Callable[[], Any], op: str = "bias_gelu", form: str = GELU, **fields: Any
) -> Callable[[], Any]:
    """A call where a backend with such a kernel is the only one allowed, and eager the only other one."""

    def run() -> None:
        alone(made(*constraints, op=op, form=form), **fields)
        with fusedops.use("mine", fallback="raise"):
            call()

    return run


GOOD = made()


def with_mine(then: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        alone(GOOD)
        then()

    return run


def unavailable() -> fusedops.Unavailable:
    return fusedops.Unavailable("libmine.so is missing", "install libmine")
