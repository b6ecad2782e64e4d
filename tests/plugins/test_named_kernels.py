"""Kernels whose modules a plugin names as text: imported by the first call that needs them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from broken_plugins import info

import fusedops

X = torch.ones(2)
BACKEND = """
import fusedops

@fusedops.hookimpl
def fusedops_backend():
    kernels = fusedops.kernels_of({kernels})
    return fusedops.Backend("named", ("cpu",), -5, kernels, fusedops_api=2)
"""
KERNELS = """
import fusedops

def times_ten(function):
    return lambda *args: function(*args) * 10

@fusedops.kernel("bias_gelu", prepare=times_ten)
def gelu(x, bias, approximate): return x + 1

@fusedops.kernel("linear")
def linear(x, weight, bias, activation): return x + 2

@fusedops.kernel("swiglu", prepare=times_ten)
def swiglu(gate, up, limit, alpha, offset, interleaved): return gate + 3

TABLE = (gelu, swiglu)
"""


@pytest.fixture
def named(distribution: Any, rediscovered: Any) -> Any:
    """Install a plugin that names its kernels so, with a good module ``named_one`` and another one."""

    def install(kernels: str, other: str = KERNELS) -> None:
        source = BACKEND.format(kernels=kernels)
        rediscovered(distribution("dist", {"named": "named"}, named=source, named_one=KERNELS, named_two=other))

    return install


def loaded() -> set[str]:
    return {"named_one", "named_two"} & {*sys.modules}


def test_a_module_is_imported_by_the_first_call_of_its_op(named: Any) -> None:
    named('bias_gelu="named_one", swiglu=["named_two:TABLE"]')
    assert fusedops.rms_norm(X, X).shape == (2,)
    assert fusedops.explain("linear", X, torch.ones(2, 2), backend="named").candidates[0].reasons[0].given == (
        "kernels for bias_gelu, swiglu"
    )
    assert loaded() == set()
    assert fusedops.bias_gelu(X, backend="named").tolist() == [20.0, 20.0]
    assert loaded() == {"named_one"}
    assert fusedops.swiglu(X, X, backend="named").tolist() == [40.0, 40.0]  # prepared after the probe
    assert info("named").ops == ("bias_gelu", "swiglu")


def test_the_ops_of_a_table_are_those_of_its_kernels(named: Any) -> None:
    named('"named_one:TABLE", linear="named_two"')
    assert info("named").ops == ("bias_gelu", "swiglu", "linear")
    assert fusedops.linear(X, torch.ones(2, 2), backend="named").tolist() == [3.0, 3.0]
    assert fusedops.swiglu(X, X, backend="named").tolist() == [40.0, 40.0]


@pytest.mark.parametrize(
    ("kernels", "other", "text"),
    [
        ('swiglu="named_two"', "raise RuntimeError('no licence found')", "RuntimeError: no licence found"),
        ('swiglu="named_two"', "import sys; sys.exit(3)", "got SystemExit: 3 from its import, expected an import"),
        ('swiglu="named_three"', "", "No module named 'named_three'"),
        ('swiglu="named_two:NONE"', "", "has no attribute 'NONE'"),
        ('swiglu="named_two"', "", "kernels_of: got no kernel for swiglu in named_two, expected one; to fix: name the"),
        (
            'swiglu="named_two"',
            "import fusedops\n@fusedops.kernel('swiglu')\ndef swiglu(a, b): ...",
            "got parameters (a, b), expected (gate, up, ",
        ),
    ],
)
@pytest.mark.parametrize("shown_first", [False, True])
def test_a_module_that_cannot_be_used_fails_the_backend(
    named: Any, kernels: str, other: str, text: str, shown_first: bool
) -> None:
    named(f'bias_gelu="named_one", {kernels}', other)
    assert fusedops.bias_gelu(X, backend="named").tolist() == [20.0, 20.0]
    if not shown_first:
        assert text in fusedops.explain("swiglu", X, X, backend="named").candidates[0].reasons[0].given
    shown = info("named")
    assert (shown.state, shown.ops) == ("failed", ())
    assert text in shown.why
    assert fusedops.swiglu(X, X).shape == (2,)
    with pytest.raises(fusedops.PluginError, match="failed to load"), fusedops.use("named"):
        pass


def test_an_interrupt_of_an_import_passes(named: Any) -> None:
    named('"named_two:TABLE"', "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        fusedops.explain("swiglu", X, X)


def test_a_name_of_no_op_is_found_when_the_plugin_is_loaded(named: Any) -> None:
    named('swiglow="named_two"')
    assert "got a kernel for 'swiglow' at named_two, expected one of the ops " in info("named").why
    assert loaded() == set()


def test_named_kernels_that_are_registered_by_hand_are_checked_at_once() -> None:
    backend = fusedops.Backend("named", ("cpu",), -5, fusedops.kernels_of("fusedops_eager.kernels:KERNELS"))
    assert len(backend.kernels) == len({(each.op, each.direction) for each in backend.kernels}) > 60
    fusedops.register(backend)
    with pytest.raises(ModuleNotFoundError):
        fusedops.register(fusedops.Backend("other", ("cpu",), -5, fusedops.kernels_of("no_such_module")))
