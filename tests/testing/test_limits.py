"""Limits where numbers overflow, and where dtypes differ: found by the fuzzer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fusedops import testing
from fusedops_cpu.gated.swiglu import swiglu, swiglu_backward
from fusedops_eager.kernels import KERNELS

(layer_norm_backward,) = [each for each in KERNELS if (each.op, each.direction) == ("layer_norm", "backward")]
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
        ([-LARGEST, 0.0], [1.0, 1.0], 1e-5),
    ],
    ids=["x", "weight", "variance"],
)
def test_a_row_of_layer_norm_that_may_overflow_has_no_limit(x: list[float], weight: list[float], eps: float) -> None:
    assert gradient_limits(torch.tensor(x), torch.tensor(weight), eps)["x"].isinf().all()
    finite = gradient_limits(torch.tensor(x).clamp(-60, 60), torch.tensor(weight).clamp(max=60.0))["x"]
    assert finite.isfinite().all()
    assert finite.max() < 10.0


def test_a_sum_that_overflows_in_torchs_formula_alone_leaves_the_gradients_of_its_kernel_open() -> None:
    args = torch.tensor([[60.0], [1.0]]), torch.full((1,), 3e37), None, 2.0**62
    for kernels, is_open in (((), False), ((layer_norm_backward,), True)):
        want = testing.expected(testing.OPS["layer_norm"], args, grad=torch.ones(2, 1), kernels=kernels)
        assert want.limits["gradient of x"].isinf().flatten().tolist() == [is_open, False]


@pytest.mark.parametrize("alpha", [3e38, -2.4e38, 2.3e38])
def test_a_factor_beyond_float32_leaves_the_results_of_its_kernel_open(alpha: float) -> None:
    args = torch.full((1,), 1e-38), torch.ones(1), None, alpha, 0.0, False
    for kernels in ((), (swiglu, swiglu_backward)):
        limits = testing.expected(testing.OPS["swiglu"], args, grad=torch.ones(1), kernels=kernels).limits
        assert {bool(limit.isinf()) for limit in limits.values()} == {bool(kernels) and abs(alpha) > 2.36e38}


def test_the_gradient_of_a_float64_weight_beside_a_float32_x_is_that_of_float32_arithmetic() -> None:
    x, weight = torch.randn(8, 5), torch.ones(5)
    narrow, mixed = gradient_limits(x, weight)["weight"], gradient_limits(x, weight.double())["weight"]
    assert (mixed > 0.5 * narrow).all()
    assert (gradient_limits(x.double(), weight.double())["weight"] < 1e-5 * narrow).all()
