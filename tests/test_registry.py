"""Backends: found through real distributions; a broken one is its own failure alone, kept with its error."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusedops
from fusedops import Backend, BackendInfo, PluginError, Unavailable, kernel
from fusedops.__main__ import main
from fusedops._op import OPS
from fusedops._registry import registry
from fusedops.constraints import Dim, DType, Scalar, When

OP = OPS["scaled_masked_softmax"]
EXAMPLE = pathlib.Path(__file__).parent / "plugins" / "fusedops-backend-example"
WANTED = "(x, mask=None, scale=1.0, *, causal=False)"
X = torch.ones(2, 4)

HEAD = """
import torch, fusedops
from fusedops import Backend, hookimpl, kernel
from fusedops.constraints import Dim, DType, Scalar, When
SOFTMAX = "scaled_masked_softmax"

@kernel(SOFTMAX)
def good(x, mask=None, scale=1.0, *, causal=False): return torch.zeros_like(x)
"""


def plugin(name: str, kernels: str = "good,", head: str = "", **fields: str) -> str:
    """The source of a plugin module."""
    given = {"name": repr(name), "device_types": "('cpu',)", "priority": "-5", "kernels": f"({kernels})", **fields}
    arguments = ", ".join(f"{key}={value}" for key, value in given.items())
    return f"{HEAD}\n{head}\n@hookimpl\ndef fusedops_backend(): return Backend({arguments})\n"


def with_kernel(name: str, decorator: str, signature: str) -> str:
    return plugin(name, "made,", f"@kernel({decorator})\ndef made{signature}: return x\n")


# name: (source, the class of its error, the end of its message; {file} is the module's file)
BROKEN: dict[str, tuple[str, str, str]] = {
    "raises": ("raise RuntimeError('no licence found')", "RuntimeError", "no licence found"),
    "lacks": ("import a_vendor_that_is_not_here", "ModuleNotFoundError", "No module named 'a_vendor_that_is_not_here'"),
    "syntax": ("def f(:", "SyntaxError", "invalid syntax (syntax.py, line 1)"),
    "names": (
        with_kernel("names", "SOFTMAX", "(x, attn_mask=None, scale=1.0, *, causal=False)"),
        "PluginError",
        "backend 'names': forward kernel for scaled_masked_softmax at {file}:10 takes (x, attn_mask=None, scale=1.0, "
        f"*, causal=False); needs the op's parameters, in order; write it as {WANTED}",
    ),
    "newer": (
        plugin("newer", fusedops_api="'>=0.2,<0.3'"),
        "PluginError",
        "backend 'newer': needs fusedops_api >=0.2,<0.3; this fusedops has 0.1; install the release of the backend "
        "that is for 0.1, or a fusedops that it is for",
    ),
    "vague": (
        plugin("vague", fusedops_api="'0.1'"),
        "PluginError",
        "backend 'vague': fusedops_api is '0.1'; needs comparisons with a version, separated by commas, such as "
        "'>=0.1,<0.2'",
    ),
    "kind": (
        with_kernel("kind", "SOFTMAX", "(x, mask=None, scale=1.0, causal=False)"),
        "PluginError",
        "backend 'kind': forward kernel for scaled_masked_softmax at {file}:10: parameter 'causal' is positional or "
        f"keyword; needs keyword-only; write it as {WANTED}",
    ),
    "default": (
        with_kernel("default", "SOFTMAX", "(x, mask=None, scale=0.5, *, causal=False)"),
        "PluginError",
        "backend 'default': forward kernel for scaled_masked_softmax at {file}:10: the default of 'scale' is 0.5; "
        f"needs 1.0; write it as {WANTED}",
    ),
    "required": (
        with_kernel("required", "SOFTMAX", "(x, mask, scale=1.0, *, causal=False)"),
        "PluginError",
        "backend 'required': forward kernel for scaled_masked_softmax at {file}:10: the default of 'mask' is absent; "
        f"needs None; write it as {WANTED}",
    ),
    "backward": (
        plugin(
            "backward",
            "good, made",
            "@kernel(SOFTMAX, direction='backward')\ndef made(grad, y, scale): return y\n",
        ),
        "PluginError",
        "backend 'backward': backward kernel for scaled_masked_softmax at {file}:10 takes (grad, y, scale); needs the "
        f"op's parameters, in order; write it as ({', '.join(OP.backward_parameters)})",
    ),
    "unknown": (
        with_kernel("unknown", "'scaled_softmax'", "(x)"),
        "PluginError",
        "backend 'unknown': {file}:10 is a kernel for 'scaled_softmax', which is no op; the ops are "
        + ", ".join(sorted(OPS))
        + "; name one of these",
    ),
    "other": (
        plugin("another"),
        "PluginError",
        "entry point 'other' gives a backend named 'another'; needs one name; rename either",
    ),
    "junk": (
        "import fusedops\n@fusedops.hookimpl\ndef fusedops_backend(): return {'name': 'junk'}",
        "PluginError",
        "plugin 'junk' gives dict for fusedops_backend; needs a function marked @fusedops.hookimpl that returns a "
        "fusedops.Backend; add it, as in docs/add-a-backend.md",
    ),
    "unmarked": (
        "def fusedops_backend(): pass",
        "PluginError",
        "plugin 'unmarked' gives NoneType for fusedops_backend; needs a function marked @fusedops.hookimpl that "
        "returns a fusedops.Backend; add it, as in docs/add-a-backend.md",
    ),
    "misspelt": (
        "import fusedops\n@fusedops.hookimpl\ndef fusedops_backends(): pass",
        "PluginError",
        "plugin 'misspelt': unknown hook 'fusedops_backends' in plugin <module 'misspelt' from '{file}'>; needs "
        "hooks of fusedops_backend and fusedops_observe; mend its functions",
    ),
    "exits": (
        "import sys; sys.exit(3)",
        "PluginError",
        "backend 'exits': its import called sys.exit(3); needs to raise an error; mend it",
    ),
    "hookexits": (
        "import sys, fusedops\n@fusedops.hookimpl\ndef fusedops_backend(): sys.exit('no licence')",
        "PluginError",
        "backend 'hookexits': its import called sys.exit('no licence'); needs to raise an error; mend it",
    ),
    "watches": (
        "import fusedops\n@fusedops.hookimpl\ndef fusedops_observe(event): pass",
        "PluginError",
        "plugin 'watches' observes and has no backend; needs one too, or fusedops.register() instead of an entry point",
    ),
    "asks": (
        "import fusedops; fusedops.backends()",
        "PluginError",
        "a backend's plugin asks for backends while it is imported, when not all are known; needs to wait: register, "
        "set policies and call ops from its probe, its kernels or the program",
    ),
    "replaces": (
        "import fusedops; fusedops.unregister('eager')",
        "PluginError",
        "call ops from its probe, its kernels or the program",
    ),
    "hook": (
        "import fusedops\n@fusedops.hookimpl\ndef fusedops_backend(): raise OSError('no driver')",
        "OSError",
        "no driver",
    ),
    "limit": (
        with_kernel("limit", "SOFTMAX, Dim('y', (-1,), at_least=2)", "(x, mask=None, scale=1.0, *, causal=False)"),
        "PluginError",
        "limit 'y: dim -1 a size of at least 2' is on 'y', which is no parameter; needs one of x, mask, scale, causal; "
        "name that",
    ),
    "condition": (
        with_kernel(
            "condition",
            "SOFTMAX, When(DType('q', torch.float16), Scalar('scale', 1.0))",
            "(x, mask=None, scale=1.0, *, causal=False)",
        ),
        "PluginError",
        "limit 'scale: a value in [-1, 1] where q: float16' is on 'q', which is no parameter; needs one of x, mask, "
        "scale, causal; name that",
    ),
    "nolimit": (
        with_kernel("nolimit", "SOFTMAX, torch.float16", "(x, mask=None, scale=1.0, *, causal=False)"),
        "PluginError",
        "torch.float16 is no limit; needs one from fusedops.constraints; write one such as Rank('x', 4)",
    ),
    "bare": (
        plugin("bare", "bare_function,", "def bare_function(x): return x\n"),
        "PluginError",
        "is no kernel; needs a function that is one; decorate it with @fusedops.kernel(op, limits...)",
    ),
    "twins": (
        plugin("twins", "good, made", "@kernel(SOFTMAX)\ndef made(x, mask=None, scale=1.0, *, causal=False): ...\n"),
        "PluginError",
        "backend 'twins': two forward kernels for scaled_masked_softmax: {file}:7 and {file}:10; needs one; "
        "remove the other",
    ),
    "onlyback": (
        plugin(
            "onlyback",
            "made,",
            f"@kernel(SOFTMAX, direction='backward')\ndef made({', '.join(OP.backward_parameters)}): return y\n",
        ),
        "PluginError",
        "backend 'onlyback': a backward kernel for scaled_masked_softmax without a forward kernel; needs both; "
        "add the forward one",
    ),
    "auto": (
        plugin("auto"),
        "PluginError",
        "backend 'auto': a name needs to be a lower-case identifier other than 'auto', as policies are written "
        "with it; rename it",
    ),
    "Upper": (
        plugin("Upper"),
        "PluginError",
        "backend 'Upper': a name needs to be a lower-case identifier other than 'auto', as policies are written "
        "with it; rename it",
    ),
    "text": (
        plugin("text", device_types="'cuda'"),
        "PluginError",
        "backend 'text': device_types is 'cuda'; needs a tuple, such as ('cuda',), or ('*',) for all",
    ),
    "kinds": (
        plugin("kinds", device_types="(0,)"),
        "PluginError",
        "backend 'kinds': device_types is (0,); needs a tuple, such as ('cuda',), or ('*',) for all",
    ),
    "loud": (
        plugin("loud", priority="'highest'"),
        "PluginError",
        "backend 'loud': priority is 'highest'; needs a whole number, such as 100; 0 is a fallback's",
    ),
    "odd": (
        plugin(
            "odd",
            "made,",
            "class Odd(DType):\n    def expression(self, constants): raise LookupError('no such field')\n"
            "@kernel(SOFTMAX, Odd('x', torch.float32))\n"
            "def made(x, mask=None, scale=1.0, *, causal=False): return x\n",
        ),
        "LookupError",
        "no such field",
    ),
    "nodevice": (
        plugin("nodevice", device_types="()"),
        "PluginError",
        "backend 'nodevice': device_types is (); needs a tuple, such as ('cuda',), or ('*',) for all",
    ),
}
WORKING = {
    "works": plugin("works"),
    "away": plugin("away", probe="lambda: fusedops.Unavailable('no chip', 'buy one')"),
}
PROBE = plugin("probe", head="def bad(): raise OSError('driver 5.1 is too old')\n", probe="bad")


OBJECT = """
import fusedops

class Plugin:
    @staticmethod
    @fusedops.hookimpl
    def fusedops_backend():
        return fusedops.Backend("two", ("cpu",), -5, ())
"""


def write_all(distribution: Callable[..., pathlib.Path]) -> pathlib.Path:
    """Installs every broken plugin, working ones, two rivals and a pretender."""
    for name, (source, *_) in BROKEN.items():
        distribution(f"{name}-dist", {name: name}, **{name: source})
    for name, source in {**WORKING, "probe": PROBE}.items():
        distribution(f"{name}-dist", {name: name}, **{name: source})
    distribution("attribute-dist", {"attribute": "works:nothing"})
    distribution("gone-dist", {"gone": "gone_module"})
    distribution("first-dist", {"twice": "first"}, first=plugin("twice"))
    distribution("second-dist", {"twice": "second"}, second=plugin("twice"))
    return distribution("pretender-dist", {"eager": "pretender"}, pretender=plugin("eager", priority="999"))


@pytest.fixture
def broken(distribution: Any, rediscovered: Any) -> pathlib.Path:
    """The site folder with every plugin above, seen by this process."""
    site = write_all(distribution)
    rediscovered(site)
    return site


def info(name: str, distribution: str | None = None) -> BackendInfo:
    (found,) = [i for i in fusedops.backends() if i.name == name and distribution in (None, i.distribution)]
    return found


# ------------------------------------------------------------------------------------------------------- broken plugins


def test_every_broken_plugin_is_failed_with_its_own_error_and_the_rest_works(broken: pathlib.Path) -> None:
    for name, (_, kind, message) in BROKEN.items():
        told = info(name)
        assert (told.state, told.distribution, told.version) == ("failed", f"{name}-dist", "1.0"), name
        said = message.replace("{file}", str(broken / f"{name}.py"))
        assert told.why.endswith(said), f"{name}: {told.why}"
        assert told.why.startswith(f"{kind}: "), f"{name}: {told.why}"
        assert told.error.startswith("Traceback (most recent call last):"), name
        assert told.error.strip().endswith(said.partition(" (syntax.py")[0]), name
        assert told.fix == f"fix or uninstall {name}-dist; fusedops.backends() shows the traceback"
        assert told.ops == told.device_types == ()
    for name in ("works", "eager", "triton"):
        assert next(i.state for i in fusedops.backends() if i.name == name) == "ready"
    assert torch.equal(fusedops.scaled_masked_softmax(X, backend="works"), torch.zeros(2, 4))
    assert fusedops.explain(OP.name, X).backend == "eager"


# "auto" stands for the default order in a policy, whatever a plugin is called
@pytest.mark.parametrize("name", [*(name for name in BROKEN if name != "auto"), "attribute", "gone", "twice"])
def test_naming_a_failed_backend_raises_its_error_again(broken: pathlib.Path, name: str) -> None:
    for say in (
        lambda: fusedops.set_policy(name),
        lambda: fusedops.use(f"triton; {OP.name}=works,{name}"),
        lambda: fusedops.scaled_masked_softmax(X, backend=name),
        lambda: fusedops.explain(OP.name, X, backend=name),
    ):
        with pytest.raises(PluginError) as error:
            say()
        cause = error.value.__cause__
        assert cause is not None
        assert f"names {name!r}, which failed to load: {cause}" in str(error.value)
        if name in BROKEN:
            assert type(cause).__name__ == BROKEN[name][1]
        assert cause.__traceback__ is not None or isinstance(cause, PluginError)
    assert str(fusedops.get_policy()).startswith("auto (nothing set)")


def test_an_entry_point_that_leads_nowhere(broken: pathlib.Path) -> None:
    assert info("attribute").why == "AttributeError: module 'works' has no attribute 'nothing'"
    assert info("gone").why == "ModuleNotFoundError: No module named 'gone_module'"


def test_two_distributions_that_claim_one_name_are_both_failed(broken: pathlib.Path) -> None:
    both = [i for i in fusedops.backends() if i.name == "twice"]
    assert sorted(i.distribution for i in both) == ["first-dist", "second-dist"]
    for told in both:
        assert told.state == "failed"
        assert told.why == (
            f"PluginError: backend 'twice' of {told.distribution} is not loaded: first-dist and "
            "second-dist both claim the name 'twice'; needs one owner; uninstall one"
        )
    assert fusedops.explain(OP.name, X).backend == "eager"


def test_a_built_in_name_cannot_be_taken(broken: pathlib.Path) -> None:
    assert info("eager", "fusedops").state == "ready"
    told = info("eager", "pretender-dist")
    assert told.state == "failed"
    assert told.why == (
        "PluginError: backend 'eager' of pretender-dist is not loaded: the name 'eager' is fusedops's own; "
        "needs another; rename it"
    )
    assert fusedops.scaled_masked_softmax(X, backend="eager").sum() == 2
    fusedops.use("eager")


def test_a_probe_that_raises_is_a_failed_backend(broken: pathlib.Path) -> None:
    fusedops.use("probe")  # not probed yet: a policy alone imports nothing
    with pytest.warns(fusedops.FallbackWarning) as said:
        fusedops.scaled_masked_softmax(X, backend="probe")
    assert [str(w.message) for w in said] == [
        "scaled_masked_softmax runs on eager, not on probe: failed: PluginError: backend 'probe': its "
        "probe raised OSError: driver 5.1 is too old. To qualify for probe: fix or uninstall probe-dist; "
        'fusedops.backends() shows the traceback. (Said once; fallback="raise" makes this an error, "silent" hides it.)'
    ]
    told = info("probe")
    assert told.state == "failed"
    assert "OSError: driver 5.1 is too old" in told.error
    assert "in bad" in told.error, "the traceback of the probe itself"
    fusedops.use("probe")  # as before: what naming does must not depend on whether someone has looked
    with (
        pytest.raises(fusedops.NoBackendError, match=r"driver 5\.1 is too old"),
        fusedops.use("probe", fallback="raise"),
    ):
        fusedops.scaled_masked_softmax(X)


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        (lambda: exit(3), "its probe raised SystemExit: 3"),
        (
            lambda: True,
            "its probe raised TypeError: it gave True; needs None where it can run, or Unavailable(why, fix)",
        ),
        (
            lambda: Unavailable("", ""),
            "its probe raised TypeError: it gave Unavailable(why='', fix=''); needs None where it can run, or "
            "Unavailable(why, fix)",
        ),
    ],
    ids=["exits", "junk", "empty"],
)
def test_a_probe_that_leaves_or_gives_junk_is_a_failed_backend(probe: Any, said: str) -> None:
    fusedops.register(Backend("mine", ("cpu",), 5, (fives,), probe=probe))
    with pytest.warns(fusedops.FallbackWarning, match="scaled_masked_softmax runs on eager, not on mine: failed"):
        assert fusedops.scaled_masked_softmax(X).sum() == 2
    told = info("mine")
    assert (told.state, told.why) == ("failed", f"PluginError: backend 'mine': {said}")


@pytest.mark.parametrize("where", ["import", "probe"])
def test_an_interrupt_passes(where: str, distribution: Any, rediscovered: Any) -> None:
    head = "def stop(): raise KeyboardInterrupt"
    source = "raise KeyboardInterrupt" if where == "import" else plugin("stops", head=head, probe="stop")
    before = registry.records()
    rediscovered(distribution("stops-dist", {"stops": "stops"}, stops=source))
    try:
        for _ in range(2):  # and leaves nothing half done
            with pytest.raises(KeyboardInterrupt):
                fusedops.backends()
    finally:
        registry._records = before


def test_a_loud_plugin_is_first_by_default_and_never_before_a_named_one(distribution: Any, rediscovered: Any) -> None:
    source = plugin("first_of_all", priority="10**9")
    rediscovered(distribution("first-dist", {"first_of_all": "foremost"}, foremost=source))
    assert fusedops.explain(OP.name, X).backend == "first_of_all"
    assert info("first_of_all").priority == 10**9
    for text in ("eager", "triton", "npu,eager", f"{OP.name}=eager"):
        with fusedops.use(text, fallback="silent"):
            assert fusedops.explain(OP.name, X).backend == text.rpartition(",")[2].rpartition("=")[2]
            assert fusedops.scaled_masked_softmax(X).sum() == 2
    with pytest.raises(AttributeError, match="cannot assign to field 'priority'"):
        registry.find("eager").backend.priority = -1  # type: ignore[union-attr,misc]


def test_file_distribution_and_version_of_each_are_shown(
    distribution: Any, rediscovered: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    site = distribution("two-dist", {"two": "two_module:Plugin"}, version="2.5", two_module=OBJECT)
    rediscovered(site)
    told = info("two")
    assert (told.distribution, told.version, told.file) == ("two-dist", "2.5", str(site / "two_module.py"))
    assert main(["info"]) == 0
    said = "".join(capsys.readouterr().out.split())
    for each in fusedops.backends():
        assert f"{each.distribution}{each.version}" in said
        assert each.file
        assert "".join(each.file.split()) in said
    assert info("eager").file.endswith("fusedops_eager/__init__.py")


def test_a_probe_that_says_no_is_an_unavailable_backend(broken: pathlib.Path) -> None:
    told = info("away")
    assert (told.state, told.why, told.fix, told.error) == ("unavailable", "no chip", "buy one", "")
    assert (told.device_types, told.priority, told.ops) == (("cpu",), -5, (OP.name,))
    assert told.file.endswith("away.py")


def test_every_broken_plugin_in_a_python_of_its_own(distribution: Any, python: Any) -> None:
    script = f"""
        import json, torch, fusedops
        y = fusedops.scaled_masked_softmax(torch.ones(2, 4), backend="works")
        assert float(fusedops.scaled_masked_softmax(torch.ones(2, 4)).sum()) == 2
        told = {{}}
        for name in {json.dumps([name for name in [*BROKEN, "twice"] if name != "auto"])}:
            try:
                fusedops.set_policy(name)
            except fusedops.PluginError as error:
                told[name] = [type(error.__cause__).__name__, str(error)]
        states = [[i.name, i.distribution, i.state, bool(i.error)] for i in fusedops.backends()]
        print(json.dumps([float(y.sum()), told, states]))
    """
    zeros, told, states = python(script, write_all(distribution))
    assert zeros == 0
    assert {name: kind for name, (kind, _) in told.items()} == {
        **{name: kind for name, (_, kind, _) in BROKEN.items() if name != "auto"},
        "twice": "PluginError",
    }
    failed = {(name, dist) for name, dist, state, error in states if state == "failed" and error}
    assert failed == {
        *((name, f"{name}-dist") for name in [*BROKEN, "attribute", "gone", "probe"]),
        ("twice", "first-dist"),
        ("twice", "second-dist"),
        ("eager", "pretender-dist"),
    }
    ready = {name for name, _, state, _ in states if state == "ready"}
    assert {"works", "eager"} <= ready


# --------------------------------------------------------------------------------------------------- the example plugin


def test_the_example_distribution_is_a_backend_like_ours(python: Any, tmp_path: pathlib.Path) -> None:
    path: list[pathlib.Path] = []
    try:
        assert importlib.metadata.distribution("fusedops-backend-example").version == "1.0.0"
    except importlib.metadata.PackageNotFoundError:
        # what pip would write, beside the sources
        declared = (EXAMPLE / "pyproject.toml").read_text()
        points = declared.partition('[project.entry-points."fusedops.backends"]\n')[2].splitlines()[0]
        site = tmp_path / "fusedops_backend_example-1.0.0.dist-info"
        site.mkdir()
        (site / "METADATA").write_text("Metadata-Version: 2.1\nName: fusedops-backend-example\nVersion: 1.0.0\n")
        (site / "entry_points.txt").write_text(f"[fusedops.backends]\n{points.replace(chr(34), '')}\n")
        path = [tmp_path, EXAMPLE]
    told = python(
        """
        import json, warnings, torch, fusedops
        from fusedops import testing
        op = testing.OPS["scaled_masked_softmax"]
        (info,) = [i for i in fusedops.backends() if i.name == "example"]
        call = op.positional(fusedops.scaled_masked_softmax)
        with fusedops.use("example", fallback="raise"):
            for case in op.cases:
                case = testing.shrunk(case, 2**13)
                for dtype in (torch.float32, torch.float64):
                    args = testing.arguments(op, case, dtype)
                    if args[0].shape[-1] > 1024:
                        continue
                    want = testing.expected(op, args)
                    x = args[0].requires_grad_()
                    y = call(*args)
                    y.backward(want.grad.to(dtype))
                    testing.assert_within(y, want.y, op.tolerance[dtype], case.name)
                    testing.assert_within(x.grad, want.gradients["x"], op.tolerance[dtype], case.name)
        long = torch.ones(2, 1025)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fusedops.scaled_masked_softmax(long, backend="example")
        decision = fusedops.explain("scaled_masked_softmax", torch.ones(2, 8), backend="example")
        print(json.dumps([
            [info.state, info.distribution, info.version, info.device_types, info.ops],
            [str(w.message) for w in said], decision.backend, decision.backward,
            fusedops.explain("scaled_masked_softmax", torch.ones(2, 8)).backend,
        ]))
        """,
        *path,
    )
    assert told == [
        ["ready", "fusedops-backend-example", "1.0.0", ["cpu"], [OP.name]],
        [
            "scaled_masked_softmax runs on eager, not on example: dim -1 of x is 1025; needs a size of at most 1024. "
            "To qualify for example: split x so that dim -1 is at most 1024. (Said once; "
            'fallback="raise" makes this an error, "silent" hides it.)'
        ],
        "example",
        "example",
        "eager",
    ]


# ------------------------------------------------------------------------------------------------- register, unregister


@kernel(fusedops.ops.scaled_masked_softmax)
def fives(x: Any, mask: Any = None, scale: float = 1.0, *, causal: bool = False) -> Any:
    return torch.full_like(x, 5.0)


def test_a_backend_registered_by_hand_serves_and_leaves() -> None:
    made = Backend("mine", ("cpu",), 5, (fives,))
    assert fusedops.register(made) is made
    assert fusedops.scaled_masked_softmax(X).tolist() == [[5.0] * 4] * 2
    told = info("mine")
    assert (told.state, told.distribution, told.priority, told.ops) == ("ready", "(registered)", 5, (OP.name,))
    fusedops.unregister("mine")
    assert fusedops.scaled_masked_softmax(X).tolist() == [[0.25] * 4] * 2
    with pytest.raises(fusedops.PolicyError, match="no backend is called 'mine'"):
        fusedops.use("mine")


def test_a_plugin_object_can_be_registered() -> None:
    class Plugin:
        @fusedops.hookimpl
        def fusedops_backend(self) -> Backend:
            return Backend("mine", ("cpu",), 5, (fives,))

    fusedops.register(Plugin())
    assert info("mine").file == __file__
    assert fusedops.scaled_masked_softmax(X)[0, 0] == 5


def test_what_a_policy_in_force_chooses_follows_registration() -> None:
    with fusedops.use("triton,eager"):
        assert fusedops.explain(OP.name, X).backend == "triton"
        fusedops.unregister("triton")
        assert fusedops.explain(OP.name, X).backend == "eager"
        assert fusedops.scaled_masked_softmax(X).sum() == 2


def test_a_name_is_taken_once() -> None:
    with pytest.raises(
        PluginError,
        match=r"^backend 'eager' is already registered; needs a free name; choose another name, or fusedops.u",
    ):
        fusedops.register(Backend("eager", ("cpu",), 5, (fives,)))
    assert info("eager").distribution == "fusedops"


def test_what_does_not_fit_is_not_registered() -> None:
    with pytest.raises(PluginError, match="which is no op"):
        fusedops.register(Backend("mine", ("cpu",), 5, (kernel("softmax")(lambda x: x),)))
    with pytest.raises(PluginError, match="gives NoneType for fusedops_backend"):
        fusedops.register(object(), "nothing")
    assert "mine" not in registry.names()


def test_unregistering_what_is_not_there() -> None:
    with pytest.raises(PluginError, match=r"no backend is called 'mine'; registered are .*eager"):
        fusedops.unregister("mine")


def test_kernels_keep_what_was_declared() -> None:
    limits = (
        DType("x", torch.float32),
        Dim("x", (-1,), at_most=8),
        When(DType("x", torch.float16), Scalar("scale", 1)),
    )
    made = kernel(fusedops.ops.scaled_masked_softmax, *limits, source="a book")(fives.function)
    assert (made.op, made.direction, made.limits, made.source) == (OP.name, "forward", limits, "a book")
    assert made.where.startswith(f"{__file__}:")


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


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        ("", True), (">=0.1,<0.2", True), ("==0.1", True), ("==0.1.0", True), (" >= 0.1 , != 0.1.3 ", True),
        (">0.1", False), (">=0.1,<0.1", False), ("<0.1", False), (">=0.10", False), (">=1", False), ("!=0.1", False),
    ],
)  # fmt: skip
def test_a_plugin_is_taken_within_its_range_of_the_api(wanted: str, taken: bool) -> None:
    assert fusedops.API_VERSION == "0.1"
    backend = Backend("ranged", ("cpu",), -5, (), fusedops_api=wanted)
    if taken:
        assert fusedops.register(backend) is backend
    else:
        with pytest.raises(PluginError, match=r"needs fusedops_api .*; this fusedops has 0\.1; install"):
            fusedops.register(backend)


@pytest.mark.parametrize("wanted", ["0.1", ">=", ">=0.1,", "~=0.1", ">=0.1 <0.2", ">=a"])
def test_a_range_that_is_none_is_refused(wanted: str) -> None:
    with pytest.raises(PluginError, match="needs comparisons with a version, separated by commas"):
        fusedops.register(Backend("ranged", ("cpu",), -5, (), fusedops_api=wanted))
