"""Registering and unregistering backends by hand."""

from __future__ import annotations

import gc
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from broken_plugins import OP, X, fives, info
from state import backend_names

import fusedops
from fusedops import Backend, PluginError, Unavailable, kernel
from fusedops.constraints import Dim, DType, Scalar, When

pytestmark = pytest.mark.usefixtures("no_compiled_backend")


def test_a_backend_registered_by_hand_serves_and_leaves() -> None:
    made = Backend("mine", ("cpu",), 5, (fives,))
    assert fusedops.register(made) is made
    assert fusedops.scaled_masked_softmax(X).tolist() == [[5.0] * 4] * 2
    shown = info("mine")
    assert (shown.state, shown.distribution, shown.priority, shown.ops) == ("ready", "(registered)", 5, (OP.name,))
    fusedops.unregister("mine")
    assert fusedops.scaled_masked_softmax(X).tolist() == [[0.25] * 4] * 2
    with pytest.raises(fusedops.PolicyError, match="got backend 'mine', expected one of"):
        fusedops.use("mine")


class SoftmaxArgs(NamedTuple):
    x: torch.Tensor
    mask: torch.Tensor | None
    scale: float
    causal: bool


class OtherArgs(NamedTuple):
    x: torch.Tensor
    causal: bool


def test_a_kernel_takes_its_arguments_as_one_object() -> None:
    seen: list[Any] = []

    def function(a: SoftmaxArgs) -> torch.Tensor:
        seen.append(a)
        return a.x * a.scale

    mine = kernel(OP.name)(function)
    assert mine.location.startswith(__file__)
    fusedops.register(Backend("mine", ("cpu",), 5, (mine,)))
    assert fusedops.scaled_masked_softmax(X, scale=3.0).equal(3 * X)
    assert [(type(a), a.scale, a.causal) for a in seen] == [(SoftmaxArgs, 3.0, False)]

    def other(a: OtherArgs) -> torch.Tensor:
        return a.x

    with pytest.raises(PluginError, match=r"got parameters \(x, causal\), expected \(x, mask, scale, causal\)"):
        fusedops.register(Backend("other", ("cpu",), 5, (kernel(OP.name)(other),)))
    with pytest.raises(ValueError, match="two arguments objects, expected one"):

        @kernel(OP.name)
        def both(a: SoftmaxArgs, b: OtherArgs) -> torch.Tensor:
            return a.x


def test_a_plugin_object_can_be_registered() -> None:
    class Plugin:
        @fusedops.hookimpl
        def fusedops_backend(self) -> Backend:
            return Backend("mine", ("cpu",), 5, (fives,))

    fusedops.register(Plugin())
    assert info("mine").file == __file__
    assert fusedops.scaled_masked_softmax(X)[0, 0] == 5


def test_the_selection_of_a_policy_in_effect_follows_registration() -> None:
    with fusedops.use("triton,eager"):
        assert fusedops.explain(OP.name, X).backend == "triton"
        fusedops.unregister("triton")
        assert fusedops.explain(OP.name, X).backend == "eager"
        with pytest.warns(fusedops.FallbackWarning, match="runs on eager, not on triton: got no backend 'triton'"):
            assert fusedops.scaled_masked_softmax(X).sum() == 2


def test_a_backend_that_a_policy_names_and_that_is_unregistered_refuses_every_call() -> None:
    fusedops.register(Backend("mine", ("cpu",), -5, (fives,)))
    fusedops.set_policy("mine", fallback="raise")
    assert fusedops.scaled_masked_softmax(X)[0, 0] == 5
    fusedops.unregister("mine")
    with pytest.raises(fusedops.NoBackendError) as error:
        fusedops.scaled_masked_softmax(X)
    decision = error.value.decision
    assert decision == fusedops.explain(OP.name, X)
    assert decision.backend is decision.backward is None
    assert (decision.candidates[0].backend, decision.candidates[0].status) == ("mine", "refused")
    assert [reason.code.value for reason in decision.candidates[0].reasons] == ["not-registered"]
    fusedops.register(Backend("mine", ("cpu",), -5, (fives,)))  # the policy names it still
    assert fusedops.scaled_masked_softmax(X)[0, 0] == 5


def test_kernels_keep_what_was_declared() -> None:
    constraints = (
        DType("x", torch.float32),
        Dim("x", (-1,), at_most=8),
        When(DType("x", torch.float16), Scalar("scale", 1)),
    )
    made = kernel(fusedops.ops.scaled_masked_softmax, *constraints, source="a book")(fives.function)
    assert (made.op, made.direction, made.constraints, made.source) == (OP.name, "forward", constraints, "a book")
    assert made.location.startswith(f"{inspect.getsourcefile(fives.function)}:")


def test_a_probe_is_called_once_and_only_when_its_device_is_asked_for() -> None:
    asked: list[str] = []

    def probe(name: str) -> Callable[[], Unavailable | None]:
        return lambda: asked.append(name)

    for name, device in (("here", "cpu"), ("there", "cuda")):
        fusedops.register(Backend(name, (device,), 5, (fives,), probe=probe(name)))
    assert asked == []
    fusedops.use("there,here")
    assert asked == []
    for _ in range(3):
        fusedops.scaled_masked_softmax(X)
    assert asked == ["here"]
    fusedops.backends()
    fusedops.backends()
    assert asked == ["here", "there"]


def test_backends_come_in_the_default_order() -> None:
    for name, priority in (("low", -1000), ("high", 1000), ("high_too", 1000)):
        fusedops.register(Backend(name, ("cpu",), priority, (fives,)))
    order = [i.name for i in fusedops.backends()]
    assert order[:2] == ["high", "high_too"]
    assert order[-1] == "low"
    assert [i.priority for i in fusedops.backends()] == sorted((i.priority for i in fusedops.backends()), reverse=True)


@pytest.mark.parametrize("version", [0, 2])
def test_a_plugin_of_this_api_version_is_accepted(version: int) -> None:
    assert fusedops.API_VERSION == 2
    backend = Backend("versioned", ("cpu",), -5, (), fusedops_api=version)
    assert fusedops.register(backend) is backend


@pytest.mark.parametrize("version", [1, 3, -1, "2", ">=0.1", None])
def test_a_plugin_of_another_api_version_is_refused(version: Any) -> None:
    with pytest.raises(PluginError, match=r"got fusedops_api .*, expected 2, .*; to fix: install"):
        fusedops.register(Backend("versioned", ("cpu",), -5, (), fusedops_api=version))
    assert "versioned" not in backend_names()


def test_a_backend_that_is_unregistered_is_freed() -> None:
    freed: list[weakref.ref[torch.Tensor]] = []

    def add(name: str) -> None:
        large = torch.ones(1000)
        freed.append(weakref.ref(large))

        @kernel("bias_gelu", Dim("x", (-1,), at_most=2))
        def keeping(x: Any, bias: Any, approximate: Any) -> Any:
            return x * large[0]

        fusedops.register(Backend(name, ("cpu",), -5, (keeping,)))
        fusedops.bias_gelu(torch.ones(2), backend=name)
        fusedops.bias_gelu(torch.ones(2, requires_grad=True), backend=f"{name},eager").sum().backward()
        fusedops.unregister(name)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fusedops.FallbackWarning)
        for number in range(4):
            add(f"mine{number}")
    gc.collect()
    assert [reference() for reference in freed] == [None] * 4
