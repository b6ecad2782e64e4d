"""The generic error bound: float32 is within it, and it is not far above the errors of float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops._contract.rounding import error_bound_of

FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "1 - x": lambda x, y: 1 - x,
    "x * y": lambda x, y: x * y,
    "x / y": lambda x, y: x / y,
    "-x * abs(y)": lambda x, y: -x * y.abs(),
    "exp": lambda x, y: torch.exp(x * y),
    "sigmoid": lambda x, y: torch.sigmoid(x) * y,
    "tanh": lambda x, y: (1 + torch.tanh(x)) * y,
    "erf": lambda x, y: (1 - torch.erf(x)) * y,
    "gelu": lambda x, y: torch.nn.functional.gelu(x) * y,
    "relu": lambda x, y: (x * y).relu(),
    "square": lambda x, y: (x - y).square(),
    "rsqrt": lambda x, y: torch.rsqrt((x - y).square() + 0.1),
    "mean": lambda x, y: (x * y).mean(0),
    "product": lambda x, y: x.view(16, 16) @ y.view(16, 16).t(),
    "step": lambda x, y: (x * y > 0).to(x.dtype),
    "clamp": lambda x, y: (x * y).clamp(-1.0, 1.0),
    "masked": lambda x, y: torch.where(x > 0, (x + y).masked_fill(y > 1, 2.0), 0.5),
    "parts": lambda x, y: torch.stack((torch.cat((x, y))[7:27], (x * y)[:20].expand(20)), -1).flatten(),
    "sum": lambda x, y: (x * y).sum(0),
    "sum of equal terms": lambda x, y: x[:1].expand(2048).sum(0),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_float32_is_within_the_bound_of_a_formula_and_near_it(name: str) -> None:
    formula, worst = FORMULAS[name], 0.0
    bound = error_bound_of(formula)
    for seed in range(20):
        x, y = torch.randn(2, 256, generator=torch.Generator().manual_seed(seed))
        error = (formula(x, y).double() - formula(x.double(), y.double())).abs()
        limit = bound(1e-6, x, y)
        assert (error <= limit).all()
        worst = max(worst, float(error.square().mean().sqrt() / limit.square().mean().sqrt()))
    assert worst > 1e-3 or name in ("masked", "step")


def one_by_one(terms: Tensor) -> Tensor:
    total = torch.zeros(())
    for term in terms:
        total += term
    return total


def test_a_sum_of_equal_terms_may_be_added_one_by_one() -> None:
    terms = torch.full((4096,), 0.9698492288589478)
    error = (one_by_one(terms).double() - terms.double().sum()).abs()
    limit = error_bound_of(lambda x: x.sum(0))(1e-6, terms)
    assert error < limit < 1e-3 * terms.sum()


@pytest.mark.parametrize(
    ("formula", "args", "limit"),
    [
        (lambda x: x * x, (torch.tensor([1e30]),), math.inf),  # overflows in float32 alone
        (lambda x: x * x, (torch.tensor([1e30]).double(),), 4e45),
        (lambda x: x * 2, (torch.tensor([math.inf]),), 0.0),  # the same in any arithmetic
        (lambda x: x * 0, (torch.tensor([math.inf]),), 0.0),
        (lambda x: (x * x) * 0, (torch.tensor([1e30]),), math.inf),
    ],
)  # fmt: skip
def test_a_number_beyond_the_arithmetic_has_no_limit(formula: Any, args: Any, limit: float) -> None:
    assert float(error_bound_of(formula)(1e-15, *args)) == pytest.approx(limit, rel=1.0)


def test_an_argument_that_the_op_rounds_first_is_off_by_that() -> None:
    x, residual = torch.tensor([1.0 + 2**-7, 1.0]), torch.ones(2, dtype=torch.bfloat16)
    limit = error_bound_of(lambda x, r: x + r, rounded_to=1)(1e-6, x + 2**-9, residual)
    assert limit.tolist() == pytest.approx([2**-9, 2**-9], rel=0.01)
    limit = error_bound_of(lambda x, r: x + r)(1e-6, x + 2**-9, residual)
    assert (limit < 1e-5).all()


def test_a_step_is_unknown_where_the_number_may_have_either_sign() -> None:
    x = torch.tensor([1.0, 1.0 + 1e-8, 2.0], dtype=torch.float64)
    limit = error_bound_of(lambda x: (x - 1 > 0).to(x.dtype) * 3)(1e-6, x)
    assert limit.tolist() == pytest.approx([3.0, 3.0, 3e-6])


@pytest.mark.parametrize("name", ["sin", "mul_", "split"])
def test_an_operation_without_a_rule_is_an_error(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"got the operation {name}, expected one with a rule here"):
        error_bound_of(lambda x: getattr(x, name)(*[1] * (name != "sin")))(1e-6, torch.ones(2))
