"""What ``make gpu`` compares with: the calls fit the parameters that the other libraries' wheels have."""

from __future__ import annotations

import inspect
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from repository import ROOT

if not (ROOT / "benchmarks").exists():
    pytest.skip("needs benchmarks, which is not beside the tests here", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import calls, peers
from benchmarks.gpu.peer_signatures import SIGNATURES, differences
from fusedops import testing

called: set[str] = set()


def function(module: str, name: str) -> Any:
    """Return what takes the parameters of a function, notes its call, and returns its first tensor."""
    parameters = [
        inspect.Parameter(each.rstrip("="), inspect.Parameter.POSITIONAL_OR_KEYWORD,
                          default=None if each.endswith("=") else inspect.Parameter.empty)
        for each in SIGNATURES[module][name].split()
    ]  # fmt: skip
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        called.add(f"{module}.{name}")
        return next((arg for arg in bound.args if isinstance(arg, torch.Tensor)), None)

    return call


def module(name: str) -> SimpleNamespace:
    """Return a module with the functions and classes of SIGNATURES."""
    found = SimpleNamespace()
    for path in SIGNATURES[name]:
        owner, _, method = path.rpartition(".")
        call = function(name, path)
        if not owner:
            setattr(found, path, call)
        elif f"{owner}.__init__" not in SIGNATURES[name]:  # an autograd function
            setattr(found, owner, SimpleNamespace(apply=lambda *args, _call=call: _call(None, *args)))
        elif method == "__init__":
            forward = function(name, f"{owner}.forward")
            setattr(found, owner, lambda _call=call, _forward=forward, **options: (
                _call(None, **options), lambda *args: _forward(None, *args)
            )[1])  # fmt: skip
    return found


def test_each_call_fits_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_module", module)
    called.clear()
    for name, functions in peers.PEERS.items():
        op = testing.OPS[name]
        for case in (*op.evidence.measured, *calls.cases(op, "length", 2**12)):
            args = testing.arguments(op, testing.shrunk(case, 2**10), torch.float32)
            for peer in functions.keys() & {"liger-kernel", "quack-kernels"}:
                try:
                    call = functions[peer](args)
                except ValueError:  # the peer has no such option
                    continue
                call(*args)
    functions = {f"{where}.{name}" for where, names in SIGNATURES.items() for name in names}
    assert called == functions


def test_a_wheel_with_other_parameters_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "quack_kernels-9-py3-none-any.whl", "w") as wheel:
        for name, functions in SIGNATURES.items():
            if name.startswith("quack."):
                lines = [
                    f"def {path}({parameters.replace('=', '=None').replace(' ', ', ')}): ..."
                    for path, parameters in functions.items()
                ]
                text = "\n".join(lines).replace("tuned=None", "tuned=None, more=None")
                wheel.writestr(f"{name.replace('.', '/')}.py", text)
    (found,) = differences(tmp_path)
    assert found.startswith("quack.linear_cross_entropy.chunked_linear_cross_entropy: got parameters x weight target ")
    assert "more=, expected" in found
