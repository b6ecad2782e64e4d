"""The results of swiglu and geglu for special values, at clamps, and for extreme factors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from cpu_values import assert_close
from torch import Tensor

import fusedops

pytestmark = pytest.mark.usefixtures("on_cpu")

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": fusedops.swiglu,
    "gpt_oss": lambda *args: fusedops.swiglu(*args, limit=1.5, alpha=1.702, offset=1.0),
    "geglu_tanh": fusedops.geglu,
    "geglu_erf": lambda *args: fusedops.geglu(*args, approximate="none"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name: str) -> None:
    f, inf = FUNCTIONS[name], math.inf
    gate = torch.tensor([-inf, -1e30, -200.0, -90.0, -0.0, 0.0, 200.0, 1e30, inf, math.nan])
    y = f(gate, torch.ones_like(gate))
    factor = 2.0 if name == "gpt_oss" else 1.0
    largest = 1.5 / (1 + math.exp(-1.702 * 1.5)) if name == "gpt_oss" else None
    assert not y[:3].any()
    assert y[3].abs() < 1e-30
    assert not y[4:6].any()
    for at, value in ((6, 200.0), (7, 1e30), (8, inf)):
        assert y[at] == pytest.approx(factor * (value if largest is None else largest), rel=1e-6)
    assert y[9].isnan()
    assert f(torch.ones(1), torch.tensor([math.nan])).isnan()


def test_a_clamp_stops_the_gradient_beyond_its_bounds() -> None:
    gate = torch.tensor([1.0, 1.5, 1.6, math.nan, 1.0, 1.0, 1.0], requires_grad=True)
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.5, -1.6, math.nan], requires_grad=True)
    y = fusedops.swiglu(gate, up, limit=1.5)
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.ones(7))
    assert (dgate != 0).tolist() == [True, True, False, False, True, True, True]
    assert (dup != 0).tolist() == [True, True, True, True, True, False, False]
    free = torch.autograd.grad(fusedops.swiglu(gate, up), (gate, up), torch.ones(7))
    assert free[0][3].isnan()
    assert free[1][3].isnan()
    assert free[0][6].isnan()


@pytest.mark.parametrize("alpha", [0.0, -1.0, 3e38, -3e38])
def test_alphas(alpha: float) -> None:
    gate, up = torch.tensor([-2.0, -0.5, 0.0, 1e-3, 3.0, math.inf]), torch.ones(6)
    wide = gate[:5].double()
    assert_close(fusedops.swiglu(gate[:5], up[:5], alpha=alpha), wide * torch.sigmoid(alpha * wide))
    if alpha < 0:
        assert fusedops.swiglu(gate, up, alpha=alpha)[5] == 0
    leaf = gate[:5].requires_grad_()
    (gradient,) = torch.autograd.grad(fusedops.swiglu(leaf, up[:5], alpha=alpha).sum(), leaf)
    slope = torch.where(leaf * alpha > 0, 1.0, torch.where(leaf == 0, 0.5, 0.0))
    if abs(alpha) > 1:
        assert torch.equal(gradient, slope)


def test_a_sigmoid_that_is_zero_gives_zero_for_the_largest_numbers() -> None:
    gate = torch.tensor([-150.0, -1e4, -math.inf], requires_grad=True)
    y = fusedops.swiglu(gate, torch.zeros(3), offset=3e38)
    (gradient,) = torch.autograd.grad(y.sum(), gate)
    assert not y.any()
    assert not gradient.any()
