"""explain agrees with the call: random backends, constraints and policies."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fakes import Fakes
from fallback_cases import OP, softmax
from hypothesis import given, settings
from hypothesis import strategies as st
from state import backend_names, isolated, keep_backends

import fusedops
from fusedops import NoBackendError, Unavailable
from fusedops.constraints import Dim, DType, Rank, Scalar

LIMITS = st.lists(
    st.one_of(
        st.builds(lambda n: Dim("x", (-1,), at_most=n), st.integers(1, 4)),
        st.builds(lambda n: Dim("x", (-2,), multiple_of=n), st.integers(1, 3)),
        st.builds(lambda r: Rank("x", r), st.integers(2, 3)),
        st.just(DType("x", torch.float32)),
        st.just(Scalar("scale", abs_at_most=1.0)),
    ),
    max_size=2,
)

BACKWARD_LIMITS = st.one_of(
    st.none(),
    st.lists(st.builds(lambda n: Dim("y", (-1,), at_most=n), st.integers(1, 4)), max_size=1),
)

BACKENDS = st.lists(
    st.tuples(LIMITS, BACKWARD_LIMITS, st.integers(-200, 200), st.sampled_from(["ready", "away", "failing"])),
    min_size=1,
    max_size=3,
)

NAMES = st.lists(st.sampled_from(["a", "b", "c", "eager", "npu", "auto"]), min_size=1, max_size=3)


def _failing() -> None:
    raise OSError("no driver")


PROBES: dict[str, Any] = {"ready": lambda: None, "away": lambda: Unavailable("no chip", "buy one"), "failing": _failing}


@given(
    BACKENDS,
    st.one_of(st.none(), NAMES),
    st.sampled_from(["warn", "silent", "raise"]),
    st.lists(st.integers(1, 5), min_size=2, max_size=3),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([0.5, 2.0]),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_explain_agrees_with_what_runs(
    backends: Any, names: Any, level: Any, shape: list[int], dtype: torch.dtype, scale: float, grad: bool
) -> None:
    fakes = Fakes()
    with isolated():
        # eager and triton do not note that they run: replace them by backends that do
        keep_backends("npu")
        fakes("eager", devices=("*",), priority=0)
        for name, (limits, backward, priority, state) in zip("abc", backends):
            fakes(name, *limits, backward=backward, priority=priority, probe=PROBES[state])
        policy = names and ",".join(name for name in names if name in backend_names() or name == "auto")
        x = torch.zeros(shape, dtype=dtype, requires_grad=grad)
        with fusedops.use(policy, fallback=level), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decision = fusedops.explain(OP, x, None, scale)
            assert fakes.ran == []
            served = decision.backend is not None and (not grad or decision.backward is not None)
            if not served:
                with pytest.raises(NoBackendError) as error:
                    softmax(x, None, scale)
                assert fakes.ran == []
                assert error.value.decision.backend is None
                return
            y = softmax(x, None, scale)
            if grad:
                y.sum().backward()
            assert fakes.ran == [decision.backend, *([f"{decision.backward} backward"] if grad else [])]
            fakes.ran.clear()
            torch.ops.fusedops.scaled_masked_softmax(x.detach(), None, scale)
            assert fakes.ran == [decision.backend]
        statuses = [v.status for v in decision.candidates]
        assert statuses.count("selected") == 1
        assert all(bool(v.reasons) == (v.status == "refused") for v in decision.candidates)
