"""Optional backends: their refusals are no fallback, unless a policy names them; explain and stats show them."""

from __future__ import annotations

import pytest
import torch
from fakes import Fakes

import fusedops
from fusedops import FallbackWarning, NoBackendError, Unavailable
from fusedops.constraints import DType

X = torch.ones(4, 8)
softmax = fusedops.scaled_masked_softmax


@pytest.fixture
def fast(fakes: Fakes) -> Fakes:
    """Register an optional backend for float32, before eager."""
    fakes("fast", DType("x", torch.float32), backward=(DType("y", torch.float32),), priority=5, optional=True)
    return fakes


@pytest.mark.parametrize("fallback", ["warn", "raise"])
def test_a_refusal_is_not_reported(fast: Fakes, fallback: str) -> None:
    with fusedops.use(fallback=fallback):  # a warning is an error in these tests
        softmax(X)
        softmax(X.double().requires_grad_()).sum().backward()
    assert fast.ran == ["fast"]


def test_stats_and_explain_show_a_refusal(fast: Fakes) -> None:
    fusedops.reset_stats()
    softmax(X.half())
    (count,) = fusedops.stats().counts
    assert [refusal.backend for refusal in count.refused] == ["fast"]
    refused = [candidate for candidate in fusedops.explain(softmax, X.half()).candidates if candidate.reasons]
    assert [candidate.backend for candidate in refused][-1] == "fast"


def test_a_policy_that_names_the_backend_reports_its_refusals(fast: Fakes) -> None:
    with pytest.warns(FallbackWarning, match="runs on eager, not on fast: got x of float64"):
        softmax(X.double(), backend="fast")
    with fusedops.use("fast", fallback="raise"), pytest.raises(NoBackendError):
        softmax(X.double())


def test_raise_goes_on_to_the_next_backend_for_the_gradient_too(fakes: Fakes) -> None:
    fakes("fast", backward=None, priority=5, optional=True)
    x = X.clone().requires_grad_()
    with fusedops.use(fallback="raise"):
        softmax(x).sum().backward()
    assert fakes.ran == ["fast"]
    assert x.grad is not None


def test_raise_stops_at_the_first_backend_that_is_not_optional(fast: Fakes) -> None:
    fast("strict", DType("x", torch.float16), priority=3)
    with fusedops.use(fallback="raise"):
        softmax(X)
        with pytest.raises(NoBackendError):
            softmax(X.double())


def test_an_unavailable_one_is_not_reported(fakes: Fakes) -> None:
    missing = Unavailable("its library is not built", "build it")
    fakes("fast", priority=5, optional=True, probe=lambda: missing)
    with fusedops.use(fallback="raise"):
        softmax(X)
    with pytest.warns(FallbackWarning, match="its library is not built; to fix: build it"):
        softmax(X, backend="fast")
