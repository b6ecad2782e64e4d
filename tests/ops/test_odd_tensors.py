"""Tensors of kinds that calls rarely have: on the meta device, with the negative bit, with NaN, of a graph to come."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops import InvalidInputError


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1)}, {"mask": True}], ids=str)
def test_attention_of_meta_tensors(options: dict[str, Any]) -> None:
    q = torch.empty(1, 2, 4, 8, device="meta", requires_grad=True)
    if "mask" in options:
        options = {"mask": torch.zeros(4, 4, dtype=torch.bool, device="meta")}
    y = fusedops.attention(q, q, q, **options)
    (gradient,) = torch.autograd.grad(y.sum(), q)
    for each in (y, gradient):
        assert each.is_meta
        assert each.shape == (1, 2, 4, 8)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_a_fully_masked_row_of_a_query_that_is_not_finite(backend: str, number: float) -> None:
    q, k = torch.full((1, 1, 1, 8), number, requires_grad=True), torch.zeros(1, 1, 3, 8, requires_grad=True)
    y = fusedops.attention(q, k, k, torch.ones((), dtype=torch.bool), backend=backend)
    assert torch.equal(y, torch.zeros(1, 1, 1, 8))
    for gradient in torch.autograd.grad(y.sum(), (q, k)):
        assert not gradient.any()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize(("size", "scale"), [(torch.finfo(torch.float32).max, None), (1e20, 1e20)])
def test_a_masked_key_whose_score_overflows(backend: str, size: float, scale: float | None) -> None:
    q, k = torch.full((1, 1, 2, 8), 3.0, requires_grad=True), torch.zeros(1, 1, 3, 8)
    k[..., 1, :] = size
    v, mask = torch.ones(1, 1, 3, 8, requires_grad=True), torch.tensor([False, True, False])
    y = fusedops.attention(q, k, v, mask, scale, backend=backend)
    assert torch.equal(y, torch.ones(1, 1, 2, 8))
    dq, dv = torch.autograd.grad(y.sum(), (q, v))
    assert not dq.any()
    assert torch.equal(dv[0, 0, :, 0], torch.tensor([1.0, 0.0, 1.0]))


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_a_seed_with_the_negative_bit(backend: str) -> None:
    seed, x, bias = torch._neg_view(torch.tensor([3])), torch.ones(4, 64), torch.zeros(64, requires_grad=True)
    want = fusedops.bias_dropout(x, bias, 0.5, seed=-3, backend=backend)
    got = fusedops.bias_dropout(x, bias, 0.5, seed=seed, backend=backend)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y.sum(), bias)[0] for y in (got, want)))


@pytest.mark.parametrize("backend", ["cpu", "eager", "triton"])
def test_a_denominator_with_the_negative_bit(backend: str) -> None:
    logits, target = torch.zeros(2, 4, requires_grad=True), torch.tensor([1, 3])
    denominator = torch._neg_view(torch.tensor(-2.0))
    loss = fusedops.cross_entropy(logits, target, denominator=denominator, backend=backend)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(math.log(4))
    assert gradient[0].tolist() == pytest.approx([0.125, -0.375, 0.125, 0.125])


def test_targets_with_the_negative_bit() -> None:
    target, logits, weight = torch._neg_view(torch.tensor([1, 2, 3])), torch.randn(3, 5), torch.randn(5, 5)
    with pytest.raises(InvalidInputError, match="got target -1"):
        fusedops.cross_entropy(logits, target)
    with pytest.raises(InvalidInputError, match="got target -1"):
        fusedops.linear_cross_entropy(logits, weight, target)
    twice = torch._neg_view(torch.tensor([-1, -2, -3]))
    assert torch.equal(fusedops.cross_entropy(logits, twice), fusedops.cross_entropy(logits, twice.resolve_neg()))


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("width", [4, 3, 67])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_row_with_nan_under_causal(width: int, special: float, dtype: torch.dtype) -> None:
    x = torch.randn(width, width, dtype=dtype)
    x[1, 0] = special
    gradients: list[Tensor] = []
    for backend in ("cpu", "eager"):
        given = x.clone().requires_grad_()
        y = fusedops.scaled_masked_softmax(given, causal=True, backend=backend)
        gradients += torch.autograd.grad(y, given, torch.ones_like(y))
    assert gradients[0][1].isnan().all()
    torch.testing.assert_close(*gradients, equal_nan=True, atol=1e-2, rtol=1e-2)


Traced = tuple[Callable[..., Any], tuple[Any, ...]]
FX: dict[str, Traced] = {
    "seed": (lambda x, seed: fusedops.bias_dropout(x, None, 0.5, seed=seed), (torch.ones(4, 8), torch.tensor([3]))),
    "seed of the add form": (
        lambda x, seed: fusedops.bias_dropout_add(x, None, x, 0.5, seed=seed),
        (torch.ones(4, 8), torch.tensor([3])),
    ),
    "module": (fusedops.nn.BiasDropoutAdd(0.0), (torch.ones(4, 8), torch.ones(8), torch.ones(4, 8))),
}


@pytest.mark.parametrize(("function", "args"), FX.values(), ids=FX)
def test_fx_graphs_have_seeds(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    assert torch.equal(torch.fx.symbolic_trace(function)(*args), function(*args))
