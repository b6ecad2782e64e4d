"""The error bound of attention's gradients in 16 bits: 5 % more is beyond it, and right kernels are well within."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import reference_kernels
from torch import Tensor

import fusedops
from fusedops import MismatchError, testing
from fusedops.testing import OPS, Case

ATTENTION = OPS["attention"]
SHAPES = {
    "cross": {"q": (2, 4, 19, 64), "k": (2, 2, 45, 64), "v": (2, 2, 45, 64)},
    "causal": {"q": (1, 4, 64, 64), "k": (1, 4, 64, 64), "v": (1, 4, 64, 64), "causal": "upper_left"},
    "long": {"q": (1, 1, 256, 64), "k": (1, 1, 256, 64), "v": (1, 1, 256, 64)},
    "wide": {"q": (1, 2, 64, 128), "k": (1, 1, 128, 128), "v": (1, 1, 128, 128)},
}


def call(shapes: str, dtype: torch.dtype, factor: float) -> tuple[Any, ...]:
    args = testing.arguments(ATTENTION, Case(shapes, SHAPES[shapes]), dtype)
    return (*((each * factor) for each in args[:3]), *args[3:])


def differentiate(args: tuple[Any, ...], backend: str) -> tuple[Tensor, ...]:
    tensors = [each.clone().requires_grad_() for each in args[:3]]
    out = ATTENTION.call_public(*tensors, *args[3:], backend=backend)
    out = out[0] if isinstance(out, tuple) else out
    return torch.autograd.grad(out, tensors, testing.expected(ATTENTION, args).grads[0].to(out.dtype))


def plant(change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> None:
    """Register a backend whose gradients are those of the op's formula, changed."""
    forward, backward = reference_kernels(ATTENTION.name, "planted", [])
    function = backward.function

    def wrong(
        grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, scale: Any, causal: Any,
        window: Any, return_lse: Any, needs: Any,
    ) -> Any:  # fmt: skip
        rest = mask, out, lse, scale, causal, window, return_lse, needs
        return change(function(grad_out, grad_lse, q, k, v, *rest))

    fusedops.register(fusedops.Backend("planted", ("cpu",), 50, (forward, replace(backward, function=wrong))))


every_call = pytest.mark.parametrize("factor", [1.0, 0.1])
every_shape = pytest.mark.parametrize("shapes", SHAPES)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@every_call
@every_shape
@every_dtype
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.usefixtures("fakes")
def test_verify_finds_a_gradient_that_is_5_percent_off(at: int, dtype: torch.dtype, shapes: str, factor: float) -> None:
    plant(lambda grads: (*grads[:at], grads[at] * 1.05, *grads[at + 1 :]))
    # twice the bound is accepted of another backend: not where few probabilities are all of a row
    for against in ("reference", "eager")[: 1 if factor == 1.0 else 2]:
        with fusedops.verify(against), pytest.raises(MismatchError) as error:
            differentiate(call(shapes, dtype, factor), "planted")
        assert error.value.mismatch.result == f"gradient of {'qkv'[at]}"


@every_call
@every_shape
@every_dtype
@pytest.mark.parametrize("backend", ["eager", "cpu", "sdpa"])
def test_right_kernels_are_well_within_the_bound(backend: str, dtype: torch.dtype, shapes: str, factor: float) -> None:
    with fusedops.verify("reference") as report:
        differentiate(call(shapes, dtype, factor), backend)
    assert report.rows
    assert max(row.worst for row in report.rows if row.result.startswith("gradient")) < 0.9
