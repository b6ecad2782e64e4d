"""Every text of a PluginError, word for word."""

import copy
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from error_calls import GOOD, PLUGIN, X, backend, gelu, made, registering, with_mine
from error_texts import Table
from state import discovery_errors

import fusedops
from fusedops.constraints import Rank

TABLE = Table(__file__)
pin = TABLE.pin

pin("backend's name", registering(name="Mine"), PLUGIN, "backend 'Mine'", "a lower-case identifier", "rename it")
pin("device types", registering(devices="cuda"), PLUGIN, "device_types 'cuda'", "expected a tuple", "write ('cuda',)")
pin(
    "priority",
    lambda: fusedops.register(fusedops.Backend("mine", ("cpu",), "high", ())),  # type: ignore[arg-type]
    PLUGIN,
    "got priority 'high'",
    "expected an integer",
    "use 100",
)
pin("another API", registering(fusedops_api=9), PLUGIN, "got fusedops_api 9", "expected 2", "install a release")
pin("no kernel", registering(5), PLUGIN, "got 5", "expected a kernel", "decorate it")
pin("kernel's op", registering(made(op="gelu")), PLUGIN, "a kernel for 'gelu'", "expected one of the ops", "name one")
pin("two kernels", registering(GOOD, made()), PLUGIN, "got two forward kernels", "expected one", "remove the other")
pin(
    "a kernel's device types",
    registering(replace(GOOD, device_types=("cuda",))),
    PLUGIN, "device_types ('cuda',)", "expected some of the backend's ('cpu',)", "list them there too",
)  # fmt: skip
pin(
    "backward alone",
    registering(made(direction="backward", form="grad, x, bias, approximate, needs")),
    PLUGIN, "got a backward kernel", "expected both", "add the forward one",
)  # fmt: skip
pin("parameters", registering(made(form="x, b")), PLUGIN, "got parameters (x, b)", "(x, bias", "use these")
pin(
    "a kind",
    registering(made(form="x, bias, *, approximate")),
    PLUGIN, "parameters (x, bias, *, approximate)", "all passed by position", "use these parameters",
)  # fmt: skip
pin("no constraint", registering(made(5)), PLUGIN, "got 5 as", "expected one of fusedops.constraints", "write one")
pin(
    "constraint's name",
    registering(made(Rank("y", 2))),
    PLUGIN, "'y: 2-D' on 'y'", "expected one of its parameters", "name one of these",
)  # fmt: skip
pin("a taken name", registering(name="eager"), PLUGIN, "already registered", "a free one", "unregister('eager')")
pin(
    "a taken op",
    lambda: fusedops.register(copy.copy(fusedops.ops.OPS["bias_gelu"])),
    PLUGIN, "got a second op of this name", "expected a free name", "rename one",
)  # fmt: skip
pin(
    "unregister",
    with_mine(lambda: fusedops.unregister("yours")),
    PLUGIN, "got 'yours'", "expected a registered", "name one of",
)  # fmt: skip
pin(
    "no hook",
    lambda: fusedops.register(object(), "mine"),
    PLUGIN, "got NoneType", "expected a fusedops.Backend", "add a function",
)  # fmt: skip


class Misspelt:
    @fusedops.hookimpl
    def fusedops_backends(self) -> None: ...

    def __repr__(self) -> str:
        return "Misspelt()"


pin(
    "a hook's name",
    lambda: fusedops.register(Misspelt(), "mine"),
    PLUGIN,
    "'fusedops_backends'",
    "expected hooks of",
    "correct",
)


class Distribution(NamedTuple):
    """An installed distribution, as an entry point knows it."""

    name: str
    version: str = "1.0"


def discovering(name: str, hook: Callable[..., Any], *distributions: str) -> Callable[[], Any]:
    """Raises why an entry point ``name`` of such distributions, whose plugin has that hook, is not loaded."""

    def run() -> None:
        module = types.ModuleType("a_plugin")
        setattr(module, hook.__name__, fusedops.hookimpl(hook))
        point = importlib.metadata.EntryPoint(name, "a_plugin", "fusedops.backends")
        points = [copy.copy(point)._for(Distribution(one)) for one in distributions]  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "a_plugin", module)
            failed = discovery_errors(points)
        raise failed[0]

    return run


def providing(name: str) -> Callable[[], fusedops.Backend]:
    def fusedops_backend() -> fusedops.Backend:
        return backend(GOOD, name=name)

    return fusedops_backend


def asking() -> Callable[[], Any]:
    def fusedops_backend() -> Any:
        return fusedops.backends()

    return fusedops_backend


def leaving() -> Callable[[], Any]:
    def fusedops_backend() -> Any:
        sys.exit(3)

    return fusedops_backend


def fusedops_observe(event: Any) -> None:
    raise OSError("disk full")


class Watcher:
    """A plugin that observes, and fails."""

    @fusedops.hookimpl
    def fusedops_observe(self, event: Any) -> None:
        fusedops_observe(event)


def watching(then: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        fusedops.register(Watcher(), "watcher")
        try:
            then()
        finally:
            fusedops.unregister("watcher")

    return run


def fusedops_op() -> Any:
    return "op"


pin(
    "another's name",
    discovering("mine", providing("yours"), "them"),
    PLUGIN, "named 'yours'", "expected the same name", "rename either",
)  # fmt: skip
pin(
    "a rival",
    discovering("mine", providing("mine"), "a", "b"),
    PLUGIN,
    "a and b, which both",
    "one of them",
    "uninstall",
)
pin(
    "a built-in name",
    discovering("eager", providing("eager"), "fusedops", "a"),
    PLUGIN, "backend 'eager' of a is", "expected another", "rename it",
)  # fmt: skip
pin(
    "an observer",
    discovering("mine", fusedops_observe, "a"),
    PLUGIN, "an observing hook alone", "expected a backend or an op", "fusedops.register()",
)  # fmt: skip
pin("no op", discovering("mine", fusedops_op, "a"), PLUGIN, "got str", "expected a fusedops.Op", "return that")
pin(
    "a request while importing",
    discovering("mine", asking(), "a"),
    PLUGIN, "a request for backends", "expected none before", "from its probe",
)  # fmt: skip
pin(
    "an exit",
    discovering("mine", leaving(), "a"),
    PLUGIN, "got SystemExit: 3", "expected an import that succeeds", "correct the import",
)  # fmt: skip
pin(
    "a taken observer",
    watching(lambda: fusedops.register(Watcher(), "watcher")),
    PLUGIN, "already registered", "a free one", "unregister('watcher')",
)  # fmt: skip
pin(
    "a failing observer",
    watching(gelu(X)),
    fusedops.FusedOpsWarning, "disk full", "expected no exception", "unregister('watcher')",
)  # fmt: skip


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", TABLE.pins)
def test_a_text(name: str) -> None:
    TABLE.check(name)


def test_no_text_is_left_over() -> None:
    TABLE.check_complete()
