"""The op of a plugin works in every command, as one of the project's own."""

from __future__ import annotations

import json
from typing import Any

import pytest
from command_line import flat, run

from fusedops import testing
from fusedops._cli.main import main

SOURCE = '''
import torch
import fusedops
from torch import Tensor
from fusedops.constraints import Broadcasts, Dim, Finite, Floating, Mask, SameDevice


def scaled_keep(
    x: Tensor, drop: Tensor | None = None, policy: float = 2.0, *, power: int = 1, exact: bool = False, backend=None
) -> Tensor:
    """Multiply x by ``policy ** power``, and put 0 where ``drop`` is set."""
    return fusedops.call(OP, (x, drop, policy, power, exact), backend)


def reference(x: Tensor, drop: Tensor | None, policy: float, power: int, exact: bool) -> Tensor:
    y = x * policy**power
    return y if drop is None else y.masked_fill(drop.bool(), 0.0)


def backward(grad: Tensor, drop: Tensor | None, policy: float, power: int) -> Tensor:
    dx = grad * policy**power
    return dx if drop is None else dx.masked_fill(drop.bool(), 0.0)


EXACT = {
    torch.float16: fusedops.Tolerance(2e-3, 2e-3),
    torch.bfloat16: fusedops.Tolerance(1e-2, 1.6e-2),
    torch.float32: fusedops.Tolerance(1e-5, 1e-5),
    torch.float64: fusedops.Tolerance(1e-9, 1e-9),
}
OP = fusedops.Op(
    scaled_keep,
    constraints=[
        Floating("x"), Mask("drop"), SameDevice("drop", "x"), Broadcasts("drop", "x"), Finite("policy"),
    ],
    reference=reference, backward=backward, differentiable=("x",),
    evidence=fusedops.Evidence(
        tolerance=EXACT, gradient_tolerance=EXACT, cases=[fusedops.Case("small", {"x": (16, 64)})],
        min_bytes=lambda x, *_: {"forward": 2 * x.nbytes, "backward": 2 * x.nbytes},
        unfused=reference, formula="100 % of x * policy ** power",
    ),
)


@fusedops.kernel("scaled_keep", Dim("x", (-1,), multiple_of=8))
def forward(x, drop, policy, power, exact):
    return reference(x, drop, policy, power, exact).contiguous()


KERNELS = (
    forward,
    fusedops.kernel("scaled_keep", direction="backward")(backward),
)


@fusedops.hookimpl
def fusedops_op():
    return OP


@fusedops.hookimpl
def fusedops_backend():
    return fusedops.Backend("keeper", ("cpu",), 50, KERNELS)
'''


@pytest.fixture(autouse=True)
def plugin(request: pytest.FixtureRequest, rediscovered: Any, distribution: Any) -> None:
    source = SOURCE.replace(*getattr(request, "param", ("", "")))
    rediscovered(distribution("keeperlib", {"keeper": "keeper_plugin"}, keeper_plugin=source))


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    _, output = run("info", "--json", capsys=capsys)
    data = json.loads(output)
    assert "scaled_keep" in data["ops"]
    (row,) = [row for row in data["backends"] if row["name"] == "keeper"]
    assert row["ops"] == ["scaled_keep"]


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["--x", "4,8"], 0, "served by keeper"),
        (["--x", "4,8", "--drop", "4,8"], 0, "drop bool[4, 8] on cpu"),
        (["--x", "4,8", "--arg-policy", "0.5", "--policy", "keeper"], 0, "policy 0.5, power 1"),
        (["--x", "4,8", "--power", "-3", "--exact", "true"], 0, "power -3, exact True"),
        (["--x", "4,7", "--backend", "keeper"], 3, "served by no backend"),
        (["--x", "4,7", "--drop", "none"], 3, "got dim -1 of x = 7, expected a multiple of 8"),
    ],
)
def test_explain(argv: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No other backend has a kernel for this op."""
    assert main(["explain", "scaled_keep", *argv]) == code
    assert text in flat(capsys.readouterr().out)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "--help"])
    assert "100 % of x" in flat(capsys.readouterr().out)
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "scaled_keep", "--help"])
    text = flat(capsys.readouterr().out)
    assert "--drop TENSOR bool or uint8" in text
    assert "--arg-policy FLOAT" in text
    assert "--power INT" in text


def test_a_misspelt_name(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["explain", "scaled_kept"], ["matrix", "--op", "scaled_kept"], ["bench", "scaled_kept"]):
        assert main(argv) == 2
        assert capsys.readouterr().err.endswith("to fix: write 'scaled_keep'\n")


def test_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("matrix", "--op", "scaled_keep", "--backend", "keeper", capsys=capsys)
    assert code == 0
    assert output.startswith(
        "scaled_keep: 100 % of x * policy ** power\n  keeper   serves   forward and backward on cpu\n"
    )
    assert "a multiple of 8" in output


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("bench", "scaled_keep", "--elements", "256", "--seconds", "0.001", "--json", capsys=capsys)
    assert code == 0
    records = json.loads(output)
    assert {(record["provider"], record["direction"]) for record in records} == {
        (provider, direction) for provider in ("plain torch", "keeper") for direction in ("forward", "backward")
    }


WRONG = {
    ("exact).contiguous()", "exact)"): "strides",
    ("exact).contiguous()", "exact).contiguous() * 1.1"): "float64",
    ("return dx if drop", "return dx * 1.1 if drop"): "float64",
}


@pytest.mark.parametrize("plugin", WRONG, indirect=True, ids=["strides", "forward", "backward"])
def test_check_of_a_wrong_kernel(request: pytest.FixtureRequest, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check = WRONG[request.node.callspec.params["plugin"]]
    real = testing.checks
    monkeypatch.setattr(testing, "checks", lambda *args: [each for each in real(*args) if each.name == check])
    code, output = run("check", "keeper", "--json", capsys=capsys)
    assert code == 1
    assert any(check["failures"] for check in json.loads(output)["checks"])


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("check", "keeper", "--json", "--elements", "256", capsys=capsys)
    data = json.loads(output)
    assert {check["op"] for check in data["checks"]} == {"scaled_keep"}
    assert [check["check"] for check in data["checks"] if check["failures"]] == []
    assert code == 0


@pytest.mark.parametrize(("backend", "wrong"), [("keeper", False), ("kepper", True)])
def test_doctor(backend: str, wrong: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDOPS_BACKEND", f"auto; scaled_keep={backend}")
    code, output = run("doctor", "--json", capsys=capsys)
    about = [finding for finding in json.loads(output) if backend in str(finding)]
    assert bool(about) == wrong
    assert code == 1 or not wrong  # this machine may have a problem of its own
    assert not wrong or "to fix: write 'keeper'" in output
