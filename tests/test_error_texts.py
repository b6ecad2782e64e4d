"""Every text of an error or a warning of fusedops, word for word, and what in it is given, needed, and to be done.

The table is here: what is called, what it raises, and the three parts; ``error_texts.txt`` has each text as a whole. A
text that is new, or that nobody sees here, is found by the last tests: they look for every place in the sources that
makes one, and at which of these places this file's calls passed.
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import runpy
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fusedops
import fusedops_eager
from fusedops import errors
from fusedops._registry import registry
from fusedops.constraints import Dim, DType, Present, Rank, Scalar, When
from fusedops_npu._four import Folds

CORE = pathlib.Path(fusedops.__file__).parent
FILES = sorted([*CORE.rglob("*.py"), *pathlib.Path(fusedops_eager.__file__).parents[1].glob("fusedops_*/*.py")])
PYTHONS = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
TRITON = importlib.util.find_spec("triton") is not None  # without it the texts of autotuning are not shown
CLASSES = {*errors.__all__} - {"FusedOpsError"}

X = torch.ones(2, 4)
FIVE = torch.ones(2, 3, 2, 4, 4)
META = torch.ones(2, 4, device="meta")
NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
SOFTMAX = "scaled_masked_softmax"
GELU = "x, bias=None, *, approximate='tanh'"
DROPOUT = "x, bias=None, p=0.5, *, training=True, seed=None"
SOFTMAX_FORM = "x, mask=None, scale=1.0, *, causal=False"


class Pin(NamedTuple):
    """A call, what it raises, and the three parts of what that says."""

    call: Callable[[], Any]
    error: type[BaseException]
    given: str
    needed: str
    do: str


PINS: dict[str, Pin] = {}


def pin(name: str, call: Callable[[], Any], error: type[BaseException], *parts: str) -> None:
    assert name not in PINS, name
    PINS[name] = Pin(call, error, *parts)


# ---------------------------------------------------------------------------------------------- the arguments of a call

INVALID = fusedops.InvalidInputError


def softmax(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fusedops.scaled_masked_softmax(*args, **kwargs)


def gelu(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fusedops.bias_gelu(*args, **kwargs)


def dropout(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: fusedops.bias_dropout(*args, **kwargs)


pin("no tensor", gelu([1.0]), INVALID, "x is a list", "needs a torch.Tensor", "torch.as_tensor")
pin("dtype", gelu(torch.ones(2, dtype=torch.int64)), INVALID, "x is torch.int64", "needs float16", "x.float()")
pin("layout", gelu(torch.ones(2).to_sparse()), INVALID, "x is torch.sparse_coo", "needs a strided", "x.to_dense()")
pin("rank", softmax(torch.ones(4)), INVALID, "x has 1 dim", "needs (..., Sq, Sk)", "x.unsqueeze(0)")
pin("scale's kind", softmax(X, None, torch.ones(())), INVALID, "a tensor of 1", "needs a Python number", "scale.item()")
pin("scale's value", softmax(X, None, float("inf")), INVALID, "scale is inf", "needs a finite number", "1 / sqrt(")
pin("scale's size", softmax(X, None, 2**70), INVALID, "an integer of 71 bits", "needs a finite number", "1 / sqrt(")
pin("causal", softmax(X, causal=1), INVALID, "causal is 1", "needs True or False", "bool(causal)")
pin("mask's kind", softmax(X, [True]), INVALID, "mask is a list", "needs a bool tensor", "torch.as_tensor")
pin("an additive mask", softmax(X, X), INVALID, "mask is torch.float32", "needs bool or uint8", "mask < 0")
pin("mask's dtype", softmax(X, X.int()), INVALID, "mask is torch.int32", "needs bool or uint8", "mask != 0")
pin("mask's layout", softmax(X, X.bool().to_sparse()), INVALID, "mask is torch.sparse", "a strided", "mask.to_dense()")
pin("mask's device", softmax(X, META.bool()), INVALID, "mask is on meta and x on cpu", "needs one", "mask.to(x.device)")
pin("mask's shape", softmax(X, X[:, :3].bool()), INVALID, "shape (2, 3)", "needs each size", "mask[:, None, None, :]")
pin("bias's shape", gelu(X, torch.ones(3)), INVALID, "bias has shape (3,)", "needs each size", "give it sizes of 1")
pin("bias's kind", gelu(X, 1.0), INVALID, "bias is a float", "needs a torch.Tensor", "torch.as_tensor")
pin(
    "form", gelu(X, approximate="erf"), INVALID, "approximate is 'erf'", 'needs "tanh" or "none"', '"none" is the exact'
)
pin("p", dropout(X, None, 1.5), INVALID, "p is 1.5", "needs a number in [0, 1]", "0.1 drops a tenth")
pin("training", dropout(X, training=1), INVALID, "training is 1", "needs True or False", "module.training")
pin("seed", dropout(X, seed="7"), INVALID, "seed is '7'", "needs None, a 64-bit integer", "None draws one")
pin("seed's dtype", dropout(X, seed=torch.ones(2)), INVALID, "seed is torch.float32 of 2", "an int64", "None draws one")
pin("seed's device", dropout(X, seed=META.long()[0, :1]), INVALID, "seed is on meta", "needs one device", "seed.to(")
pin(
    "a seed that the registered op needs",
    lambda: torch.ops.fusedops.bias_dropout(X, None, 0.5, True, None),
    INVALID, "seed is None", "needs an int64 tensor", "call the public function",
)  # fmt: skip
pin(
    "residual's shape",
    lambda: fusedops.bias_dropout_add(X, None, X[:1]),
    INVALID, "residual has shape (1, 4)", "needs the shape of x", "expand the smaller",
)  # fmt: skip
pin("nested", gelu(NESTED), INVALID, "x is a nested tensor", "needs a strided", "x.to_padded_tensor")
pin(
    "a spec",
    gelu(fusedops.TensorSpec((2, 4))),
    INVALID,
    "x is a TensorSpec",
    "needs a torch.Tensor",
    "fusedops.explain",
)
pin("an argument", lambda: fusedops.explain("bias_gelu"), INVALID, "missing a required", "needs (x,", "give each")
pin("a spec's sizes", lambda: fusedops.TensorSpec((2, -1)), INVALID, "(2, -1)", "at least 0", "the tensor's real")
pin("a spec's shape", lambda: fusedops.TensorSpec("ab"), INVALID, "'ab'", "needs sizes", "as in (8, 16")  # type: ignore[arg-type]

# ------------------------------------------------------------------------------------------------------------- policies

POLICY = fusedops.PolicyError


def policy(text: Any, **level: Any) -> Callable[[], Any]:
    return lambda: fusedops.set_policy(text, **level)


pin("a backend's name", policy("tritn"), POLICY, "'tritn'", "known are", "the nearest is 'triton'")
pin("an op's name", policy("bias_glu=eager"), POLICY, "'bias_glu'", "known are", "the nearest is 'bias_gelu'")
pin("a level", policy(None, fallback="rise"), POLICY, "'rise'", "known are raise, silent", "nearest is 'raise'")
pin("an adapt setting", policy(None, adapt="padd"), POLICY, "'padd'", "known are none, pad", "nearest is 'pad'")
pin("two orders", policy("npu; eager"), POLICY, '"npu; eager" has two orders', "needs one", "as in")
pin(
    "two for an op",
    policy("bias_gelu=npu; bias_gelu=eager"),
    POLICY,
    "two orders for bias_gelu",
    "needs one",
    "join them",
)
pin("an empty name", policy("npu,"), POLICY, '"npu," has an empty name', "needs backends", "separated by commas")
pin("no text", policy(5), POLICY, "given as int", "needs a text", '"npu,triton"')
pin("backend= of no text", gelu(X, backend=["npu"]), POLICY, "given as list", "needs a text", '"npu,triton"')
pin("explain's op", lambda: fusedops.explain("gelu"), POLICY, "'gelu'", "known are", "the nearest is 'bias_gelu'")


def named_after_failing() -> None:
    record = registry.find("npu")
    assert record is not None
    registry._records = [r for r in registry.records() if r is not record]
    registry._records.append(type(record)("npu", error=OSError("libhccl.so is missing"), distribution="fusedops"))
    fusedops.set_policy("npu")


pin(
    "a failed one",
    named_after_failing,
    fusedops.PluginError,
    "libhccl.so is missing",
    "needs one that loads",
    "shows the",
)


def environment(name: str, value: str) -> Callable[[], Any]:
    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            fusedops.get_policy()

    return run


pin(
    "an unknown variable",
    environment("FUSEDOPS_BACKENDS", "npu"),
    fusedops.FusedOpsWarning, "'FUSEDOPS_BACKENDS'", "known are", "the nearest is 'FUSEDOPS_BACKEND'",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------------------- plugins

PLUGIN = fusedops.PluginError


def made(*limits: Any, op: str = "bias_gelu", direction: Any = "forward", form: str = GELU) -> Any:
    return fusedops.kernel(op, *limits, direction=direction)(eval(f"lambda {form}: x"))


def backend(*kernels: Any, name: str = "mine", devices: Any = ("cpu",), **more: Any) -> fusedops.Backend:
    return fusedops.Backend(name, devices, 500, kernels, **more)


def registering(*kernels: Any, **fields: Any) -> Callable[[], Any]:
    return lambda: fusedops.register(backend(*kernels, **fields))


def alone(*kernels: Any, **fields: Any) -> None:
    """Registers a backend beside eager alone: what others say of a machine is no part of a text here."""
    registry._records = [record for record in registry.records() if record.name == "eager"]
    fusedops.register(backend(*kernels, **fields))


def registered(
    *limits: Any, call: Callable[[], Any], op: str = "bias_gelu", form: str = GELU, **fields: Any
) -> Callable[[], Any]:
    """A call where a backend with such a kernel is the only one allowed, and eager the only other one."""

    def run() -> None:
        alone(made(*limits, op=op, form=form), **fields)
        with fusedops.use("mine", fallback="raise"):
            call()

    return run


GOOD = made()


def with_mine(then: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        alone(GOOD)
        then()

    return run


pin("backend's name", registering(name="Mine"), PLUGIN, "backend 'Mine'", "a lower-case identifier", "rename it")
pin("device types", registering(devices="cuda"), PLUGIN, "device_types is 'cuda'", "needs a tuple", "such as ('cuda',)")
pin(
    "priority",
    lambda: fusedops.register(fusedops.Backend("mine", ("cpu",), "high", ())),
    PLUGIN,
    "priority is 'high'",
    "needs a whole number",
    "such as 100",
)  # type: ignore[arg-type]
pin("vague API", registering(fusedops_api="0.1"), PLUGIN, "is '0.1'", "needs comparisons", "such as '>=0.1,<0.2'")
pin(
    "newer API",
    registering(fusedops_api=">=9"),
    PLUGIN,
    "this fusedops has 0.1",
    "needs fusedops_api >=9",
    "install the",
)
pin("no kernel", registering(5), PLUGIN, "5 is no kernel", "needs a function", "decorate it")
pin("kernel's op", registering(made(op="gelu")), PLUGIN, "'gelu', which is no op", "the ops are", "name one of these")
pin("two kernels", registering(GOOD, made()), PLUGIN, "two forward kernels", "needs one", "remove the other")
pin(
    "backward alone",
    registering(made(direction="backward", form="grad, x, bias, approximate, needs")),
    PLUGIN, "a backward kernel", "needs both", "add the forward one",
)  # fmt: skip
pin(
    "parameters", registering(made(form="x, b=None")), PLUGIN, "takes (x, b=None)", "needs the op's", "write it as (x, "
)
pin(
    "a kind",
    registering(made(form="x, bias=None, approximate='tanh'")),
    PLUGIN,
    "is positional",
    "needs keyword",
    "write it",
)
pin(
    "a default",
    registering(made(form="x, bias, *, approximate='tanh'")),
    PLUGIN,
    "is absent",
    "needs None",
    "write it as",
)
pin("no limit", registering(made(5)), PLUGIN, "5 is no limit", "needs one", "write one such as")
pin("limit's name", registering(made(Rank("y", 2))), PLUGIN, "is on 'y'", "needs one of x, ", "name that")
pin("a taken name", registering(name="eager"), PLUGIN, "'eager' is already", "needs a free name", "unregister('eager')")
pin("unregister", with_mine(lambda: fusedops.unregister("yours")), PLUGIN, "'yours'", "registered are", "name one of")
pin("no hook", lambda: fusedops.register(object(), "mine"), PLUGIN, "gives NoneType", "needs a function", "add it")


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
    "needs hooks of",
    "mend",
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
            patch.setattr("fusedops._plugins.entry_points", lambda group: points)
            patch.setattr(registry, "_records", None)
            failed = [record.error for record in registry.records() if record.error is not None]
        raise failed[0]

    return run


def giving(name: str) -> Callable[[], fusedops.Backend]:
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


ASKS = "asks for backends while it is imported"
pin(
    "another's name", discovering("mine", giving("yours"), "them"), PLUGIN, "named 'yours'", "one name", "rename either"
)
pin("a rival", discovering("mine", giving("mine"), "a", "b"), PLUGIN, "a and b both", "one owner", "uninstall one")
pin("a thief", discovering("eager", giving("eager"), "fusedops", "a"), PLUGIN, "of a is", "needs another", "rename it")
pin(
    "a watcher",
    discovering("mine", fusedops_observe, "a"),
    PLUGIN,
    "has no backend",
    "needs one",
    "fusedops.register()",
)
pin("one that asks", discovering("mine", asking(), "a"), PLUGIN, ASKS, "needs to wait", "from its probe")
pin("one that leaves", discovering("mine", leaving(), "a"), PLUGIN, "sys.exit(3)", "to raise an error", "mend it")
pin(
    "a taken watcher",
    watching(lambda: fusedops.register(Watcher(), "watcher")),
    PLUGIN, "'watcher' is already", "needs a free name", "unregister('watcher')",
)  # fmt: skip
pin("a failing watcher", watching(gelu(X)), fusedops.FusedOpsWarning, "disk full", "the call goes on", "mend it")


# ------------------------------------------------------------------------------------------------ nobody takes the call

NOBODY = fusedops.NoBackendError
SPEC = fusedops.TensorSpec((2, 4), capability=(7, 5), device="cuda")
pin("limit on rank", registered(Rank("x", 3), call=gelu(X)), NOBODY, "x has 2 dim", "needs 3 dim", "leading ones")
pin("on a size", registered(Dim("x", (-1,), at_most=3), call=gelu(X)), NOBODY, "is 4", "needs a size of", "split x")
pin("on a higher rank", registered(Rank("x", 1), call=gelu(X)), NOBODY, "x has 2 dim", "needs 1 dim", "merge leading")
pin(
    "on a small size", registered(Dim("x", (-1,), at_least=5), call=gelu(X)), NOBODY, "is 4", "at least 5", "pad dim -1"
)
pin(
    "on a range",
    registered(Scalar("p", 0.25), op="bias_dropout", form=DROPOUT, call=dropout(X, None, 0.5)),
    NOBODY,
    "p is 0.5",
    "in [-0.25, 0.25]",
    "pass p as",
)
pin(
    "on absence",
    registered(Present("bias", False), call=gelu(X, X)),
    NOBODY,
    "bias is given",
    "needs bias left out",
    "call with",
)
pin("on a multiple", registered(Dim("x", (-1,), multiple_of=8), call=gelu(X)), NOBODY, "is 4", "of 8", "from 4 to 8")
pin("on a dtype", registered(DType("x", torch.float16), call=gelu(X)), NOBODY, "float32", "needs float16", "convert x")
pin("on presence", registered(Present("bias"), call=gelu(X)), NOBODY, "bias is None", "needs bias", "call with bias")
pin(
    "on a number",
    registered(Scalar("approximate", one_of=("none",)), call=gelu(X)),
    NOBODY, "approximate is 'tanh'", "needs 'none'", "pass approximate as",
)  # fmt: skip
pin(
    "on a case",
    registered(When(DType("x", torch.float32), Rank("x", 3)), call=gelu(X)),
    NOBODY, "x has 2 dim", "needs 3 dimensions (with x: float32)", "view x",
)  # fmt: skip
pin("another device", registered(devices=("cuda",), call=gelu(X)), NOBODY, "not cpu", "serves cuda", "move the")
pin("another op", registered(call=softmax(X)), NOBODY, "has no kernel", "to qualify for mine", "prefer a backend")

pin(
    "Ascend's mask",
    registered(Folds("mask", "x"), op=SOFTMAX, form=SOFTMAX_FORM, call=softmax(FIVE, FIVE[:, :1].bool())),
    NOBODY, "mask is (2, 1, 2, 4, 4)", "needs leading dims", "expand mask to",
)  # fmt: skip


def unavailable() -> fusedops.Unavailable:
    return fusedops.Unavailable("libmine.so is missing", "install libmine")


def failing() -> None:
    raise OSError("driver too old")


pin(
    "unavailable",
    registered(probe=unavailable, call=gelu(X)),
    NOBODY,
    "libmine.so is missing",
    "to qualify for mine",
    "install libmine",
)
pin(
    "failed",
    registered(probe=failing, call=gelu(X)),
    NOBODY,
    "driver too old",
    "to qualify for mine",
    "fix or uninstall",
)


def old_gpu() -> None:
    with fusedops.use("triton"):
        decision = fusedops.explain("bias_gelu", SPEC)
    raise NOBODY(decision)


pin("an old GPU", old_gpu, NOBODY, "compute capability 7.5", "needs at least 8.0", "run on a newer")


def falling_back() -> None:
    alone(made(Rank("x", 3)))
    fusedops.bias_gelu(X)


pin("a fallback", falling_back, fusedops.FallbackWarning, "x has 2 dim", "needs 3 dim", "view x with 3")

# --------------------------------------------------------------------------------------------- verify, bind and the kit


def verifying(**how: Any) -> Callable[[], Any]:
    """A call of a kernel that is wrong, for it gives x."""

    def run() -> None:
        alone(GOOD)
        with fusedops.verify(against="reference", **how):
            fusedops.bias_gelu(X)

    return run


def with_unavailable(then: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        alone(GOOD, probe=unavailable)
        then()

    return run


def verify(against: str, **how: Any) -> Callable[[], Any]:
    return lambda: fusedops.verify(against, **how)


def bind(*args: Any) -> Callable[[], Any]:
    return lambda: fusedops.bind(*args)


def checks(*args: Any, **kwargs: Any) -> Callable[[], Any]:
    def run() -> Any:
        from fusedops.testing._checks import checks

        return checks(*args, **kwargs)

    return run


def reproduce(*args: Any) -> Callable[[], Any]:
    def run() -> Any:
        from fusedops.testing._checks import reproduce

        return reproduce(*args)

    return run


def with_nothing(then: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        registry._records = []
        then()

    return run


CHECK = "bias_gelu/forward/kernel"
pin(
    "a mismatch", verifying(), fusedops.MismatchError, "element (0, 0) is 1", "needs to be within", "Mend the kernel at"
)
pin(
    "mismatches",
    verifying(raise_on_mismatch=False),
    fusedops.FusedOpsWarning, "1 results differ", "needs to be within", "prefer another backend",
)  # fmt: skip
pin("verify's sample", verify("eager", sample=2), INVALID, "sample is 2", "needs a part", "such as 0.1")
pin("verify's backend", verify("eagr"), POLICY, "'eagr'", "known are", "the nearest is 'eager'")
pin(
    "verify's kernel",
    with_unavailable(verify("mine")),
    POLICY,
    "libmine.so is",
    "needs one that can",
    "install libmine",
)
pin("bind's op", bind("gelu"), POLICY, "'gelu'", "known are", "the nearest is 'bias_gelu'")
pin(
    "bind's x",
    bind("bias_gelu", fusedops.TensorSpec((2, 4))),
    INVALID,
    "a TensorSpec",
    "needs a tensor",
    "explain takes",
)
pin("the kit's backend", checks("eagr"), POLICY, "'eagr'", "known are", "the nearest is 'eager'")
pin("nothing", with_nothing(checks("eager")), POLICY, "known are none", "needs an installed", "run pip install")
pin("the kit's op", checks("eager", op="gelu"), POLICY, "'gelu'", "known are", "the nearest is 'bias_gelu'")
pin(
    "the kit's machine",
    with_unavailable(checks("mine")),
    PLUGIN,
    "libmine.so is",
    "needs one that can",
    "install libmine",
)
pin(
    "the kit's device",
    with_mine(checks("mine", "meta")),
    PLUGIN,
    "is 'meta'",
    "needs one that mine serves",
    "leave it out",
)
pin("no device", with_mine(checks("mine", "gpu")), PLUGIN, "is 'gpu'", "needs one that", "name another")
pin("the kit's check", with_mine(reproduce("mine", "values", "")), POLICY, "'values'", "known are", "name one of these")
pin("the kit's case", with_mine(reproduce("mine", CHECK, "x")), POLICY, "'x'", "known are takes a", "name one of these")


def counting() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDOPS_STATS", "yes")
        patch.setattr(os, "register_at_fork", lambda **_: None, raising=False)
        runpy.run_path(str(CORE / "_stats.py"))


pin("FUSEDOPS_STATS", counting, fusedops.FusedOpsWarning, "'yes' has no effect", "set it to 1", "unset it")


def tuning() -> None:
    from fusedops_triton import _autotune

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDOPS_AUTOTUNE", "yes")
        _autotune.forget()
        try:
            _autotune._asked()
        finally:
            _autotune.forget()


def tuned() -> None:
    from fusedops_triton._autotune import Store

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        store = Store("a GPU")
        store._settings["softmax"] = [5]
        try:
            store.get("softmax", [])
        except fusedops.FusedOpsWarning as warning:
            raise fusedops.FusedOpsWarning(str(warning).replace(str(store.path), "{file}")) from None


if TRITON:
    pin("FUSEDOPS_AUTOTUNE", tuning, fusedops.FusedOpsWarning, "'yes' has no effect", "set it to 1", "unset it")
    pin("a setting", tuned, fusedops.FusedOpsWarning, "[5] for softmax", "is none of", "delete the file")

# --------------------------------------------------------------------------------------------------- drop-ins, commands


def megatron(name: str, *args: Any, **kwargs: Any) -> Any:
    from fusedops.compat import megatron

    return getattr(megatron, name)(*args, **kwargs)


def mask_type() -> None:
    megatron("FusedScaleMaskSoftmax", False, False, "casual", True, None, False, None)(torch.ones(1, 1, 2, 2), None)


def window_and_mask() -> None:
    module = megatron("FusedScaleMaskSoftmax", False, False, "causal", True, None, False, None, window_size=(1, 0))
    module(torch.ones(1, 1, 2, 2), torch.ones(2, 2))


pin("mask type", mask_type, INVALID, "'casual'", "needs one of padding, causal", "see AttnMaskType")
pin("an additive mask joined", window_and_mask, INVALID, "mask is torch.float32", "needs bool", "mask < 0")
pin("SoftmaxOne's dim", lambda: megatron("SoftmaxOne", 1), INVALID, "dim is 1", "needs -1", "leave dim out")
pin("SoftmaxOne's sink", lambda: megatron("SoftmaxOne")(X), INVALID, "is 1.0", "needs a tensor", "torch.zeros(heads)")


def command(*words: str) -> Callable[[], Any]:
    """A command, with the error that it would print on one line."""

    def run() -> None:
        from fusedops import __main__

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(__main__, "print", _raise, raising=False)
            __main__.main(words)

    return run


def _raise(text: str, **_: Any) -> None:
    error = sys.exception() if sys.version_info >= (3, 11) else sys.exc_info()[1]
    assert error is not None
    raise error


pin("bench's op", command("bench", "gelu"), POLICY, "'gelu'", "known are", "the nearest is 'bias_gelu'")
pin(
    "bench's dtype",
    command("bench", "--dtype", "int8"),
    INVALID,
    "'int8'",
    "needs a floating dtype",
    "write it like bf16",
)
pin("a tensor", command("explain", SOFTMAX, "--x", "a"), INVALID, "'a'", "needs sizes", "8,16,512,512:bf16@npu")
pin(
    "a flag",
    command("explain", SOFTMAX, "--x", "4,4", "--causal", "x"),
    INVALID,
    "'x'",
    "needs true",
    "write it like true",
)
pin(
    "a number",
    command("explain", SOFTMAX, "--x", "4,4", "--scale", "x"),
    INVALID,
    "'x'",
    "needs one float",
    "write it like 1",
)

# ------------------------------------------------------------------------------------------------------------- DTensors


@contextmanager
def mesh() -> Iterator[Any]:
    """A mesh of 2 x 2 ranks of which this process plays the first: torch's fake process group sends nothing."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    finally:
        distributed.destroy_process_group()
        sys.excepthook = hook


def sharded(call: Callable[..., Any]) -> Callable[[], Any]:
    """``call`` with DTensor, a mesh, and the kinds of placement."""

    def run() -> None:
        from torch.distributed import tensor

        with mesh() as whole:
            call(tensor, whole["tp"], whole)

    return run


def on(tensor: Any, mesh_: Any, *placements: Any, x: Tensor = X) -> Any:
    return tensor.DTensor.from_local(x, mesh_, placements, run_check=False)


pin(
    "two meshes",
    sharded(lambda t, m, w: fusedops.bias_gelu(on(t, m, t.Replicate()), on(t, w["dp"], t.Replicate(), x=X[0]))),
    INVALID, "bias is on {mesh}", "needs one mesh", "make all of them",
)  # fmt: skip
pin(
    "a plain tensor beside DTensors",
    sharded(lambda t, m, w: fusedops.bias_gelu(on(t, m, t.Replicate()), X[0])),
    INVALID, "bias is a plain tensor", "needs a DTensor", "distribute_tensor(bias",
)  # fmt: skip
pin(
    "a dim that is to be whole",
    sharded(lambda t, m, w: fusedops.scaled_masked_softmax(on(t, m, t.Shard(1)))),
    INVALID, "x is Shard(dim=1)", "needs dim -1 whole", "x.redistribute(",
)  # fmt: skip
pin(
    "a strange placement",
    sharded(lambda t, m, w: fusedops.bias_gelu(on(t, m, t.placement_types._StridedShard(0, split_factor=2)))),
    INVALID, "_StridedShard", "needs Shard, Replicate or Partial", "redistribute it",
)  # fmt: skip
pin(
    "what would gather",
    sharded(lambda t, m, w: fusedops.bias_gelu(on(t, m, t.Shard(0)), on(t, m, t.Shard(0), x=X[0, :2]))),
    INVALID, "bias is [Shard(dim=0)]", "is to be [Replicate()]", "bias.redistribute(",
)  # fmt: skip


def shard_of_dropout(t: Any, m: Any, w: Any) -> None:
    alone(made(op="bias_dropout", form=DROPOUT))
    with fusedops.use("mine", fallback="raise"):
        fusedops.bias_dropout(on(t, m, t.Shard(0)), seed=3)


pin("dropout's shard", sharded(shard_of_dropout), NOBODY, "x is a shard", "from the shard's own", "replicate x")


# ------------------------------------------------------------------------------------------------------------ the tests

TEXTS = pathlib.Path(__file__).with_name("error_texts.txt")
_passed: set[tuple[str, int]] = set()  # every line of the sources that a call of the table passed


def texts() -> dict[str, str]:
    """The texts by name: a line ``[name]``, then the text."""
    parts = re.split(r"^\[(.+)\]\n", TEXTS.read_text("utf-8"), flags=re.M)
    return {name: text.rstrip("\n") for name, text in zip(parts[1::2], parts[2::2])}


def worded(error: BaseException) -> str:
    """The text, but for what torch writes in it, which its versions write differently: a mesh, and its own errors."""
    text = re.sub(r"DeviceMesh\(.+?\)(?=, others|;)", "{mesh}", str(error))
    torchs = isinstance(error.__cause__, RuntimeError)
    return text.replace(str(error.__cause__), "{torch's own}") if torchs else text


@contextmanager
def watched() -> Iterator[None]:
    """Notes the lines of the sources that run inside."""
    sources = {str(path) for path in FILES}

    def each_line(frame: FrameType, event: str, _: Any) -> Any:
        _passed.add((frame.f_code.co_filename, frame.f_lineno))
        return each_line

    def each_call(frame: FrameType, event: str, _: Any) -> Any:
        return each_line(frame, event, _) if frame.f_code.co_filename in sources else None

    before = sys.gettrace()
    sys.settrace(each_call)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", PINS)
def test_a_text(name: str) -> None:
    one = PINS[name]
    with watched(), pytest.raises(one.error) as raised:
        one.call()
    assert type(raised.value) is one.error
    text = worded(raised.value)
    assert text == texts().get(name), f"where that is meant, {TEXTS.name} has to say\n[{name}]\n{text}"
    for part in (one.given, one.needed, one.do):
        assert part, "a text says three things"
        assert part in text, f"{part!r} is not in the text"


def test_no_text_is_left_over() -> None:
    assert set(PINS) == {name for name in texts() if TRITON or name not in ("FUSEDOPS_AUTOTUNE", "a setting")}


def sites(path: pathlib.Path) -> Iterator[ast.expr]:
    """Where a source makes the text of an error, a warning or a reason of fusedops's own; not of an error of Python's.

    That is: each call of one of the classes, or of what calls one with the text that it is given; each reason of a
    refusal; and each text of the form ``given; needs ...`` that is returned to who raises it.
    """
    tree = ast.parse(path.read_text("utf-8"))
    done: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in PYTHONS:
            done.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in done:
            continue
        if isinstance(node, ast.Call):
            names = {_name(node.func)} | ({_name(arg) for arg in node.args} if _name(node.func) == "warn" else set())
            found = bool(names & {*CLASSES, "Reason", "_refuse", "_warn"})
        else:
            found = isinstance(node, (ast.JoinedStr, ast.Constant)) and "; needs " in _literal(node)
        if found:
            done.update(ast.walk(node))
            yield node


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _literal(node: ast.AST) -> str:
    return "".join(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_text_in_the_sources_is_in_the_table(path: pathlib.Path) -> None:
    assert _passed, "the tests of the texts have to run before this one: run the whole file"
    if path.name == "_autotune.py" and not TRITON:
        pytest.skip("triton is not installed")
    unseen = [
        f"{path}:{site.lineno}: {ast.unparse(site)[:100]}"
        for site in sites(path)
        if not any((str(path), line) in _passed for line in range(site.lineno, (site.end_lineno or 0) + 1))
    ]
    assert not unseen, "no entry of the table comes by; add one to tests/test_error_texts.py:\n" + "\n".join(unseen)


def test_the_search_sees_what_it_is_for(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        '"""What a call needs to be."""\n'
        "def f(x):\n"
        "    warnings.warn('careful', FusedOpsWarning)\n"
        "    raise ValueError(f'{x}; needs y')\n"
        "    return InvalidInputError(f'{x}; needs y')\n"
        "    text = f'{x}; needs y'\n"
        "    raise errors.PolicyError(text)\n"
    )
    assert sorted(site.lineno for site in sites(source)) == [3, 5, 6, 7]
