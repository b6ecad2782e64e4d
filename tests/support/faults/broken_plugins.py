"""Sources of broken and working plugins, and a function that installs them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch

import fusedops
from fusedops import BackendInfo, kernel
from fusedops.testing import OPS

OP = OPS["scaled_masked_softmax"]

WANTED = "(x, mask, scale, causal)"

X = torch.ones(2, 4)

HEAD = """
import copy, torch, fusedops
from fusedops import Backend, hookimpl, kernel
from fusedops.constraints import Dim, DType, Scalar, When
SOFTMAX = "scaled_masked_softmax"

@kernel(SOFTMAX)
def good(x, mask, scale, causal): return torch.zeros_like(x)
"""


def plugin(name: str, kernels: str = "good,", head: str = "", **fields: str) -> str:
    """The source of a plugin module."""
    given = {"name": repr(name), "device_types": "('cpu',)", "priority": "-5", "kernels": f"({kernels})", **fields}
    arguments = ", ".join(f"{key}={value}" for key, value in given.items())
    return f"{HEAD}\n{head}\n@hookimpl\ndef fusedops_backend(): return Backend({arguments})\n"


def with_kernel(name: str, decorator: str, signature: str) -> str:
    return plugin(name, "made,", f"@kernel({decorator})\ndef made{signature}: return x\n")


PARAMETERS = f"expected {WANTED}, all passed by position; to fix: use these parameters"
NO_BACKEND = (
    "from fusedops_backend, expected a fusedops.Backend; to fix: add a function marked @fusedops.hookimpl that returns "
    "one, as in docs/add-a-backend.md"
)
NOT_ORDINARY = "from its import, expected an import that succeeds or raises an Exception; to fix: correct the import"
ASKS = (
    "got a request for backends from a plugin that is being imported, expected none before all plugins are known; to "
    "fix: register, set policies and call ops from its probe or kernels"
)
NAME = "expected a lower-case identifier other than 'auto', as policies use it; to fix: rename it"

# name: (source, the class of its error, the end of its message; {file} is the module's file). What a backend and a
# kernel may not hold is in test_plugin_texts and test_odd_backends
BROKEN: dict[str, tuple[str, str, str]] = {
    "raises": ("raise RuntimeError('no licence found')", "RuntimeError", "no licence found"),
    "lacks": ("import a_vendor_that_is_not_here", "ModuleNotFoundError", "No module named 'a_vendor_that_is_not_here'"),
    "syntax": ("def f(:", "SyntaxError", "invalid syntax (syntax.py, line 1)"),
    "names": (
        with_kernel("names", "SOFTMAX", "(x, attn_mask, scale, causal)"),
        "PluginError",
        "backend 'names': forward kernel for scaled_masked_softmax at {file}:10: got parameters (x, attn_mask, scale, "
        f"causal), {PARAMETERS}",
    ),
    "backward": (
        plugin(
            "backward",
            "good, made",
            "@kernel(SOFTMAX, direction='backward')\ndef made(grad, y, scale): return y\n",
        ),
        "PluginError",
        "backend 'backward': backward kernel for scaled_masked_softmax at {file}:10: got parameters (grad, y, scale), "
        f"expected ({', '.join(OP.backward_parameters)}), all passed by position; to fix: use these parameters",
    ),
    "other": (
        plugin("another"),
        "PluginError",
        "entry point 'other': got a backend named 'another', expected the same name; to fix: rename either",
    ),
    "junk": (
        "import fusedops\n@fusedops.hookimpl\ndef fusedops_backend(): return {'name': 'junk'}",
        "PluginError",
        f"plugin 'junk': got dict {NO_BACKEND}",
    ),
    "unmarked": ("def fusedops_backend(): pass", "PluginError", f"plugin 'unmarked': got NoneType {NO_BACKEND}"),
    "misspelt": (
        "import fusedops\n@fusedops.hookimpl\ndef fusedops_backends(): pass",
        "PluginError",
        "plugin 'misspelt': got unknown hook 'fusedops_backends' in plugin <module 'misspelt' from '{file}'>, expected "
        "hooks of fusedops_backend, fusedops_op and fusedops_observe; to fix: correct its functions",
    ),
    "exits": ("import sys; sys.exit(3)", "PluginError", f"backend 'exits': got SystemExit: 3 {NOT_ORDINARY}"),
    "hookexits": (
        "import sys, fusedops\n@fusedops.hookimpl\ndef fusedops_backend(): sys.exit('no licence')",
        "PluginError",
        f"backend 'hookexits': got SystemExit: no licence {NOT_ORDINARY}",
    ),
    # what a Rust extension raises, and what pytest.importorskip raises: neither derives from Exception
    "panics": (
        "class PanicException(BaseException): pass\nraise PanicException('called unwrap() on None')",
        "PluginError",
        f"backend 'panics': got PanicException: called unwrap() on None {NOT_ORDINARY}",
    ),
    "skips": (
        "import pytest; pytest.importorskip('a_vendor_that_is_not_here')",
        "PluginError",
        f"backend 'skips': got Skipped: could not import 'a_vendor_that_is_not_here': No module named "
        f"'a_vendor_that_is_not_here' {NOT_ORDINARY}",
    ),
    "watches": (
        "import fusedops\n@fusedops.hookimpl\ndef fusedops_observe(event): pass",
        "PluginError",
        "plugin 'watches': got an observing hook alone, expected a backend or an op too; to fix: register it with "
        "fusedops.register()",
    ),
    "asks": ("import fusedops; fusedops.backends()", "PluginError", ASKS),
    "replaces": ("import fusedops; fusedops.unregister('eager')", "PluginError", ASKS),
    "hook": (
        "import fusedops\n@fusedops.hookimpl\ndef fusedops_backend(): raise OSError('no driver')",
        "OSError",
        "no driver",
    ),
    "noop": (
        "import fusedops\n@fusedops.hookimpl\ndef fusedops_op(): return 'an op'",
        "PluginError",
        "plugin 'noop': got str from fusedops_op, expected a fusedops.Op, or a list of them; to fix: return "
        "that, as in docs/add-an-op.md",
    ),
    "takenop": (
        f"{HEAD}\n@hookimpl\ndef fusedops_op(): return copy.copy(fusedops.ops.OPS[SOFTMAX])",
        "PluginError",
        "op 'scaled_masked_softmax': got a second op of this name, expected a free name; to fix: rename one of the "
        "two, or register it once",
    ),
    "constraint": (
        with_kernel("constraint", "SOFTMAX, Dim('y', (-1,), at_least=2)", WANTED),
        "PluginError",
        "got constraint 'y: dim -1 a size of at least 2' on 'y', expected one of its parameters, x, mask, scale, "
        "causal; to fix: name one of these",
    ),
    "condition": (
        with_kernel("condition", "SOFTMAX, When(DType('q', torch.float16), Scalar('scale', 1.0))", WANTED),
        "PluginError",
        "got constraint 'scale: a value in [-1, 1] if q: float16' on 'q', expected one of its parameters, x, mask, "
        "scale, causal; to fix: name one of these",
    ),
    "values": (
        with_kernel("values", "SOFTMAX, Dim('x', (-1,), at_most='a')", WANTED),
        "ValueError",
        "Dim('x'): got 'a', expected an int; to fix: convert it with int()",
    ),
    "auto": (plugin("auto"), "PluginError", f"backend 'auto': got name 'auto', {NAME}"),
    "odd": (
        plugin(
            "odd",
            "made,",
            "class Odd(DType):\n    def expression(self, constants): raise LookupError('no such field')\n"
            f"@kernel(SOFTMAX, Odd('x', torch.float32))\ndef made{WANTED}: return x\n",
        ),
        "LookupError",
        "no such field",
    ),
}

WORKING = {
    "works": plugin("works"),
    "away": plugin("away", probe="lambda: fusedops.Unavailable('no chip', 'buy one')"),
}

PROBE = plugin("probe", head="def bad(): raise OSError('driver 5.1 is too old')\n", probe="bad")


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


def info(name: str, distribution: str | None = None) -> BackendInfo:
    (found,) = [i for i in fusedops.backends() if i.name == name and distribution in (None, i.distribution)]
    return found


@kernel(fusedops.ops.scaled_masked_softmax)
def fives(x: Any, mask: Any, scale: float, causal: bool) -> Any:
    return torch.full_like(x, 5.0)
