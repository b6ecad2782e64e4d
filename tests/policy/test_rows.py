"""rows="independent": only kernels that promise that a row does not depend on other rows, and who promises it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedops
from fusedops import Backend, NoBackendError, PluginError, TensorSpec, testing
from fusedops._plugins.discovery import OWN_DISTRIBUTION
from fusedops._plugins.registry import registry
from fusedops.constraints import Dim

OP = testing.OPS["scaled_masked_softmax"]
X = torch.randn(3, 5)
WHY = "its results depend on the number of rows"


@pytest.fixture
def promising(fakes: Any) -> Callable[..., list[int]]:
    """Return a function that registers a backend with a promise, and returns the numbers of rows that it served."""

    def register(name: str, promise: Any, priority: int = 60, for_speed: Any = (), backward: Any = None) -> list[int]:
        served: list[int] = []

        def forward(x: Any, mask: Any, scale: float, causal: bool) -> Any:
            served.append(x.shape[0])
            return OP.reference(x, mask, scale, causal)

        def gradient(grad: Any, y: Any, scale: float, causal: bool) -> Any:
            return OP.backward(grad, y, scale, causal)

        kernels = [fusedops.kernel(OP.name, rows_independent=promise, for_speed=for_speed)(forward)]
        kernels += [fusedops.kernel(OP.name, direction="backward", rows_independent=backward or promise)(gradient)]
        fusedops.register(Backend(name, ("cpu",), priority, kernels))
        return served

    return register


def who(**settings: Any) -> str | None:
    with fusedops.use(**settings):
        return fusedops.explain(OP.name, X).backend


def test_each_kernel_of_this_project_has_a_value() -> None:
    missing = [
        f"{record.name}: {kernel.op} {kernel.direction}"
        for record in registry.records()
        if record.backend is not None and record.distribution == OWN_DISTRIBUTION
        for kernel in record.backend.kernels
        if kernel.rows_independent is None
    ]
    assert not missing, f"got kernels without rows_independent: {missing}; to fix: write True, or the reason why not"


def test_a_backward_promises_no_more_than_its_forward() -> None:
    for record in registry.records():
        for kernel in record.backend.kernels if record.backend else ():
            if kernel.direction == "backward" and kernel.why_rows_depend("cpu") is None:
                forward = record.kernel(kernel.op, "forward", (kernel.device_types or record.backend.device_types)[0])  # pyright: ignore
                assert forward is not None
                assert forward.kernel.why_rows_depend("cpu") is None, (record.name, kernel.op)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_cpu_backend_promises_it_for_all_its_ops_but_dropout(direction: Any) -> None:
    cpu = registry.find("cpu")
    assert cpu is not None
    assert cpu.backend is not None
    kernels = [each for each in cpu.backend.kernels if each.direction == direction]
    without = {each.op for each in kernels if each.why_rows_depend("cpu") is not None}
    assert without == {"bias_dropout", "bias_dropout_add"}
    assert {each.op for each in kernels} > without


def test_a_kernel_without_the_promise_is_passed_over(promising: Callable[..., Any]) -> None:
    one = promising("one", "its block follows from the number of rows", 70)
    two = promising("two", True, 65)
    assert who() == "one"
    with fusedops.use(rows="independent"), warnings.catch_warnings():
        warnings.simplefilter("error")  # no policy names it: as with a backend that has no kernel
        fusedops.reset_stats()
        fusedops.scaled_masked_softmax(X)
        (count,) = fusedops.stats().counts
        decision = fusedops.explain(OP.name, X)
    assert (one, two) == ([], [3])
    assert (count.backend, [(each.backend, each.reason.code.value) for each in count.refused]) == (
        "two",
        [("one", "rows")],
    )
    (reason,) = next(each for each in decision.candidates if each.backend == "one").reasons
    assert reason.detail == f"{WHY}: its block follows from the number of rows"
    assert reason.fix.startswith("prefer two")
    assert "  rows      independent\n" in str(decision)
    assert decision.to_dict()["rows"] == "independent"


def test_a_named_one_is_reported_and_with_raise_refused(promising: Callable[..., Any]) -> None:
    promising("one", "it is cut by the number of rows", 70)
    promising("two", True, 65)
    with fusedops.use("one", rows="independent"):
        with pytest.warns(
            fusedops.FallbackWarning, match=f"on two, not on one: {WHY}: it is cut .* to fix: prefer two"
        ):
            fusedops.scaled_masked_softmax(X)
        with fusedops.use(fallback="raise"), pytest.raises(NoBackendError, match=f"refused +one +{WHY}: it is cut"):
            fusedops.scaled_masked_softmax(X)
    with fusedops.use(fallback="raise", rows="independent"):  # none is named: the first that promises it
        fusedops.scaled_masked_softmax(X)


def test_where_none_is_left_the_error_names_the_op_and_the_reasons() -> None:
    x, weight = torch.randn(3, 8), torch.randn(2, 4, 8)
    with fusedops.use(rows="independent"), pytest.raises(NoBackendError) as error:
        fusedops.grouped_matmul(x, weight, torch.tensor([1, 3]))
    text = str(error.value)
    assert 'no backend takes this call of grouped_matmul (fallback="warn", default order, rows="independent")' in text
    assert f"eager    {WHY}: torch's matrix products" in text
    assert text.endswith('to fix    eager: allow this op with rows="any"')


def test_a_gradient_needs_the_promise_of_backward_too(promising: Callable[..., Any]) -> None:
    promising("one", True, 70, backward="it is summed over rows")
    x = X.clone().requires_grad_()
    with fusedops.use(rows="independent"):
        with torch.no_grad():
            fusedops.scaled_masked_softmax(x)
        decision = fusedops.explain(OP.name, X)
        assert decision.backward != "one"
        if decision.backward is None:
            with pytest.raises(NoBackendError, match=f"one +{WHY}: it is summed over rows"):
                fusedops.scaled_masked_softmax(x)


def test_constraints_for_speed_do_not_hold_under_it(promising: Callable[..., Any]) -> None:
    served = promising("one", True, 70, for_speed=(Dim("x", (0,), at_most=2),))
    assert who() != "one"
    assert who(rows="independent") == "one"
    for _ in range(2):
        with fusedops.use(rows="independent"):
            fusedops.scaled_masked_softmax(X)
        fusedops.scaled_masked_softmax(X[:2])
        with fusedops.use(fallback="silent"):
            fusedops.scaled_masked_softmax(X)
    assert served == [3, 2, 3, 2]


def test_the_function_for_independent_rows_is_called_under_it(fakes: Any) -> None:
    prepared, served = list[Any](), list[str]()

    def prepare(function: Callable[..., Any]) -> Callable[..., Any]:
        prepared.append(function)
        return lambda *args: function(*args)

    def fast(x: Any, mask: Any, scale: float, causal: bool) -> Any:
        served.append("fast")
        return OP.reference(x, mask, scale, causal)

    def exact(x: Any, mask: Any, scale: float, causal: bool) -> Any:
        served.append("exact")
        return OP.reference(x, mask, scale, causal)

    few = (Dim("x", (0,), at_most=2),)
    kernel = fusedops.kernel(OP.name, rows_independent=True, for_speed=few, for_rows=exact, prepare=prepare)(fast)
    fusedops.register(Backend("one", ("cpu",), 70, [kernel]))
    for _ in range(2):
        fusedops.scaled_masked_softmax(X[:2])
        with fusedops.use(rows="independent"):
            fusedops.scaled_masked_softmax(X)
    assert served == ["fast", "exact"] * 2
    assert len(prepared) == 2
    with pytest.raises(PluginError, match="got parameters"):
        fusedops.register(Backend("two", ("cpu",), 70, [fusedops.kernel(OP.name, for_rows=lambda x: x)(fast)]))


def test_the_promise_may_differ_by_device_type() -> None:
    kernel = fusedops.kernel(OP.name, rows_independent={"cpu": True, "*": "not here"})(lambda x, mask, scale, causal: x)
    assert [kernel.why_rows_depend(each) for each in ("cpu", "cuda")] == [None, "not here"]
    with fusedops.use(rows="independent"):
        on_cuda = fusedops.explain("layer_norm", TensorSpec((2, 4), device="cuda"))
    (reason,) = next(each for each in on_cuda.candidates if each.backend == "eager").reasons
    assert (on_cuda.backend, reason.code.value) == ("triton", "rows")


@pytest.mark.parametrize("value", [False, "", 1, {"cpu": False}, {1: True}])
def test_no_is_a_reason(value: Any) -> None:
    kernel = fusedops.kernel(OP.name, rows_independent=value)(lambda x, mask, scale, causal: x)
    with pytest.raises(PluginError, match="expected True or the reason why not, as a text; to fix: write one of these"):
        fusedops.register(Backend("mine", ("cpu",), 1, (kernel,)))


def test_the_channels_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_ROWS", "independent")
    assert fusedops.get_policy().rows == "independent"
    assert str(fusedops.get_policy()).endswith("; rows independent (from FUSEDOPS_ROWS)")
    fusedops.set_policy(rows="any")
    assert fusedops.get_policy().rows == "any"
    with fusedops.use("eager", rows="independent"):
        assert fusedops.get_policy().rows == "independent"
        with fusedops.use(fallback="silent"):
            carried = fusedops.get_policy()
    with fusedops.use(carried, rows="any"):
        assert (fusedops.get_policy().rows, fusedops.get_policy().fallback) == ("any", "silent")


def test_a_call_costs_no_more_under_it() -> None:
    """The setting is read where a plan is made: a call runs the same code, and its plan remembers calls as any."""
    from fusedops._dispatch.serve import plan_for

    x, weight = torch.randn(3, 8), torch.ones(8)
    with fusedops.use(rows="independent"):
        for _ in range(3):
            fusedops.rms_norm(x, weight)
        plan = plan_for(testing.OPS["rms_norm"], x, None)
    assert len(plan.recent) == 1
    with fusedops.use(rows="any"):
        assert plan_for(testing.OPS["rms_norm"], x, None) is not plan


def test_the_matrix_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    from fusedops._cli.main import main

    def forward(x: Any, bias: Any, approximate: Any) -> Any: ...

    def backward(grad: Any, x: Any, bias: Any, approximate: Any, needs: Any) -> Any: ...

    promised = fusedops.kernel("bias_gelu", rows_independent={"cpu": True, "*": "no"})(forward)
    other = fusedops.kernel("bias_gelu", direction="backward", rows_independent="a sum")(backward)
    fusedops.register(fusedops.Backend("mine", ("cpu",), -5, (promised, other)))
    assert main(["matrix", "--op", "bias_gelu", "--backend", "mine"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "on cpu: independent (forward)" in text
    assert "depend on others: a sum" in text
