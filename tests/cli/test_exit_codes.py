"""Each exit code that docs/command-line.md has for a command, and a command line that ends with it."""

from __future__ import annotations

from typing import Any

import pytest
from broken_backends import BROKEN
from command_line import documented_codes, exit_code
from loopback import registered

import fusedops
from fusedops import testing
from fusedops._cli import bench
from fusedops._cli.main import COMMANDS
from fusedops.testing import OPS

CALL = "explain scaled_masked_softmax --x 4,8,512"
SMALL = "--elements 16 --seconds 0.001"
CODES = {
    ("info", 0): "info",
    ("info", 2): "info --x",
    ("explain", 0): f"{CALL},512:bf16@npu",
    ("explain", 1): f"{CALL},500:bf16@npu",
    ("explain", 2): f"{CALL},5oo:bf16@npu",
    ("explain", 3): f"{CALL},500:bf16@npu --fallback raise",
    ("matrix", 0): "matrix --op bias_gelu",
    ("matrix", 2): "matrix --op bias_gel",
    ("doctor", 0): "doctor",
    ("doctor", 1): "doctor",
    ("doctor", 2): "doctor --fix",
    ("check", 0): "check off_by_one --op bias_gelu",
    ("check", 1): "check off_by_one --op scaled_masked_softmax",
    ("check", 2): "check npu",
    ("bench", 0): f"bench bias_gelu {SMALL}",
    ("bench", 1): f"bench bias_gelu {SMALL}",
    ("bench", 2): "bench --device npu",
}


@pytest.fixture
def prepared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fakes: Any) -> Any:
    """Prepare what some codes need: a broken backend, a misspelt variable, providers that raise."""
    command, code = request.param
    if (command, code) == ("doctor", 1):
        monkeypatch.setenv("FUSEDOPS_BACKENDS", "eager")
    if command == "bench":
        op = OPS["bias_gelu"]
        monkeypatch.setattr(
            bench, "cases", lambda ops, elements: [(op, testing.shrunk(op.evidence.cases[-1], elements))]
        )
    if (command, code) == ("bench", 1):
        monkeypatch.setattr(bench, "_first_calls", lambda *args: iter(()))
    if command == "check":
        real = testing.checks
        quick = ("constraints", "limits")
        monkeypatch.setattr(testing, "checks", lambda *args: [each for each in real(*args) if each.name in quick])
        broken = next(broken for broken in BROKEN if broken.name == "off_by_one")
        gelu = OPS["bias_gelu"]
        kernels = (*broken.kernels(), fusedops.kernel(gelu.name)(gelu.reference))
        with registered(fusedops.Backend(broken.name, ("cpu",), -50, kernels)):
            yield command, code
        return
    yield command, code


def test_every_documented_code_has_a_command_line() -> None:
    assert set(CODES) == set(documented_codes())
    assert {command for command, _ in CODES} == set(COMMANDS)


@pytest.mark.parametrize("prepared", CODES, indirect=True, ids=lambda value: f"{value[0]}-{value[1]}")
def test_the_code(prepared: tuple[str, int]) -> None:
    assert exit_code(*CODES[prepared].split()) == prepared[1]
