"""fusedops matrix: a grid of ops and backends, and what the kernels of one op or one backend take."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from command_line import documented, flat, keys, run

import fusedops
from fusedops._plugins.registry import registry
from fusedops.constraints import Dim
from fusedops.testing import OPS
from fusedops.testing._calls import specs

GELU = OPS["bias_gelu"]
FORWARD = fusedops.kernel(GELU.name, Dim("x", (-1,), multiple_of=8))(GELU.reference)
BACKWARD = fusedops.kernel(GELU.name, Dim("x", (-1,), multiple_of=8), Dim("x", (-1,), at_most=64), direction="backward")


def grid(text: str) -> dict[str, dict[str, str]]:
    """Return the cells by op and backend, of all blocks of columns."""
    cells: dict[str, dict[str, str]] = {name: {} for name in OPS}
    for block in re.findall(r"^op  .*\n(?:\S.*\n)+", text, re.M):
        head, *rows = (line.split() for line in block.splitlines())
        for name, *row in rows:
            cells[name] |= dict(zip(head[1:], row, strict=True))
    return cells


@pytest.mark.parametrize("columns", [60, 80, 132])
def test_the_grid_has_the_directions_of_every_op_and_backend(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, text = run("matrix", capsys=capsys)
    assert code == 0
    cells = grid(text)
    infos = {info.name: info for info in fusedops.backends() if info.state != "failed"}
    assert all(set(row) == set(infos) for row in cells.values())
    for op, row in cells.items():
        for name, cell in row.items():
            assert (cell != "-") == (op in infos[name].ops), f"{op} of {name}"
            assert cell.startswith("(") == (cell != "-" and infos[name].state != "ready"), f"{op} of {name}"
    for info in infos.values():
        assert info.why in flat(text)
        assert info.fix in flat(text)


def test_an_installation_as_it_comes_is_two_blocks_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run("matrix", capsys=capsys)
    assert len(re.findall(r"^op  ", text, re.M)) == 2
    assert max(map(len, text.splitlines())) <= 80


def test_a_backend_without_a_gradient_has_forward_alone(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fusedops.register(fusedops.Backend("half", ("cpu",), 200, [FORWARD]))
    _, text = run("matrix", capsys=capsys)
    assert grid(text)["bias_gelu"]["half"] == "forward"


def test_what_both_directions_take_is_shown_once(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fusedops.register(fusedops.Backend("whole", ("cpu",), 200, [FORWARD, BACKWARD(GELU.backward)]))
    for options in (("--op", "bias_gelu"), ("--backend", "whole")):
        _, text = run("matrix", *options, capsys=capsys)
        own = text.split("  whole ", 1)[1].split("\n  eager ")[0]
        assert "forward and backward on cpu" in own
        assert own.count("a multiple of 8") == 1
        assert "a size of at most 64 (backward)" in flat(own)
    assert "without a kernel: add_layer_norm" in text
    assert "scaled_masked_softmax" in text.rpartition("without a kernel")[2]


def test_an_op_without_a_kernel_names_the_backends(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fusedops.register(fusedops.Backend("half", ("cpu",), 200, [FORWARD]))
    _, text = run("matrix", "--op", "geglu", capsys=capsys)
    assert "no kernel: half" in text
    _, text = run("matrix", "--op", "geglu", "--backend", "half", "--device", "npu", capsys=capsys)
    assert "no backend is left by these options" in text


# ------------------------------------------------------------------------------------------------------- its features


def _takes(op: Any, kernel: Any, dtype: torch.dtype) -> bool:
    """Return True where no constraint of the kernel gives a reason about the dtype of a named case's first tensor."""
    first = op.parameters[0]
    given = dict(zip(op.parameters, op.prepared(op.bind((), specs(op, op.evidence.cases[0], dtype)))))
    reasons = [reason for each in kernel.constraints if each.name == first for reason in each.reasons(given)]
    return all(reason.code.value != "dtype" for reason in reasons)


def test_each_cell_of_the_features_is_as_declared(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run("matrix", "--features", "--json", capsys=capsys)
    assert code == 0
    assert {key for key in keys(json.loads(text)) if key.count(".") == 1} == documented("matrix --features")
    rows = {(row["op"], row["backend"]): row for row in json.loads(text)}
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
    for record in registry.records():
        for name, op in registry.ops.items():
            kernels = [each for each in record.backend.kernels if each.op == name] if record.backend else []
            forward = next((each for each in kernels if each.direction == "forward"), None)
            assert ((name, record.name) in rows) == (forward is not None)
            if forward is None:
                continue
            row = rows[name, record.name]
            assert row["backward"] == any(each.direction == "backward" for each in kernels)
            assert row["dtypes"] == [
                short for dtype, short in names.items() if dtype in op.evidence.tolerance and _takes(op, forward, dtype)
            ]
            why = forward.why_rows_depend(row["device"])
            assert row["rows_independent"]["forward"] == (why or True)
            assert (row["packed"] is not None) == any(each.startswith("cu_seqlens") for each in op.parameters)


def test_the_features_of_one_op_are_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "132")
    _, text = run("matrix", "--features", "--op", "cross_entropy", "--device", "cpu", capsys=capsys)
    head, *lines = [re.split(r"\s{2,}", line.strip()) for line in text.strip().splitlines()]
    assert head[-1] == "rows independent"
    assert {("cpu", "yes"), ("eager", "no")} <= {(line[1], line[-1]) for line in lines}
    assert all(len(line) == len(head) for line in lines)
