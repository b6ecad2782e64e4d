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
from two_outputs import OP

import fusedops
from fusedops.constraints import Rank

TABLE = Table(__file__, "fakes")
pin = TABLE.pin

pin("backend's name", registering(name="Mine"), PLUGIN)
pin("device types", registering(devices="cuda"), PLUGIN)
pin("a misspelt device type", registering(devices=("cdua",)), PLUGIN)
pin("priority", lambda: fusedops.register(fusedops.Backend("mine", ("cpu",), "high", ())), PLUGIN)
pin("another API", registering(fusedops_api=9), PLUGIN)
pin("no kernel", registering(5), PLUGIN)
pin("kernel's op", registering(made(op="gelu")), PLUGIN)
pin("a module without it", lambda: [*fusedops.kernels_of(linear="fusedops.masks")], PLUGIN)
pin("two kernels", registering(GOOD, made()), PLUGIN)
pin("a kernel's device types", registering(replace(GOOD, device_types=("cuda",))), PLUGIN)
pin("no promise about rows", registering(replace(GOOD, rows_independent=False)), PLUGIN)
pin("backward alone", registering(made(direction="backward", form="grad, x, bias, approximate, needs")), PLUGIN)
pin("parameters", registering(made(form="x, b")), PLUGIN)
pin("a kind", registering(made(form="x, bias, *, approximate")), PLUGIN)
pin("no constraint", registering(made(5)), PLUGIN)
pin("constraint's name", registering(made(Rank("y", 2))), PLUGIN)
pin("a taken name", registering(name="eager"), PLUGIN)
pin("a taken op", lambda: fusedops.register(copy.copy(fusedops.ops.OPS["bias_gelu"])), PLUGIN)
pin("unregister", with_mine(lambda: fusedops.unregister("yours")), PLUGIN)
pin("no hook", lambda: fusedops.register(object(), "mine"), PLUGIN)
pin("variables", registering(variables="A"), PLUGIN)
pin("needs", registering(needs=5), PLUGIN)
pin("packages", registering(packages="a"), PLUGIN)
pin("kernels of another type", lambda: fusedops.register(fusedops.Backend("mine", ("cpu",), 5, 5)), PLUGIN)
pin("a direction", registering(fusedops.Kernel("bias_gelu", "sideways", made().function)), PLUGIN)
pin("a deviation", registering(fusedops.Kernel("bias_gelu", "forward", made().function, deviations=("odd",))), PLUGIN)
pin("no signature", registering(fusedops.kernel("bias_gelu")(min)), PLUGIN)


def of_saved() -> None:
    fusedops.register(OP)
    try:
        names = ", ".join(OP.parameters_of("backward"))
        registering(made(Rank("rstd", 2), op=OP.name, direction="backward", form=names))()
    finally:
        fusedops.unregister(OP.name)


pin("a saved value", of_saved, PLUGIN)


class Misspelt:
    @fusedops.hookimpl
    def fusedops_backends(self) -> None: ...

    def __repr__(self) -> str:
        return "Misspelt()"


pin("a hook's name", lambda: fusedops.register(Misspelt(), "mine"), PLUGIN)


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


pin("another's name", discovering("mine", providing("yours"), "them"), PLUGIN)
pin("a rival", discovering("mine", providing("mine"), "a", "b"), PLUGIN)
pin("a built-in name", discovering("eager", providing("eager"), "fusedops", "a"), PLUGIN)
pin("an observer", discovering("mine", fusedops_observe, "a"), PLUGIN)
pin("no op", discovering("mine", fusedops_op, "a"), PLUGIN)
pin("a request while importing", discovering("mine", asking(), "a"), PLUGIN)
pin("an exit", discovering("mine", leaving(), "a"), PLUGIN)
pin("a taken observer", watching(lambda: fusedops.register(Watcher(), "watcher")), PLUGIN)
pin("a failing observer", watching(gelu(X)), fusedops.FusedOpsWarning)

test_a_text, test_no_text_is_left_over = TABLE.tests()
