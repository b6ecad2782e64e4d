"""Error bounds that were too small for a right kernel, by the family of ops. More of them: test_error_bounds.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops.ops.norms import error_bounds
from fusedops.testing import OPS


def test_a_mean_that_is_small_by_chance_moves_as_its_terms_do() -> None:
    x = torch.tensor([[3.0, -3.0, 1e-4, -1e-4]])
    given = (torch.ones(1, 4), x, torch.zeros(1), torch.full((1,), 0.47), torch.ones(4), None, (True, True))
    _, dweight, _ = error_bounds.layer_norm_gradient_error_bound(2e-5, *given)
    assert dweight is not None
    assert float(dweight[2]) > 0.05 * float(dweight[0])  # of the third term little is left but the error of the mean


def test_a_bound_has_no_sign_also_where_a_random_rstd_has_one() -> None:
    x, grad, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    of_both = [
        error_bounds.rms_norm_gradient_error_bound(2e-5, grad, x, rstd, weight, 0.0, (True, True))
        for rstd in (torch.full((3,), -0.7), torch.full((3,), 0.7))
    ]
    for negative, positive in zip(*of_both):
        assert negative is not None
        assert positive is not None
        assert torch.equal(negative, positive)
        assert (negative > 0).all()


def test_a_gradient_of_routing_may_overflow_before_it_is_divided_by_the_total() -> None:
    op, logits = OPS["top_k_routing"], torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    grad = torch.tensor([[2.0] * 4, [1e-3] * 4])
    call = {"logits": logits, "k": 4, "score": "topk_softmax", "normalize": True, "eps": 50.0, "scale": 3e38}
    limit = testing.expected(op, op.prepared(op.bind((), call)), grad=grad).limits["gradient of logits"]
    assert (limit[0].isinf() == (limit[0] != 0)).all()
    assert limit[0].isinf().any()
    assert limit[1].isfinite().all()


def test_attention_of_one_key_has_a_gradient_of_k_in_proportion_to_a_large_q() -> None:
    op, size = OPS["attention"], torch.finfo(torch.float64).max
    q = torch.tensor([0.0, size, 0.0], dtype=torch.float64).view(1, 1, 1, 3)
    k = torch.full_like(q, 1e-3)
    call = op.prepared(op.bind((), {"q": q, "k": k, "v": k.clone()}))
    limit = testing.expected(op, call, grad=torch.ones_like(q)).limits["gradient of k"].flatten()
    assert limit[1] > 1e-16 * 1e-3 * size  # one rounding of grad_out @ v, times q
    assert limit[0] < 1.0
    q = torch.tensor([0.0, 1e160, 0.0], dtype=torch.float64).view(1, 1, 1, 3)  # whose square is inf
    call = op.prepared(op.bind((), {"q": q, "k": k * 1e-160, "v": k}))
    limit = testing.expected(op, call, grad=torch.ones_like(q)).limits["gradient of k"].flatten()
    assert 0 < limit[1] < 1e-6 * 1e160


def test_a_score_that_underflows_has_no_gradient() -> None:
    op, logits = OPS["top_k_routing"], torch.tensor([[-88.9, -23.2, -32.3]])
    call = {"logits": logits, "k": 3, "score": "sigmoid", "normalize": True, "eps": 0.0}
    expected = testing.expected(op, op.prepared(op.bind((), call)), grad=torch.tensor([[-0.1, 1.2, 1.8]]))
    size, limit = expected.gradients["logits"][0].abs(), expected.limits["gradient of logits"][0]
    assert 0 < size[0] < limit[0]  # 2.5e-39 / 8e-11: a score that is no normal number may be 0
    assert limit[2] < 1e-3 * size[2]


@pytest.mark.parametrize("z_loss", [0.0, 1.0])
def test_a_probability_of_a_linear_layer_that_underflows_has_no_gradient(z_loss: float) -> None:
    op, x, bias = OPS["linear_cross_entropy"], torch.tensor([[8.0]]), torch.full((3,), 20.0)
    weight = torch.tensor([[0.0], [-10.95], [-5.0]])
    call = {"x": x, "weight": weight, "target": torch.tensor([0]), "bias": bias, "z_loss": z_loss}
    expected = testing.expected(op, op.prepared(op.bind((), call)), grad=torch.ones(()))
    size, limit = expected.gradients["weight"].flatten().abs(), expected.limits["gradient of weight"].flatten()
    assert 0 < size[1] < limit[1]  # 8 * 9e-39, times 41 by the z-loss: a probability that is no normal number may be 0
    assert limit[2] < 1e-3 * size[2]


def test_a_term_of_attention_may_be_scaled_before_it_is_rounded_to_bfloat16() -> None:
    op, q = OPS["attention"], torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    k = torch.tensor([[300.0, 1.0], [-300.0, 1.0]], dtype=torch.bfloat16).view(1, 1, 2, 2)
    v = torch.tensor([[4.0], [-4.0]], dtype=torch.bfloat16).view(1, 1, 2, 1)
    call = op.prepared(op.bind((), {"q": q, "k": k, "v": v, "scale": 1e-40}))
    expected = testing.expected(op, call, grad=torch.ones(1, 1, 1, 1, dtype=torch.bfloat16))
    size, limit = expected.gradients["q"].flatten().abs(), expected.limits["gradient of q"].flatten()
    assert 0 < size[0] < limit[0]  # 300 * 4e-40: a scaled term is no normal number
    assert limit[1] < 30 * torch.finfo(torch.bfloat16).smallest_normal


def test_a_gradient_of_an_up_projection_of_experts_may_be_0_in_products_of_bfloat16() -> None:
    op, ones = OPS["experts"], torch.ones(1, 1, dtype=torch.bfloat16)
    small = 2.0**-127 * torch.ones(1, 1, 1, dtype=torch.bfloat16)
    call = {"x": 64 * ones, "index": torch.zeros(1, 1, dtype=torch.int64), "weights": ones, "down": small}
    call |= {"up": torch.ones(1, 2, 1, dtype=torch.bfloat16), "activation": "swiglu"}
    expected = testing.expected(op, op.prepared(op.bind((), call)), grad=ones)
    size, limit = expected.gradients["up"].flatten().abs(), expected.limits["gradient of up"].flatten()
    assert (size > 0).all()
    assert (size < limit).all()  # 64 * 64 * 2**-127: the gradient of the activation is no normal number


def test_a_probability_of_attention_that_may_be_0_reaches_infinite_values() -> None:
    op, q = OPS["attention"], torch.ones(1, 1, 1, 1)
    k, v = (torch.tensor(numbers).view(1, 1, 2, 1) for numbers in ([0.0, -200.0], [1.0, -torch.inf]))
    call = op.prepared(op.bind((), {"q": q, "k": k, "v": v, "scale": 1.0}))
    expected = testing.expected(op, call)
    assert expected.outputs[0].isinf().all()  # exp(-200) * -inf
    assert expected.limits["output out"].isinf().all()
    call = op.prepared(op.bind((), {"q": q, "k": k / 10, "v": v, "scale": 1.0}))
    assert testing.expected(op, call).limits["output out"].isfinite().all()


def test_equal_terms_of_experts_may_be_added_one_by_one() -> None:
    terms, index, one = 4099, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    numbers, weight = torch.full((1, terms), 3.7), torch.full((1, terms), 3.47)
    term, total = numbers[0, 0] * weight[0, 0], torch.zeros(())
    for _ in range(terms):
        total += term
    up = {"x": numbers, "up": weight[None], "down": torch.ones(1, terms, 1)}
    down = {"x": one, "up": numbers.view(1, terms, 1), "down": weight[None]}
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("experts", {**up, "index": index, "weights": one, "activation": "relu"}, "saved hidden"),
        ("experts", {**down, "index": index, "weights": one, "activation": "relu"}, "output y"),
        ("experts", {**down, "index": index, "weights": one, "activation": "relu"}, "gradient of weights"),
        ("grouped_matmul", {"x": numbers, "weight": weight[None], "offsets": torch.tensor([1])}, "output y"),
    ]
    error = float((total.double() - terms * term.double()).abs())
    for name, call, of in calls:
        op = OPS[name]
        grad = torch.ones(1, terms if "activation" in call and call["down"].shape[1] > 1 else 1)
        limit = testing.expected(op, op.prepared(op.bind((), call)), grad=grad).limits[of]
        assert limit / 30 < error < limit, of
    op, cancels = OPS["experts"], torch.randn(1, terms, generator=torch.Generator().manual_seed(0))
    expected = testing.expected(op, op.prepared(op.bind((), {**calls[0][1], "x": cancels})))
    assert expected.limits["saved hidden"] < 0.002


def test_numbers_of_experts_may_overflow_before_they_are_multiplied_by_a_small_one() -> None:
    op, largest = OPS["experts"], torch.finfo(torch.float32).max
    call = {"x": torch.tensor([[1.0, -torch.inf]]), "index": torch.zeros(1, 1, dtype=torch.int64)}
    call |= {"weights": torch.ones(1, 1), "up": torch.full((1, 4, 2), 2.0), "down": torch.zeros(1, 2, 2)}
    for number, unknown in ((1.0, False), (largest, True)):  # the sum is then inf - inf
        call["x"][0, 0] = number
        expected = testing.expected(op, op.prepared(op.bind((), call)), grad=torch.ones(1, 2))
        assert expected.gradients["up"][0, 3, 0] == 0
        assert expected.limits["gradient of up"][0, 3, 0].isinf() == unknown
    call |= {"x": torch.ones(1, 2), "weights": torch.full((1, 1), largest)}  # times an activation of 15
    expected = testing.expected(op, op.prepared(op.bind((), call)), grad=torch.full((1, 2), 0.01))
    assert expected.gradients["down"].abs().max() < largest
    assert expected.limits["gradient of down"].isinf().all()


def test_a_gradient_of_gated_rms_norm_may_overflow_before_it_is_multiplied_by_an_activation_of_0() -> None:
    op, largest = OPS["gated_rms_norm"], torch.finfo(torch.float32).max
    for weight, unknown in ((1.0, False), (largest, True)):
        call = {"x": torch.zeros(1), "gate": torch.zeros(1), "weight": torch.full((1,), weight)}
        expected = testing.expected(op, op.prepared(op.bind((), call)), grad=torch.full((1,), 2.0))
        for name in ("x", "gate"):
            assert expected.gradients[name] == 0
            assert expected.limits[f"gradient of {name}"].isinf() == unknown


def test_products_of_gated_rms_norm_may_overflow_in_another_order() -> None:
    op, largest = OPS["gated_rms_norm"], torch.finfo(torch.float32).max
    for weight, unknown in ((1.0, False), (0.7 * largest, True)):  # times a normalized number of 1e-3
        call = {"x": torch.tensor([1.0, 1e-3]), "gate": torch.tensor([4.0, 4.0]), "weight": torch.tensor([0.0, weight])}
        expected = testing.expected(op, op.prepared(op.bind((), call)), grad=torch.tensor([0.0, 2.0]))
        assert expected.outputs[0].abs().max() < largest
        for name in ("output y", "gradient of x", "gradient of gate"):
            assert expected.limits[name][1].isinf() == unknown, name


def limits_of_linear_attention(**call: Any) -> Mapping[str, Tensor]:
    """Return the limits of a call with one head and, where not given, ones; grad: of out."""
    ones = torch.ones(1, 2, 1, 1)
    grad = call.pop("grad", ones)
    op, given = OPS["linear_attention"], {"q": ones, "k": ones, "v": ones, **call}
    return testing.expected(op, op.prepared(op.bind((), given)), grad=grad).limits


LARGE = torch.tensor([1.0, torch.finfo(torch.float32).max]).view(1, 2, 1, 1)


@pytest.mark.parametrize(
    ("call", "unknown"),
    [
        ({}, False),
        ({"scale": 3e38, "v": 0 * LARGE}, True),
        ({"q": LARGE, "normalize": True}, True),
        ({"k": LARGE, "normalize": True}, True),
        ({"k": LARGE, "v": torch.zeros(1, 2, 1, 1)}, True),
        ({"beta": LARGE[..., 0], "v": 3 * torch.ones(1, 2, 1, 1)}, True),
        *(({"k": torch.full((1, 2, 1, 1), n), "beta": torch.ones(1, 2, 1), "v": 0 * LARGE}, n > 1e9)
          for n in (1e8, 1e10)),
        *(({"decay": torch.full((1, 2, 1), 40.0), "q": torch.full((1, 2, 1, 1), n), "v": 0 * LARGE}, n > 1)
          for n in (1.0, 1e8)),
    ],
    ids=str,
)  # fmt: skip
def test_products_of_linear_attention_may_overflow_before_they_are_multiplied_by_0(call: Any, unknown: bool) -> None:
    assert bool(limits_of_linear_attention(**call)["output out"].isinf().all()) == unknown


def test_gradients_of_linear_attention_may_overflow_before_they_are_added() -> None:
    for size, unknown in ((1.0, False), (2e38, True)):
        limits = limits_of_linear_attention(grad=torch.full((1, 2, 1, 1), size))
        assert bool(limits["gradient of v"].isinf().all()) == unknown


def test_a_gradient_of_linear_attention_may_overflow_before_it_is_multiplied_by_0() -> None:
    zeros = torch.zeros(1, 2, 1, 1)
    for v, unknown in ((LARGE / 16, False), (LARGE, True)):
        limits = limits_of_linear_attention(q=zeros, k=zeros, v=v, grad=zeros + 3.0)
        assert bool(limits["gradient of q"].isinf().all()) == unknown


def test_an_error_of_linear_attention_beyond_the_largest_number_is_unknown() -> None:
    """The delta rule multiplies an error by up to 2 at each position, where its numbers are of two keys in turn."""
    keys = torch.eye(2)[torch.arange(160) % 2].view(1, 160, 1, 2)
    ones = torch.ones(1, 160, 1, 1)
    limits = limits_of_linear_attention(q=0 * keys + 1, k=keys, v=ones, beta=3 * ones[..., 0], grad=ones)
    for limit in limits.values():
        assert limit.isinf().any()
        assert not (limit[limit.isfinite()] > torch.finfo(torch.float32).max).any()


def test_a_sum_of_many_products_in_float32_is_off_by_more() -> None:
    op, generator = OPS["grouped_matmul"], torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, generator=generator, requires_grad=True) for size in ((65537, 5), (1, 7, 5)))
    with fusedops.verify("reference") as report:
        y = op.call_public(x, weight, torch.tensor([65537]), None, False, backend="eager")
        torch.autograd.grad(y, [x, weight], torch.randn(y.shape, generator=generator))
    assert len(report.rows) == 3
