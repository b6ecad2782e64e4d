"""A plugin that brings an op of its own: it works like the built-in ones, and leaves nothing behind."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plugin_ops import OP_ALONE, SOURCE

import fusedops
from fusedops import FallbackWarning, PluginError, PolicyError
from fusedops.testing import OPS

pytestmark = pytest.mark.usefixtures("no_compiled_backend")

X = torch.tensor([1.0, 2.0, 3.0])
WAYS = ("entry point", "plugin", "op")


@pytest.fixture(params=WAYS)
def module(request: pytest.FixtureRequest, distribution: Any, rediscovered: Any) -> Any:
    """The plugin's module, brought by an entry point, by register(module), or by register(OP) and register(BACKEND)."""
    points = {"mine": "my_ops"} if request.param == "entry point" else {}
    rediscovered(distribution("my-ops", points, my_ops=SOURCE))
    imported = importlib.import_module("my_ops")
    if request.param == "plugin":
        fusedops.register(imported)
    elif request.param == "op":
        fusedops.register(imported.OP)
        fusedops.register(imported.BACKEND)
    imported.ran.clear()
    return imported


@pytest.fixture
def other(module: Any) -> Iterator[None]:
    """A second backend for the op, after the plugin's own in the default order."""
    fusedops.backends()
    fusedops.register(fusedops.Backend("other", ("cpu",), -6, module.kernels("other")))
    return


def test_explain(module: Any) -> None:
    decision = fusedops.explain("my_square", X, 2.0)
    assert (decision.op, decision.backend, decision.backward) == ("my_square", "mine", "mine")
    assert decision.given == "x float32[3] on cpu, factor 2"
    assert OPS["my_square"] is module.OP
    with pytest.raises(
        fusedops.InvalidInputError, match=r"^my_square: got factor = nan, expected a Python number, finite in float32"
    ):
        fusedops.explain("my_square", X, float("nan"))


def test_a_call_and_its_gradient(module: Any) -> None:
    x = X.clone().requires_grad_()
    y = module.my_square(x, 2.0)
    y.sum().backward()
    assert module.ran == ["mine", "mine backward"]
    assert torch.equal(y, 2 * X * X)
    assert torch.equal(x.grad, 4 * X)
    for wrong in ((X.long(), 1.0), (X, "2"), (None, 1.0)):
        with pytest.raises(fusedops.InvalidInputError, match=r"^my_square: got "):
            module.my_square(*wrong)


@pytest.mark.usefixtures("other")
def test_policies(module: Any) -> None:
    def who(**options: Any) -> str:
        module.ran.clear()
        module.my_square(X, **options)
        (name,) = module.ran
        assert fusedops.explain("my_square", X, **options).backend == name
        return name

    assert who() == "mine"
    assert who(backend="other") == "other"
    with fusedops.use("my_square=other"):
        assert who() == "other"
        assert fusedops.get_policy().order("my_square") == ("other",)
        assert fusedops.explain("bias_gelu", X).backend == "eager"
        with fusedops.use("mine"):
            assert who() == "mine"
    with fusedops.use("other; bias_gelu=eager"):
        assert who() == "other"
    fusedops.set_policy("eager; my_square=other, mine")
    assert who() == "other"
    with pytest.raises(
        PolicyError, match=r"got op 'my_sqare', expected one of .*my_square.*; to fix: write 'my_square'"
    ):
        fusedops.use("my_sqare=mine")


def test_a_backend_without_a_kernel_for_it_is_passed_over(module: Any) -> None:
    with fusedops.use("my_square=eager"):
        assert fusedops.explain("my_square", X).backend == "mine"
        with pytest.warns(FallbackWarning, match="^my_square runs on mine, not on eager: has no kernel for my_square"):
            assert torch.equal(module.my_square(X), X * X)
    with fusedops.use("my_square=eager", fallback="raise"), pytest.raises(fusedops.NoBackendError) as error:
        module.my_square(X)
    assert [reason.code.value for reason in error.value.decision.candidates[0].reasons] == ["no-kernel"]


def test_stats(module: Any) -> None:
    fusedops.reset_stats()
    x = X.clone().requires_grad_()
    module.my_square(x).sum().backward()
    module.my_square(X)
    rows = [(c.op, c.direction, c.backend, c.calls) for c in fusedops.stats().counts]
    assert rows == [("my_square", "forward", "mine", 2), ("my_square", "backward", "mine", 1)]


def test_verify(module: Any) -> None:
    x = X.clone().requires_grad_()
    with fusedops.verify("reference") as report:
        module.my_square(x, 3.0).sum().backward()
    assert [(row.op, row.backend, row.result, row.count, row.mismatches) for row in report.rows] == [
        ("my_square", "mine", "gradient of x", 1, 0),
        ("my_square", "mine", "output y", 1, 0),
    ]

    @fusedops.kernel("my_square")
    def wrong(x: Any, factor: Any) -> Any:
        return factor * x * x + 1

    fusedops.register(fusedops.Backend("wrong", ("cpu",), -9, (wrong,)))
    differs = pytest.raises(fusedops.MismatchError, match="output y of my_square by wrong")
    with fusedops.use("my_square=wrong"), differs, fusedops.verify("reference"):
        module.my_square(X)


def test_bind(module: Any) -> None:
    x = X.clone().requires_grad_()
    bound = fusedops.bind("my_square", x, 2.0)
    assert bound.__doc__ == "Compute ``factor * x * x``."
    bound(x, 2.0).sum().backward()
    assert module.ran == ["mine", "mine backward"]
    assert torch.equal(x.grad, 4 * X)
    assert torch.equal(bound(X), X * X), "defaults are filled in"


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_torch_compile(module: Any) -> None:
    x = X.clone().requires_grad_()
    y = compiled(lambda x: module.my_square(x * 1, 2.0) + 1)(x)
    y.sum().backward()
    assert module.ran == ["mine", "mine backward"]
    assert torch.equal(y, 2 * X * X + 1)
    assert torch.equal(x.grad, 4 * X)


def test_torch_ops_and_transforms(module: Any) -> None:
    fusedops.backends()
    assert torch.equal(torch.ops.fusedops.my_square(X, 2.0), 2 * X * X)
    torch.library.opcheck(torch.ops.fusedops.my_square.default, (X.clone().requires_grad_(), 2.0))
    assert torch.equal(torch.func.vmap(lambda x: module.my_square(x, 2.0))(X), 2 * X * X)
    assert torch.equal(torch.func.grad(lambda x: module.my_square(x, 2.0).sum())(X), 4 * X)
    assert torch.equal(torch.func.jvp(module.my_square, (X,), (torch.ones(3),))[1], 2 * X)
    double = X.double().requires_grad_()
    assert torch.autograd.gradgradcheck(module.my_square, (double,))


def test_unregister_removes_every_trace_and_it_can_be_registered_again(
    module: Any, request: pytest.FixtureRequest
) -> None:
    way = request.node.callspec.params["module"]
    for _ in range(2):
        compiled(lambda x: module.my_square(x, 2.0))(X)
        fusedops.unregister("mine")
        if way == "op":
            fusedops.unregister("my_square")
        assert "my_square" not in OPS
        assert "mine" not in [info.name for info in fusedops.backends()]
        assert not hasattr(torch.ops.fusedops, "my_square")
        with pytest.raises(PolicyError, match="got op 'my_square', expected one of"):
            fusedops.explain("my_square", X)
        with pytest.raises(PolicyError, match="got op 'my_square', expected one of"):
            fusedops.use("my_square=eager")
        with pytest.raises(fusedops.FusedOpsError, match="my_square"):
            module.my_square(X)
        if way == "op":
            fusedops.register(module.OP)
            fusedops.register(module.BACKEND)
        else:
            fusedops.register(module)
        assert torch.equal(module.my_square(X), X * X)


# ------------------------------------------------------------------------------------------------------ names, failures


@pytest.fixture
def my_ops(distribution: Any, rediscovered: Any) -> Any:
    """The plugin's module, not registered."""
    rediscovered(distribution("my-ops", {}, my_ops=SOURCE))
    return importlib.import_module("my_ops")


def test_an_op_without_a_backend_has_no_backend(distribution: Any, rediscovered: Any) -> None:
    rediscovered(distribution("my-ops", {"my_ops": "my_ops"}, my_ops=OP_ALONE))
    assert fusedops.explain("my_square", X).backend is None
    assert "my_ops" not in [info.name for info in fusedops.backends()], "it has no backend"
    module = importlib.import_module("my_ops")
    with pytest.raises(fusedops.NoBackendError, match=r"^no backend takes this call of my_square"):
        module.my_square(X)
    fusedops.register(fusedops.Backend("another", ("cpu",), -5, module.kernels("another")))
    assert fusedops.explain("my_square", X).backend == "another"
    # the plugin's name is no backend's
    with pytest.raises(PolicyError, match="got backend 'my_ops', expected one of"):
        fusedops.use("my_ops")
    with pytest.raises(PolicyError) as error:
        fusedops.use("xyzzy")
    assert "my_ops" not in str(error.value)
    fusedops.unregister("my_ops")
    assert "my_square" not in OPS


def test_a_second_registration_of_an_op_is_an_error_and_changes_nothing(my_ops: Any) -> None:
    fusedops.register(my_ops.OP)
    fusedops.register(my_ops.BACKEND)
    overload = torch.ops.fusedops.my_square.default
    with pytest.raises(PluginError, match=r"^plugin 'my_square': got a name that is already registered, expected"):
        fusedops.register(my_ops.OP)
    assert torch.ops.fusedops.my_square.default is overload
    assert torch.equal(overload(X, 2.0), 2 * X * X)


def test_the_op_of_a_plugin_that_fails_is_not_registered(my_ops: Any) -> None:
    backend = fusedops.Backend("Mine", ("cpu",), -5, my_ops.kernels("mine"))

    class Plugin:
        fusedops_op = fusedops.hookimpl(lambda self: my_ops.OP)
        fusedops_backend = fusedops.hookimpl(lambda self: backend)

    with pytest.raises(PluginError, match="backend 'Mine': got name 'Mine'"):
        fusedops.register(Plugin())
    assert "my_square" not in OPS
    assert not hasattr(torch.ops.fusedops, "my_square")


def test_the_op_of_an_installed_plugin_that_fails_is_not_registered(distribution: Any, rediscovered: Any) -> None:
    rediscovered(distribution("my-ops", {"mine": "my_ops"}, my_ops=SOURCE.replace('"mine", ("cpu",)', '"mine", "cpu"')))
    (info,) = [info for info in fusedops.backends() if info.name == "mine"]
    assert info.state == "failed"
    assert "my_square" not in OPS


def test_kernels_for_an_op_of_a_failed_plugin_are_a_failed_backend(distribution: Any, rediscovered: Any) -> None:
    broken = SOURCE.replace('"mine", ("cpu",)', '"mine", "cpu"')
    user = "import fusedops, my_ops\n@fusedops.hookimpl\ndef fusedops_backend():\n"
    user += "    return fusedops.Backend('user', ('cpu',), -5, my_ops.kernels('user'))\n"
    rediscovered(distribution("my-ops", {"mine": "my_ops", "user": "user"}, my_ops=broken, user=user))
    infos = {info.name: info for info in fusedops.backends()}
    assert (infos["mine"].state, infos["user"].state, infos["eager"].state) == ("failed", "failed", "ready")
    assert infos["user"].why.startswith("PluginError: backend 'user': got a kernel for 'my_square' at ")
    assert "my_square" not in OPS


def test_a_plugin_with_one_op_of_a_taken_name_adds_none(distribution: Any, rediscovered: Any) -> None:
    source = OP_ALONE + "@fusedops.hookimpl\ndef fusedops_op():\n    return [OP, fusedops.ops.OPS['bias_gelu']]\n"
    rediscovered(distribution("my-ops", {"my_ops": "my_ops"}, my_ops=source))
    (info,) = [info for info in fusedops.backends() if info.name == "my_ops"]
    assert info.state == "failed"
    assert "my_square" not in OPS
    assert not hasattr(torch.ops.fusedops, "my_square")


def test_an_op_can_be_unregistered_before_its_backend(my_ops: Any) -> None:
    fusedops.register(my_ops)
    fusedops.unregister("my_square")
    assert "my_square" not in OPS
    assert "mine" in [info.name for info in fusedops.backends()]
    assert fusedops.testing.checks("mine", device="cpu") == []
    fusedops.unregister("mine")
    assert "mine" not in [info.name for info in fusedops.backends()]


def test_an_interrupted_discovery_leaves_no_op(distribution: Any, rediscovered: Any, monkeypatch: Any) -> None:
    distribution("my-ops", {"mine": "my_ops"}, my_ops=SOURCE)
    source = "import os, my_ops\nif 'INTERRUPTED' in os.environ: raise KeyboardInterrupt\n"
    source += "import fusedops\n@fusedops.hookimpl\ndef fusedops_backend():\n"
    source += "    return fusedops.Backend('stops', ('cpu',), -5, my_ops.kernels('stops'))\n"
    monkeypatch.setenv("INTERRUPTED", "1")
    rediscovered(distribution("stops-dist", {"stops": "stops"}, stops=source))
    with pytest.raises(KeyboardInterrupt):
        fusedops.backends()
    assert "my_square" not in OPS
    monkeypatch.delenv("INTERRUPTED")
    states = {info.name: info.state for info in fusedops.backends()}
    assert (states["mine"], states["stops"]) == ("ready", "ready")


def test_several_ops_of_one_plugin(my_ops: Any) -> None:
    import copy

    twin = copy.copy(my_ops.OP)
    twin.name = "my_twin"

    class Plugin:
        fusedops_op = fusedops.hookimpl(lambda self: [my_ops.OP, twin])

    fusedops.register(Plugin(), "several")
    assert {"my_square", "my_twin"} <= set(OPS)
    fusedops.unregister("several")
    assert not {"my_square", "my_twin"} & set(OPS)
    fusedops.register(Plugin(), "several")
    fusedops.unregister("my_square")
    assert "my_square" not in OPS
    assert "my_twin" in OPS
    fusedops.unregister("my_twin")
    with pytest.raises(PluginError, match=r"^unregister: got 'several', expected a registered"):
        fusedops.unregister("several")


def test_a_built_in_op_cannot_be_unregistered() -> None:
    with pytest.raises(PluginError, match="got 'bias_gelu', expected a registered backend"):
        fusedops.unregister("bias_gelu")


def test_in_a_python_of_its_own_with_a_policy_of_the_environment(distribution: Any, python: Any) -> None:
    site = distribution("my-ops", {"mine": "my_ops"}, my_ops=SOURCE)
    printed = python(
        """
        import json, torch, fusedops
        import my_ops
        x = torch.ones(2, requires_grad=True)
        my_ops.my_square(x).sum().backward()
        decision = fusedops.explain("my_square", torch.ones(2))
        print(json.dumps([x.grad.tolist(), my_ops.ran, decision.backend, str(fusedops.get_policy())]))
        """,
        site,
        FUSEDOPS_BACKEND="eager; my_square=mine",
        FUSEDOPS_FALLBACK="raise",
    )
    assert printed[:3] == [[2.0, 2.0], ["mine", "mine backward"], "mine"]
    assert printed[3] == 'FUSEDOPS_BACKEND: "eager; my_square=mine"; fallback raise (from FUSEDOPS_FALLBACK)'
