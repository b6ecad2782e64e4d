"""verify compares bound calls, keeps numbers of one row apart from others, and counts what it does not compare."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from verify_cases import OP, X, softmax, wrong

import fusedops
from fusedops import MismatchError, testing


def zeros(y: Tensor) -> Tensor:
    return torch.zeros_like(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_zeros_are_found_beside_the_least_number(dtype: torch.dtype, bad: Any) -> None:
    """An additive mask of Hugging Face has such a number."""
    bad(zeros)
    x = X.to(dtype)
    x[0, 0, 0, -1] = torch.finfo(dtype).min
    with fusedops.verify("reference"), pytest.raises(MismatchError):
        softmax(x)


def test_zeros_are_found_with_a_scale_of_a_million(bad: Any) -> None:
    bad(zeros)
    with fusedops.verify("reference"), pytest.raises(MismatchError):
        softmax(X, None, 1e6)


def test_a_massive_activation_hides_no_other_function(bad: Any) -> None:
    bad(lambda y: y.clamp(min=0), None, "bias_gelu")  # relu
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0] = 3e3
    with fusedops.verify("reference"), pytest.raises(MismatchError):
        fusedops.bias_gelu(x)


def test_a_masked_position_is_exactly_zero(bad: Any) -> None:
    bad(lambda y: y.clamp(min=1e-12))
    with fusedops.verify("reference"), pytest.raises(MismatchError, match=r"is 1e-12, reference's 0\)"):
        softmax(X, causal=True)


def test_a_row_that_overflows_in_float32_is_not_compared_and_its_neighbours_are(bad: Any) -> None:
    x = torch.full((2, 4), torch.finfo(torch.float32).max)
    x[1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    want = testing.expected(OP, (x, None, 2.0, False))
    assert torch.equal(want.limits["output y"].isinf().all(-1), torch.tensor([True, False]))
    bad(lambda y: torch.cat([y[:1] * torch.nan, y[1:]]))
    with fusedops.verify("reference") as report:
        softmax(x, None, 2.0)
    assert report.mismatches == 0
    bad_everywhere = torch.full((2, 4), 0.25)
    with pytest.raises(AssertionError, match="in 4 of 8 elements"):
        testing.assert_within(bad_everywhere, want.y, want.limits["output y"], "y")


# --------------------------------------------------------------------------------------------------------- bound calls


def test_calls_bound_before_the_block_are_compared(bad: Any) -> None:
    bad(wrong)
    bound = fusedops.bind(OP.name, X)
    bound(X)
    with fusedops.verify() as report, pytest.raises(MismatchError):
        bound(X)
    assert report.mismatches == 1
    assert report.worst is not None
    assert report.worst.backend == "bad"
    bound(X)  # outside the block nothing is compared


def test_gradients_of_calls_bound_before_the_block_are_compared(bad: Any) -> None:
    bad(None, wrong)
    grown = X.clone().requires_grad_()
    bound = fusedops.bind(OP.name, grown)
    bound(grown).sum().backward()
    with fusedops.verify() as report:
        y = bound(grown)
        assert [row.result for row in report.rows] == ["output y"]
        with pytest.raises(MismatchError, match="the gradient of x"):
            y.sum().backward()


WAYS = {"called": lambda: softmax, "bound": lambda: fusedops.bind(OP.name, X)}


@pytest.mark.parametrize("way", WAYS)
def test_calls_of_another_thread_are_not_compared(way: str, bad: Any) -> None:
    bad(wrong)
    call, results = WAYS[way](), []
    with fusedops.verify() as report:
        thread = threading.Thread(target=lambda: results.append(call(X)))
        thread.start()
        thread.join()
    assert len(results) == 1
    assert report.rows == []


@pytest.mark.parametrize("way", WAYS)
def test_a_call_is_counted_once_with_its_comparison(way: str, bad: Any) -> None:
    bad()
    call = WAYS[way]()
    fusedops.reset_stats()
    call(X)
    with fusedops.verify():
        call(X)
    assert [(count.backend, count.calls) for count in fusedops.stats().counts] == [("bad", 2)]
    fusedops.reset_stats()


# ------------------------------------------------------------------------------------------------ what is not compared


def test_calls_left_out_by_every_are_counted_and_shown(bad: Any) -> None:
    bad()
    with fusedops.verify(every=4) as report:
        for _ in range(8):
            softmax(X)
    assert report.skipped == {"not the first of every 4 calls": 6}
    assert "not compared: 6, not the first of every 4 calls" in str(report)
    assert "not the first of every 4 calls" in report._repr_html_()


def test_the_form_is_compared_where_the_numbers_are_not(fakes: Any) -> None:
    fakes("wide", run=lambda *args: OP.reference(*args).double())
    with fusedops.verify("eager", raise_on_mismatch=False) as report, fusedops.use("wide", fallback="silent"):
        softmax(X.to("meta"))
    assert report.mismatches == 0, "served by eager: the fake is for a CPU"
    assert report.skipped == {"meta tensors have no numbers": 1}
    other = fusedops.verify("wide")
    with (
        other as report,
        fusedops.use("wide"),
        pytest.raises(MismatchError, match="of dtype float64, expected float32"),
    ):
        softmax(X)
    assert report.skipped == {}


def test_the_other_backends_result_may_be_the_one_of_another_shape(fakes: Any) -> None:
    fakes("short", run=lambda *args: OP.reference(*args)[..., :-1].contiguous())
    with fusedops.use("eager"), fusedops.verify("short"), pytest.raises(MismatchError) as error:
        softmax(X)
    assert error.value.mismatch.difference == (
        "it is a tensor of shape (2, 3, 4, 8), and short's a tensor of shape (2, 3, 4, 7)"
    )
