"""Fallback warnings: when they are given, how often, and where they point."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from fallback_cases import LONG, OP, SHORT, X, softmax
from state import forget_warnings

import fusedops
from fusedops import FallbackWarning, NoBackendError, Unavailable
from fusedops.constraints import Dim, Rank

ONCE = '(Reported once; fallback="raise" makes this an error, "silent" hides it.)'


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_named_fallback_is_reported_once_for_each_op_backend_and_code(fakes: Any) -> None:
    fakes("short", *SHORT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            softmax(X, backend="short")
            softmax(LONG, backend="short")
            softmax(torch.ones(2, 10), backend="short")
            softmax(X.double(), backend="short")
            with fusedops.use("short"):
                softmax(LONG)
    assert [str(w.message) for w in caught] == [
        "scaled_masked_softmax runs on eager, not on short: got dim -1 of x = 9, expected a size of at most 8; "
        f"to fix: split x so that dim -1 is at most 8. {ONCE}",
        "scaled_masked_softmax runs on eager, not on short: got x of float64, expected float32; to fix: convert x to "
        f"float32. {ONCE}",
    ]
    assert {w.category for w in caught} == {FallbackWarning}


def test_each_refusing_backend_is_reported(fakes: Any) -> None:
    fakes("short", *SHORT)
    fakes("flat", Rank("x", 2, 3), Dim("x", (-1,), at_most=4))
    with pytest.warns(FallbackWarning) as caught:
        softmax(LONG, backend="flat,short,triton,eager")
    assert [str(w.message).partition(":")[0] for w in caught] == [
        "scaled_masked_softmax runs on triton, not on flat",
        "scaled_masked_softmax runs on triton, not on short",
    ]


def test_the_warning_points_at_the_line_of_the_user(fakes: Any) -> None:
    fakes("short", *SHORT, backward=(Dim("y", (-1,), at_most=6),))
    fakes("named", *SHORT, backward=None, priority=-10)
    grown = torch.ones(2, 7, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        where = [line() + 1]
        fusedops.scaled_masked_softmax(LONG, backend="short")
        forget_warnings()
        where.append(line() + 1)
        torch.ops.fusedops.scaled_masked_softmax(LONG, backend="short")
        forget_warnings()
        where.append(line() + 1)
        fusedops.scaled_masked_softmax(LONG.clone().requires_grad_(), backend="short")
        forget_warnings()
        where.append(line() + 1)
        fusedops.scaled_masked_softmax(grown, backend="short")  # its gradient alone falls back
        forget_warnings()
        where.append(line() + 1)
        torch.ops.fusedops.scaled_masked_softmax(grown, backend="short").sum().backward()
        forget_warnings()
        where += [line() + 1] * 2  # for the gradient, short is passed over as well
        fusedops.scaled_masked_softmax(grown, backend="named")
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, at) for at in where]
    about = [str(w.message).partition(" runs on ")[0] for w in caught]
    assert about == [OP, OP, OP, *[f"{OP} backward"] * 4]


def test_the_warning_points_at_users_whose_path_begins_like_ours(fakes: Any, tmp_path: Any) -> None:
    fakes("short", *SHORT)
    beside = fusedops.__file__.replace("__init__.py", "").rstrip("/") + "_users/code.py"
    code = compile("import fusedops\nfusedops.scaled_masked_softmax(x, backend='short')", beside, "exec")
    with pytest.warns(FallbackWarning) as caught:
        exec(code, {"x": LONG})
    assert (caught[0].filename, caught[0].lineno) == (beside, 2)


def test_silent_gives_no_warning_and_warn_afterwards_does(fakes: Any) -> None:
    fakes("short", *SHORT)
    with fusedops.use("short", fallback="silent"):
        softmax(LONG)
    with pytest.warns(FallbackWarning), fusedops.use("short"):
        softmax(LONG)


def test_an_unavailable_backend_of_the_tensors_own_device_is_not_passed_over_unseen(fakes: Any) -> None:
    fakes("away", probe=lambda: Unavailable("no chip", "buy one"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        softmax()
        softmax(LONG)
    assert [str(w.message) for w in caught] == [
        "scaled_masked_softmax runs on eager, not on away: unavailable: no chip; to fix: buy one. " + ONCE
    ]


@pytest.mark.parametrize(
    ("policy", "reported"),
    [
        (None, []),  # npu is for another device
        ("triton", []),
        ("npu,triton", []),  # one name for each kind of chip: triton is here
        ("npu", ["npu"]),
        ("npu,forward_only_elsewhere", ["npu", "forward_only_elsewhere"]),
    ],
)
def test_passing_over_another_devices_backend_is_reported_only_where_none_was_named_for_this_one(
    fakes: Any, policy: str | None, reported: list[str]
) -> None:
    fakes("forward_only_elsewhere", devices=("xpu",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fusedops.use(policy):
            softmax()
    assert [str(w.message).partition(" not on ")[2].partition(":")[0] for w in caught] == reported


def test_a_refusal_in_the_default_order_is_reported_too(fakes: Any) -> None:
    fakes("fast", *SHORT)
    with pytest.warns(FallbackWarning, match="runs on eager, not on fast: got dim -1 of x = 9"):
        softmax(LONG)


def test_a_missing_backward_is_reported_only_where_the_backend_is_named(fakes: Any) -> None:
    fakes("forward", backward=None)
    x = X.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        softmax(x).sum().backward()
    assert fakes.ran == ["forward"]
    with pytest.warns(FallbackWarning) as caught:
        softmax(x, backend="forward").sum().backward()
    (message,) = [str(w.message) for w in caught]
    start, _, end = message.partition(" prefer ")
    names, _, end = end.partition(". ")
    assert start == (
        "scaled_masked_softmax backward runs on eager, not on forward: has no kernel for scaled_masked_softmax "
        "backward; to fix:"
    )
    assert end == ONCE
    assert "eager" in names.split(" or ")
    assert "npu" not in names.split(" or "), "it has a kernel, but does not serve the tensor's device"


def test_raise_uses_the_first_named_one_of_the_tensors_device(fakes: Any) -> None:
    fakes("short", *SHORT)
    with fusedops.use("npu,short,eager", fallback="raise"):
        softmax(X)
        assert fakes.ran == ["short"]
        with pytest.raises(NoBackendError):
            softmax(LONG)
