"""fusedops check: the report of the conformance kit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from broken_backends import BROKEN, DECLARED
from command_line import documented, flat, keys, run
from loopback import registered

import fusedops
from fusedops import testing

# a kernel that fails a check, and another that a deviation excuses
SHOWN = {"kernel", "limits", "constraints", "special", "determinism"}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    off_by_one = next(broken for broken in BROKEN if broken.name == "off_by_one")
    kernels = (*off_by_one.kernels(), *DECLARED.kernels())
    real = testing.checks
    monkeypatch.setattr(testing, "checks", lambda *args: [check for check in real(*args) if check.name in SHOWN])
    with registered(fusedops.Backend("half", ("cpu",), -50, kernels)) as backend:
        yield backend.name


def test_each_failure_is_reported(checked: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("check", checked, capsys=capsys)
    assert code == 1
    lines = output.splitlines()
    assert lines[0] == f"backend half, distribution (registered), device cpu, fusedops {fusedops.__version__}, torch"
    assert re.search(r"^scaled_masked_softmax +forward +(limits|constraints) +\d+ +FAIL 1$", output, re.M)
    assert re.search(r"^bias_gelu +backward +determinism +1 +pass, 1 excused$", output, re.M)
    (line,) = [line for line in lines if line.startswith("reproduce ")]
    assert "testing.reproduce(" in line
    text = flat(output)
    assert re.search(r"failed +scaled_masked_softmax/forward/(limits|constraints): x dim -1 = 80", text)
    assert "RuntimeError: the kernel has room for 79 columns" in text
    assert re.search(r"^1 of \d+ checks failed, 1 of \d+ cases; excused by a declared deviation:", output, re.M)
    assert [line for line in lines if len(line) > 80 and not line.startswith("reproduce ")] == []


def test_json_is_as_documented(checked: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("check", checked, "--json", capsys=capsys)
    assert code == 1
    assert keys(json.loads(output)) == documented("check")
    code, output = run("check", checked, "--json", "--op", "bias_gelu", "--device", "cpu", capsys=capsys)
    assert code == 0
    assert {check["op"] for check in json.loads(output)["checks"]} == {"bias_gelu"}
