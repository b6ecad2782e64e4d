"""Texts of rare errors, word for word: those that no table of another folder has."""

import contextvars
import io
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import plugin_ops
import pytest
import torch
from error_calls import INVALID, NO_BACKEND, POLICY, X, alone, dropout, gelu, made, registered
from error_texts import Table
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops._cli import bench, main
from fusedops.constraints import Rank

TABLE = Table(__file__, "fakes")
pin = TABLE.pin
SPEC = (2, 4)


class Silent(Rank):
    """A constraint that gives no reason."""

    def reasons(self, args: Any) -> list[Any]:
        return []


def unregistered() -> None:
    alone(made())
    with fusedops.use("mine", fallback="raise"):
        fusedops.unregister("mine")
        fusedops.bias_gelu(X)


class Mode(TorchDispatchMode):
    """A dispatch mode, under which every call is one of a registered op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def op_that_is_not_registered() -> None:
    module = types.ModuleType("a_plugin")
    exec(plugin_ops.SOURCE, vars(module))
    with Mode():
        module.my_square(X)


def op_without_a_tolerance() -> None:
    module = types.ModuleType("a_plugin")
    exec(plugin_ops.SOURCE, vars(module))
    fusedops.register(module.OP)
    fusedops.register(module.BACKEND)
    with fusedops.verify("reference"):
        module.my_square(X.bfloat16())


def without_lines(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the call, with {here} in place of the file and the line of each block in its text."""

    def run() -> None:
        try:
            call()
        except POLICY as error:
            raise POLICY(re.sub(r"(?<= of )[^ ]+?\.py:\d+", "{here}", str(error))) from None

    return run


def left_elsewhere() -> None:
    block = fusedops.use("eager")
    contextvars.copy_context().run(block.__enter__)
    block.__exit__(None, None, None)


def left_out_of_order() -> None:
    outer, inner = fusedops.use("eager"), fusedops.use("triton")
    outer.__enter__()
    inner.__enter__()
    try:
        outer.__exit__(None, None, None)
    finally:
        inner.__exit__(None, None, None)


class Full(io.StringIO):
    """An output that cannot be written."""

    def flush(self) -> None:
        raise OSError("disk full")


def printed(*words: str) -> Callable[[], Any]:
    """Return a command on a busy machine with a full disk, which raises its first message."""

    def stop(text: object) -> None:
        raise fusedops.FusedOpsWarning(re.sub(r"(?<=on )\d+(?= cores)", "{count}", str(text)))

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(main, "print_error", stop)
            patch.setattr(bench, "print_warning", stop)
            patch.setattr(bench, "measure", lambda *args: iter(()))
            patch.setattr(sys, "stdout", Full())
            patch.setattr(os, "getloadavg", lambda: (1234.5, 0.0, 0.0), raising=False)
            main.main(words)

    return run


def narrow_dtype() -> None:
    op = fusedops.ops.OPS["bias_gelu"]
    list(bench.measure(op, op.evidence.cases[0], torch.int8, "cpu", 0.1))


def captured() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
        fusedops.warm_up("bias_gelu", X)


pin("a spec's dtype", lambda: fusedops.TensorSpec(SPEC, "f32"), INVALID)  # type: ignore[arg-type]
pin("a spec's device", lambda: fusedops.TensorSpec(SPEC, device=0), INVALID)  # type: ignore[arg-type]
pin("heads of a layer", lambda: fusedops.nn.Mamba2(32, heads=4, groups=3), INVALID)
pin("seed's size", dropout(X, seed=torch.ones(2, dtype=torch.int64)), INVALID)
pin("a constraint without a reason", registered(Silent("x", 3), call=gelu(X)), NO_BACKEND)
pin("no longer registered", unregistered, NO_BACKEND)
pin("an op that is not registered", op_that_is_not_registered, INVALID)
pin("an op without a tolerance", op_without_a_tolerance, fusedops.PluginError)
pin("a block elsewhere", without_lines(left_elsewhere), POLICY)
pin("a block out of order", without_lines(left_out_of_order), POLICY)
pin("a busy machine", printed("bench"), fusedops.FusedOpsWarning)
pin("a full disk", printed("info"), fusedops.FusedOpsWarning)
pin("warm_up of a meta tensor", lambda: fusedops.warm_up("bias_gelu", torch.zeros(2, device="meta")), INVALID)
pin("warm_up in a capture", captured, fusedops.FusedOpsError)
pin("bench's dtype", narrow_dtype, INVALID)


def swapped_below_autograd() -> None:
    weight = torch.ones(4, requires_grad=True)
    y = fusedops.rms_norm(X, weight)
    weight.data = torch.ones(1)
    y.sum().backward()


def freed_weight() -> None:
    weight = torch.ones(4)
    weight.untyped_storage().resize_(0)
    fusedops.rms_norm(X, weight)


def reference(x: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * x


def backward(grad: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * grad


def named_op(name: str, annotation: str = "float") -> Callable[[], Any]:
    """Return a call that registers an op of a name, with a type that torch knows or does not know."""

    def function(x: torch.Tensor, factor: float = 1.0, *, backend: str | None = None) -> Any:
        return x

    def register() -> None:
        function.__name__ = name
        evidence = fusedops.ops.OPS["bias_gelu"].evidence
        given: Any = {"reference": reference, "backward": backward, "evidence": evidence}
        op = fusedops.Op(function, constraints=[], differentiable=("x",), **given)
        op.types["factor"] = annotation
        fusedops.register(op)

    return register


def probed() -> None:
    """Raise the reason for which a backend is failed whose probe calls an op."""

    @fusedops.kernel("bias_gelu")
    def forward(x: Any, bias: Any, approximate: str) -> Any:
        return x

    backend = fusedops.Backend("mine", ("cpu",), 1000, (forward,), probe=lambda: fusedops.bias_gelu(X))
    fusedops.register(backend)
    with fusedops.use(fallback="silent"):
        fusedops.bias_gelu(X)
    why = next(info.why for info in fusedops.backends() if info.name == "mine")
    raise fusedops.errors.PluginError(why)


PLUGIN = fusedops.errors.PluginError
pin("a saved tensor of other sizes", swapped_below_autograd, INVALID)
pin("a freed weight", freed_weight, INVALID)
pin("an op's name", named_op("my-op"), PLUGIN)
pin("an op that torch refuses", named_op("my_op", "object"), PLUGIN)
pin("an op in a probe", probed, PLUGIN)

test_a_text, test_no_text_is_left_over = TABLE.tests()
