"""Decisions: what explain says, that it is what runs, what a refusal says, and when a fallback is made seen."""

from __future__ import annotations

import inspect
import json
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from standin import no_device
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops import FallbackWarning, InvalidInputError, NoBackendError, PolicyError, TensorSpec, Unavailable
from fusedops._registry import registry
from fusedops.constraints import Dim, DType, Rank, Scalar

OP = "scaled_masked_softmax"
SHORT = (Dim("x", (-1,), at_most=8), DType("x", torch.float32))
X = torch.ones(2, 4)
LONG = torch.ones(2, 9)
ONCE = '(Said once; fallback="raise" makes this an error, "silent" hides it.)'


def softmax(x: torch.Tensor = X, *args: Any, **kwargs: Any) -> torch.Tensor:
    return fusedops.scaled_masked_softmax(x, *args, **kwargs)


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


# -------------------------------------------------------------------------------------------------------------- explain


def test_the_decision_as_data_and_as_a_table(fakes: Any) -> None:
    fakes("short", *SHORT)
    fusedops.set_policy("triton")
    with fusedops.use("short", fallback="silent"):
        decision = fusedops.explain(OP, torch.ones(2, 9, dtype=torch.float64), None, 0.125)
    data = decision.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data == {
        "op": OP,
        "given": "x float64[2, 9] on cpu, mask None, scale 0.125, causal False",
        "backend": "eager",
        "backward": "eager",
        "fallback": "silent",
        "adapt": "none",
        "assumed": "",
        "wishes": [
            {"channel": "use()", "text": "short", "counted": True},
            {"channel": "set_policy()", "text": "triton", "counted": False},
        ],
        "candidates": [
            {
                "backend": "short",
                "status": "refused",
                "reasons": [
                    {
                        "code": "size",
                        "detail": "dim -1 of x is 9; needs a size of at most 8",
                        "given": "dim -1 of x is 9",
                        "needed": "a size of at most 8",
                        "fix": "split x so that dim -1 is at most 8",
                    },
                    {
                        "code": "dtype",
                        "detail": "x is float64; needs float32",
                        "given": "x is float64",
                        "needed": "float32",
                        "fix": "convert x to float32",
                    },
                ],
                "deviations": [],
                "adaptations": [],
            },
            {
                "backend": "npu",
                "status": "refused",
                "reasons": [
                    {
                        "code": "device",
                        "detail": "serves npu, not cpu",
                        "given": "cpu",
                        "needed": "npu",
                        "fix": "move the tensors to npu",
                    }
                ],
                "deviations": [],
                "adaptations": [],
            },
            {"backend": "eager", "status": "chosen", "reasons": [], "deviations": [], "adaptations": []},
            {"backend": "triton", "status": "eligible", "reasons": [], "deviations": [], "adaptations": []},
        ],
    }
    assert str(decision) == (
        "scaled_masked_softmax: served by eager (backward: eager)\n"
        "  given     x float64[2, 9] on cpu, mask None, scale 0.125, causal False\n"
        '  wish      use(): "short"\n'
        '  wish      set_policy(): "triton" (overruled)\n'
        "  fallback  silent\n"
        "  refused   short    dim -1 of x is 9; needs a size of at most 8\n"
        "                     x is float64; needs float32\n"
        "                     to qualify: split x so that dim -1 is at most 8\n"
        "                     to qualify: convert x to float32\n"
        "  refused   npu      serves npu, not cpu\n"
        "  chosen    eager\n"
        "  eligible  triton"
    )


def test_explain_takes_real_meta_and_fake_tensors_and_specs(fakes: Any) -> None:
    fakes("short", *SHORT, devices=("cpu", "meta"))
    with FakeTensorMode():
        fake = torch.ones(2, 4)
    for like in (X, fake, TensorSpec((2, 4)), torch.nn.Parameter(X)):
        told = fusedops.explain(OP, like, scale=0.5, causal=True)
        assert (told.backend, told.backward) == ("short", "short")
        assert told.given == "x float32[2, 4] on cpu, mask None, scale 0.5, causal True"
        assert told.assumed == ""
    assert fusedops.explain(OP, torch.ones(2, 4, device="meta")).given.startswith("x float32[2, 4] on meta")
    assert fusedops.explain(OP, torch.ones(2, 4, device="meta")).backend == "short"
    mask = TensorSpec((1, 4), torch.bool)
    assert "mask bool[1, 4] on cpu" in fusedops.explain(OP, X, mask).given
    with FakeTensorMode():
        cuda = torch.ones(2, 4, device="cuda")
    assert fusedops.explain(OP, cuda).given.startswith("x float32[2, 4] on cuda:0")


def test_explain_runs_nothing_and_warns_of_nothing(fakes: Any) -> None:
    fakes("away", probe=lambda: Unavailable("no chip", "buy one"))
    fakes("short", *SHORT, backward=None)
    for policy in (None, "away", "short", "npu,triton", "away,short"):
        with fusedops.use(policy):
            for x in (X, LONG):
                fusedops.explain(OP, x)
    assert fakes.ran == []
    with pytest.warns(FallbackWarning):  # and what it looked at is news still
        softmax(LONG, backend="short")


def test_explain_says_what_it_does_not_understand() -> None:
    with pytest.raises(
        PolicyError, match=r"^explain: no op is called 'scaled_masked_softmx'; the nearest is 'scaled_mas"
    ):
        fusedops.explain("scaled_masked_softmx", X)
    with pytest.raises(PolicyError, match=r"^backend=: \"tritn\": no backend is called 'tritn'"):
        fusedops.explain(OP, X, backend="tritn")
    with pytest.raises(InvalidInputError, match=r"x is torch\.int64; needs float16, bfloat16, float32 or float64"):
        fusedops.explain(OP, TensorSpec((2, 4), torch.int64, "npu"))
    with pytest.raises(InvalidInputError, match="mask has shape"):
        fusedops.explain(OP, TensorSpec((2, 4), device="cuda"), TensorSpec((3, 4), torch.bool, "cuda"))
    with pytest.raises(InvalidInputError) as error:
        fusedops.explain(OP, X, dim=1)
    assert str(error.value) == (
        "scaled_masked_softmax: got an unexpected keyword argument 'dim'; "
        "needs (x, mask=None, scale=1.0, *, causal=False); give each argument once, as there"
    )
    with pytest.raises(InvalidInputError, match="missing a required argument: 'x'"):
        fusedops.explain(OP)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "npu"])
def test_a_mask_on_another_device_is_invalid_also_offline(device: str) -> None:
    with pytest.raises(InvalidInputError, match=f"mask is on cpu and x on {device}"):
        fusedops.explain(OP, TensorSpec((2, 4), device=device), TensorSpec((2, 4), torch.bool))
    fusedops.explain(OP, TensorSpec((2, 4), device=device), TensorSpec((2, 4), torch.bool, device))


def test_offline_answers(python: Callable[..., Any]) -> None:
    told = python(
        """
        import json, torch, fusedops
        from fusedops import TensorSpec
        S, B = "scaled_masked_softmax", torch.bfloat16
        mask = TensorSpec((8, 1, 512, 512), torch.bool, "npu")
        calls = {
            "ascend": fusedops.explain(S, TensorSpec((8, 16, 512, 512), B, "npu"), mask, 0.125),
            "ragged": fusedops.explain(S, TensorSpec((8, 16, 512, 500), B, "npu:0"), None, 0.125),
            "h200": fusedops.explain(S, TensorSpec((8, 16, 512, 500), B, "cuda", (9, 0)), None, 0.125),
            "v100": fusedops.explain(S, TensorSpec((8, 16, 512, 500), B, "cuda", (7, 0)), None, 0.125),
            "mac": fusedops.explain(S, TensorSpec((8, 16, 512, 500), B, "mps"), None, 0.125),
        }
        print(json.dumps({name: [str(call), call.to_dict()] for name, call in calls.items()}))
        """
    )
    chosen = {name: (data["backend"], data["backward"]) for name, (_, data) in told.items()}
    assert chosen == {
        "ascend": ("npu", "npu"),
        "ragged": ("eager", "eager"),
        "h200": ("triton", "triton"),
        "v100": ("eager", "eager"),
        "mac": ("eager", "eager"),
    }
    table, data = told["ragged"]
    assert table.startswith(
        "scaled_masked_softmax: served by eager (backward: eager)\n"
        "  given     x bfloat16[8, 16, 512, 500] on npu:0, mask None, scale 0.125, causal False\n"
        "  wish      none: default order, by priority\n"
        "  fallback  warn\n"
        "  assumed   a machine with npu and the backends for it installed; this one has no npu\n"
        "  refused   npu      dim -1 of x is 500; needs a multiple of 32 in [32, 4096]\n"
        '                     to qualify: pad dim -1 of x from 500 to 512, or allow adapt="pad"\n'
    )
    assert data["assumed"]
    assert [v["backend"] for v in told["ascend"][1]["candidates"] if v["status"] == "eligible"] == ["eager"]
    (triton,) = [v for v in told["v100"][1]["candidates"] if v["backend"] == "triton"]
    assert [reason["code"] for reason in triton["reasons"]] == ["capability"]


def test_a_deviation_is_shown() -> None:
    with no_device():
        decision = fusedops.explain(OP, TensorSpec((1, 1, 32, 32), device="npu"), backend="npu")
    (npu,) = [v for v in decision.candidates if v.backend == "npu"]
    assert [text.partition(":")[0] for text in npu.deviations] == ["nonfinite-under-mask", "finite-fill"]
    assert "deviation: nonfinite-under-mask: older kernels mask by multiplication" in str(decision)


# ----------------------------------------------------------------------------------------------------------- no backend


def test_no_backend_because_of_limits(fakes: Any) -> None:
    fakes("short", *SHORT)
    fusedops.set_policy("short", fallback="raise")
    with pytest.raises(NoBackendError) as error:
        softmax(torch.ones(2, 9, dtype=torch.float64), scale=0.5)
    assert str(error.value) == (
        'no backend takes this call of scaled_masked_softmax (fallback="raise", policy "short" from set_policy())\n'
        "  given     x float64[2, 9] on cpu, mask None, scale 0.5, causal False\n"
        "  refused   short    dim -1 of x is 9; needs a size of at most 8\n"
        "                     x is float64; needs float32\n"
        "  (npu: serves npu, not cpu)\n"
        '  (fallback="raise" keeps it from eager, triton)\n'
        "  to qualify for short: split x so that dim -1 is at most 8; convert x to float32"
    )
    assert error.value.decision.backend is None
    assert error.value.decision == fusedops.explain(OP, torch.ones(2, 9, dtype=torch.float64), scale=0.5)
    assert fakes.ran == []


def test_no_backend_because_the_named_one_is_for_another_device(fakes: Any) -> None:
    with pytest.raises(NoBackendError) as error, fusedops.use(fallback="raise"):
        softmax(backend="npu")
    assert str(error.value) == (
        'no backend takes this call of scaled_masked_softmax (fallback="raise", policy "npu" from backend=)\n'
        "  given     x float32[2, 4] on cpu, mask None, scale 1, causal False\n"
        "  (npu: serves npu, not cpu)\n"
        '  (fallback="raise" keeps it from eager, triton)\n'
        "  to qualify for npu: move the tensors to npu"
    )


def test_no_backend_because_the_best_one_is_not_available(fakes: Any) -> None:
    fakes("away", probe=lambda: Unavailable("no chip", "buy one"))
    with pytest.raises(NoBackendError) as error, fusedops.use(fallback="raise"):
        softmax()
    assert str(error.value) == (
        'no backend takes this call of scaled_masked_softmax (fallback="raise", default order)\n'
        "  given     x float32[2, 4] on cpu, mask None, scale 1, causal False\n"
        "  (npu: serves npu, not cpu; away: unavailable: no chip)\n"
        '  (fallback="raise" keeps it from eager, triton)\n'
        "  to qualify for away: buy one"
    )


def test_no_backend_for_the_gradient_is_said_before_forward_runs(fakes: Any) -> None:
    fakes("short", backward=(Dim("y", (-1,), at_most=8),))
    fakes("forward", backward=None)
    x = LONG.clone().requires_grad_()
    for name, words in (("short", "dim -1 of y is 9; needs a size of at most 8"), ("forward", "has no kernel for")):
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


# ------------------------------------------------------------------------------------------------- the fallback is seen


def test_a_named_fallback_is_said_once_for_each_op_backend_and_code(fakes: Any) -> None:
    fakes("short", *SHORT)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            softmax(X, backend="short")
            softmax(LONG, backend="short")
            softmax(torch.ones(2, 10), backend="short")
            softmax(X.double(), backend="short")
            with fusedops.use("short"):
                softmax(LONG)
    assert [str(w.message) for w in said] == [
        "scaled_masked_softmax runs on eager, not on short: dim -1 of x is 9; needs a size of at most 8. To qualify "
        f"for short: split x so that dim -1 is at most 8. {ONCE}",
        "scaled_masked_softmax runs on eager, not on short: x is float64; needs float32. To qualify for short: convert "
        f"x to float32. {ONCE}",
    ]
    assert {w.category for w in said} == {FallbackWarning}


def test_each_refusing_backend_is_said(fakes: Any) -> None:
    fakes("short", *SHORT)
    fakes("flat", Rank("x", 2, 3), Dim("x", (-1,), at_most=4))
    with pytest.warns(FallbackWarning) as said:
        softmax(LONG, backend="flat,short,triton,eager")
    assert [str(w.message).partition(":")[0] for w in said] == [
        "scaled_masked_softmax runs on triton, not on flat",
        "scaled_masked_softmax runs on triton, not on short",
    ]


def test_the_warning_points_at_the_line_of_the_user(fakes: Any) -> None:
    fakes("short", *SHORT, backward=(Dim("y", (-1,), at_most=6),))
    fakes("named", *SHORT, backward=None, priority=-10)
    grown = torch.ones(2, 7, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        where = [line() + 1]
        fusedops.scaled_masked_softmax(LONG, backend="short")
        fusedops._plan.forget_warnings()
        where.append(line() + 1)
        torch.ops.fusedops.scaled_masked_softmax(LONG, backend="short")
        fusedops._plan.forget_warnings()
        where.append(line() + 1)
        fusedops.scaled_masked_softmax(LONG.clone().requires_grad_(), backend="short")
        fusedops._plan.forget_warnings()
        where.append(line() + 1)
        fusedops.scaled_masked_softmax(grown, backend="short")  # its gradient alone falls back
        fusedops._plan.forget_warnings()
        y = torch.ops.fusedops.scaled_masked_softmax(grown, backend="short")
        where.append(line() + 1)
        y.sum().backward()
        fusedops._plan.forget_warnings()
        where += [line() + 1] * 2  # for the gradient, short is passed over as well
        fusedops.scaled_masked_softmax(grown, backend="named")
    assert [(w.filename, w.lineno) for w in said] == [(__file__, at) for at in where]
    about = [str(w.message).partition(" runs on ")[0] for w in said]
    assert about == [OP, OP, OP, *[f"{OP} backward"] * 4]


def test_the_warning_points_at_users_whose_path_begins_like_ours(fakes: Any, tmp_path: Any) -> None:
    fakes("short", *SHORT)
    beside = fusedops.__file__.replace("__init__.py", "").rstrip("/") + "_users/code.py"
    code = compile("import fusedops\nfusedops.scaled_masked_softmax(x, backend='short')", beside, "exec")
    with pytest.warns(FallbackWarning) as said:
        exec(code, {"x": LONG})
    assert (said[0].filename, said[0].lineno) == (beside, 2)


def test_silent_says_nothing_and_warn_afterwards_does(fakes: Any) -> None:
    fakes("short", *SHORT)
    with fusedops.use("short", fallback="silent"):
        softmax(LONG)
    with pytest.warns(FallbackWarning), fusedops.use("short"):
        softmax(LONG)


def test_an_unavailable_backend_of_the_tensors_own_device_is_not_passed_over_unseen(fakes: Any) -> None:
    fakes("away", probe=lambda: Unavailable("no chip", "buy one"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        softmax()
        softmax(LONG)
    assert [str(w.message) for w in said] == [
        "scaled_masked_softmax runs on eager, not on away: unavailable: no chip. To qualify for away: buy one. " + ONCE
    ]


@pytest.mark.parametrize(
    ("policy", "news"),
    [
        (None, []),  # npu is for another device
        ("triton", []),
        ("npu,triton", []),  # one name for each kind of chip: triton is here
        ("npu", ["npu"]),
        ("npu,forward_only_elsewhere", ["npu", "forward_only_elsewhere"]),
    ],
)
def test_passing_over_another_devices_backend_is_news_only_where_none_was_named_for_this_one(
    fakes: Any, policy: str | None, news: list[str]
) -> None:
    fakes("forward_only_elsewhere", devices=("xpu",))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fusedops.use(policy):
            softmax()
    assert [str(w.message).partition(" not on ")[2].partition(":")[0] for w in said] == news


def test_an_automatic_limit_is_said_too(fakes: Any) -> None:
    fakes("fast", *SHORT)
    with pytest.warns(FallbackWarning, match="runs on eager, not on fast: dim -1 of x is 9"):
        softmax(LONG)


def test_a_missing_backward_is_said_where_named_and_passed_freely_where_not(fakes: Any) -> None:
    fakes("forward", backward=None)
    x = X.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        softmax(x).sum().backward()
    assert fakes.ran == ["forward"]
    with pytest.warns(FallbackWarning) as said:
        softmax(x, backend="forward").sum().backward()
    assert [str(w.message) for w in said] == [
        "scaled_masked_softmax backward runs on eager, not on forward: has no kernel for scaled_masked_softmax "
        "backward. To qualify for forward: prefer a backend that has scaled_masked_softmax backward. " + ONCE
    ]


def test_raise_uses_the_first_named_one_of_the_tensors_device(fakes: Any) -> None:
    fakes("short", *SHORT)
    with fusedops.use("npu,short,eager", fallback="raise"):
        softmax(X)
        assert fakes.ran == ["short"]
        with pytest.raises(NoBackendError):
            softmax(LONG)


# ----------------------------------------------------------------------------------------------- explain is what is run

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
    from conftest import Fakes

    before = registry.records()
    fakes = Fakes()
    try:
        # eager and triton write nothing down: take their names, too, for backends that do
        registry._records = [record for record in before if record.name == "npu"]
        fakes("eager", devices=("*",), priority=0)
        for name, (limits, backward, priority, state) in zip("abc", backends):
            fakes(name, *limits, backward=backward, priority=priority, probe=PROBES[state])
        wish = names and ",".join(name for name in names if name in registry.names() or name == "auto")
        x = torch.zeros(shape, dtype=dtype, requires_grad=grad)
        with fusedops.use(wish, fallback=level), warnings.catch_warnings():
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
        assert statuses.count("chosen") == 1
        assert all(bool(v.reasons) == (v.status == "refused") for v in decision.candidates)
    finally:
        registry._records = before
        registry._changed()
