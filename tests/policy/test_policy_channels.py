"""The four channels of a policy and their precedence, and the fallback levels."""

from __future__ import annotations

from typing import Any

import pytest
from policy_cases import OP, OTHER, X, preferences, who
from state import AUTO

import fusedops

pytestmark = pytest.mark.usefixtures("no_compiled_backend")


def test_the_default_is_the_order_of_priority() -> None:
    assert fusedops.get_policy().order(OP) == (AUTO,)
    assert preferences() == []
    assert str(fusedops.get_policy()) == "auto (nothing set); fallback warn (default)"


def test_the_innermost_channel_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_BACKEND", "triton")
    assert who() == "triton"
    fusedops.set_policy("eager")
    assert who() == "eager"
    with fusedops.use("triton"):
        assert who() == "triton"
        with fusedops.use("eager"):
            assert who() == "eager"
            assert fusedops.explain(OP, X, backend="triton").backend == "triton"
            assert preferences(backend="triton") == [
                ("backend=", "triton", True),
                ("use()", "eager", False),
                ("use()", "triton", False),
                ("set_policy()", "eager", False),
                ("FUSEDOPS_BACKEND", "triton", False),
            ]
        assert who() == "triton"
    assert who() == "eager"
    fusedops.set_policy(None)
    assert who() == "triton"
    assert preferences() == [("FUSEDOPS_BACKEND", "triton", True)]


def test_a_channel_that_speaks_only_of_another_op_does_not_overrule() -> None:
    fusedops.set_policy("triton")
    with fusedops.use(f"{OTHER}=eager"):
        assert who() == "triton"
        assert preferences() == [("set_policy()", "triton", True)]
        assert fusedops.get_policy().order(OTHER) == ("eager",)
        with fusedops.use(f"{OTHER}=npu; {OP}=eager"):
            assert who() == "eager"
    with fusedops.use(fallback="silent"):
        assert who() == "triton"


def test_an_inner_general_order_overrules_an_outer_one_for_the_op() -> None:
    fusedops.set_policy(f"{OP}=eager")
    with fusedops.use("triton"):
        assert who() == "triton"


def test_auto_in_an_inner_channel_goes_back_to_the_default_order() -> None:
    with fusedops.use("triton"), fusedops.use("auto"):
        assert who() == "eager"
    with fusedops.use("npu,auto", fallback="silent"):
        assert who() == "eager"


def test_after_the_named_ones_come_the_rest() -> None:
    order = [v.backend for v in fusedops.explain(OP, X, backend="triton").candidates]
    assert [name for name in order if name in ("eager", "npu", "triton")] == ["triton", "npu", "eager"]


@pytest.mark.parametrize("level", ["warn", "silent", "raise"])
def test_the_fallback_level_comes_through_every_channel(level: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fusedops.get_policy().fallback == "warn"
    monkeypatch.setenv("FUSEDOPS_FALLBACK", "raise" if level == "silent" else "silent")
    fusedops.set_policy(None)
    assert fusedops.get_policy().fallback != "warn"
    assert str(fusedops.get_policy()).endswith("(from FUSEDOPS_FALLBACK)")
    fusedops.set_policy(fallback=level)
    assert fusedops.get_policy().fallback == level
    with fusedops.use("eager"):
        assert fusedops.get_policy().fallback == level
        with fusedops.use(fallback="warn"):
            assert fusedops.get_policy().fallback == "warn"
            assert str(fusedops.get_policy()) == 'use(): "eager"; fallback warn (from use())'
    fusedops.set_policy(None)
    assert str(fusedops.get_policy()).endswith("(from FUSEDOPS_FALLBACK)")
