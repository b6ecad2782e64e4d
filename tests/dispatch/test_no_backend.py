"""NoBackendError: its text, its decision, and when it is raised."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from fallback_cases import LONG, OP, SHORT, softmax

import fusedops
from fusedops import NoBackendError, Unavailable
from fusedops.constraints import Dim


def test_no_backend_because_of_constraints(fakes: Any) -> None:
    fakes("short", *SHORT)
    fusedops.set_policy("short", fallback="raise")
    with pytest.raises(NoBackendError) as error:
        softmax(torch.ones(2, 9, dtype=torch.float16), scale=0.5)
    assert str(error.value) == (
        'no backend takes this call of scaled_masked_softmax (fallback="raise", policy "short" from set_policy())\n'
        "  given     x float16[2, 9] on cpu, mask None, scale 0.5, causal False\n"
        "  refused   short    got dim -1 of x = 9, expected a size of at most 8\n"
        "                     got x of float16, expected float32\n"
        "  (npu: serves npu, not cpu)\n"
        '  (fallback="raise" does not allow eager, triton)\n'
        "  to fix    short: split x so that dim -1 is at most 8; convert x to float32"
    )
    assert error.value.decision.backend is None
    assert error.value.decision == fusedops.explain(OP, torch.ones(2, 9, dtype=torch.float16), scale=0.5)
    assert fakes.ran == []


def test_no_backend_because_the_named_one_is_for_another_device(fakes: Any) -> None:
    with pytest.raises(NoBackendError) as error, fusedops.use(fallback="raise"):
        softmax(backend="npu")
    assert str(error.value) == (
        'no backend takes this call of scaled_masked_softmax (fallback="raise", policy "npu" from backend=)\n'
        "  given     x float32[2, 4] on cpu, mask None, scale 1, causal False\n"
        "  (npu: serves npu, not cpu)\n"
        '  (fallback="raise" does not allow eager, triton)\n'
        "  to fix    npu: move the tensors to npu"
    )


def test_no_backend_because_the_best_one_is_not_available(fakes: Any) -> None:
    fakes("away", probe=lambda: Unavailable("no chip", "buy one"))
    with pytest.raises(NoBackendError) as error, fusedops.use(fallback="raise"):
        softmax()
    assert str(error.value) == (
        'no backend takes this call of scaled_masked_softmax (fallback="raise", default order)\n'
        "  given     x float32[2, 4] on cpu, mask None, scale 1, causal False\n"
        "  (npu: serves npu, not cpu; away: unavailable: no chip)\n"
        '  (fallback="raise" does not allow eager, triton)\n'
        "  to fix    away: buy one"
    )


def test_no_backend_for_the_gradient_is_reported_before_forward_runs(fakes: Any) -> None:
    fakes("short", backward=(Dim("y", (-1,), at_most=8),))
    fakes("forward", backward=None)
    x = LONG.clone().requires_grad_()
    for name, words in (
        ("short", "got dim -1 of y = 9, expected a size of at most 8"),
        ("forward", "has no kernel for"),
    ):
        with fusedops.use(name, fallback="raise"):
            with pytest.raises(NoBackendError, match=words):
                softmax(x)
            assert fakes.ran == []
            softmax(LONG)
            assert fakes.ran.pop() == name


def test_the_error_survives_pickling(fakes: Any) -> None:
    with pytest.raises(NoBackendError) as error, fusedops.use(fallback="raise"):
        softmax(backend="npu")
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value)
    assert again.decision == error.value.decision
