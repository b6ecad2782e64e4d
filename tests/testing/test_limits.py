"""Limits where numbers overflow, and where dtypes differ: found by the fuzzer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusedops import testing

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("sign", [1, -1])
def test_an_overflow_within_the_limit_has_either_sign(sign: int) -> None:
    """0 within 1e39 is any float32, and inf of both signs."""
    result, zero = torch.tensor([sign * math.inf]), torch.zeros(1).double()
    testing.assert_within(result, zero, torch.tensor([1e39], dtype=torch.float64), "y")
    with pytest.raises(AssertionError, match="beyond the tolerance in 1 of 1"):
        testing.assert_within(result, zero, torch.tensor([1e38], dtype=torch.float64), "y")
    with pytest.raises(AssertionError, match="beyond the tolerance in 1 of 1"):
        testing.assert_within(
            result, torch.tensor([-sign * 3.4e38], dtype=torch.float64), torch.tensor([1e37], dtype=torch.float64), "y"
        )


def gradient_limits(x: Tensor, weight: Tensor, eps: float = 1e-5) -> dict[str, Tensor]:
    args = (x, weight, None, eps)
    want = testing.expected(testing.OPS["layer_norm"], args, grad=torch.full_like(x, 0.5))
    return {name: want.limits[f"gradient of {name}"] for name in ("x", "weight")}


@pytest.mark.parametrize(
    ("x", "weight", "eps"),
    [
        ([-LARGEST], [1.0], 1e-5),
        ([5.0], [LARGEST], 1e-5),
        ([60.0], [LARGEST], 2.0**62),
        ([-LARGEST, 0.0], [1.0, 1.0], 1e-5),
    ],
    ids=["x", "weight", "weight and eps", "variance"],
)
def test_a_row_of_layer_norm_that_may_overflow_has_no_limit(x: list[float], weight: list[float], eps: float) -> None:
    assert gradient_limits(torch.tensor(x), torch.tensor(weight), eps)["x"].isinf().all()
    finite = gradient_limits(torch.tensor(x).clamp(-60, 60), torch.tensor(weight).clamp(max=60.0))["x"]
    assert finite.isfinite().all()
    assert finite.max() < 10.0


def test_the_gradient_of_a_float64_weight_beside_a_float32_x_is_that_of_float32_arithmetic() -> None:
    x, weight = torch.randn(8, 5), torch.ones(5)
    narrow, mixed = gradient_limits(x, weight)["weight"], gradient_limits(x, weight.double())["weight"]
    assert (mixed > 0.5 * narrow).all()
    assert (gradient_limits(x.double(), weight.double())["weight"] < 1e-5 * narrow).all()
