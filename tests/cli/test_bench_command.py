"""fusedops bench: what it measures, what it prints, and what stops it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from command_line import documented, keys, run

import fusedops
from fusedops import testing
from fusedops._cli import bench
from fusedops._cli.main import main
from fusedops.testing import OPS

ALL_CASES = bench.cases  # the fixture below replaces it
BENCH = ["bench", "bias_gelu", "--device", "cpu", "--elements", "64", "--seconds", "0.001"]
CASES = OPS["bias_gelu"].evidence.cases[-2:]
RECORD = {
    "direction": "forward",
    "provider": "eager",
    "ms": 1.0,
    "ms_p20": 0.9,
    "ms_p80": 1.1,
    "copies": 2.0,
    "speedup": 2.0,
}


@pytest.fixture(autouse=True)
def _two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes long for each; a busy machine is the subject of one test alone."""
    monkeypatch.setattr(
        bench, "cases", lambda ops, elements: [(op, case) for op in ops for case in op.evidence.cases[-2:]]
    )
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def test_every_backend_that_takes_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(*BENCH, "--json", capsys=capsys)
    records = json.loads(output)
    assert code == 0
    assert keys(records) == documented("bench")
    assert {record["case"] for record in records} == {case.name for case in CASES}
    for case in CASES:
        for direction in ("forward", "backward"):
            rows = {r["provider"]: r for r in records if (r["case"], r["direction"]) == (case.name, direction)}
            assert {"plain torch", "eager", "triton"} <= set(rows)
            assert "npu" not in rows, "npu takes no cpu tensors"
            assert rows["plain torch"]["speedup"] == 1.0
            for row in rows.values():
                assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"]
                assert row["dtype"] == "float32"


def test_a_table_with_the_spread(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run(*BENCH, "--dtype", "bf16", capsys=capsys)
    assert code == 0
    assert f"bias_gelu, {CASES[0].name}: {CASES[0].args['x']} bf16 on cpu" in output
    assert re.search(r"^direction +provider +ms +p20-p80 +copies +x plain torch$", output, re.M)
    assert re.search(r"^backward +eager +[\d.]+ +[\d.]+-[\d.]+ +[\d.]+ +[\d.]+$", output, re.M)
    assert [line for line in output.splitlines() if len(line) > 80] == []


def test_copies_and_plain_torch_are_the_units(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {"plain torch": 6.0, "eager": 3.0, "triton": 2.0, "copy": 1.5}

    def timed(work: Mapping[str, Callable[[], object]], device: str, seconds: float) -> dict[str, testing.Times]:
        assert (device, seconds) == ("cpu", 0.001)
        for function in work.values():
            function()
        return {name: testing.Times(times.get(name, 1.0), 0.1, 9.0) for name in work}

    monkeypatch.setattr(testing, "interleaved", timed)
    _, output = run(*BENCH, "--json", capsys=capsys)
    rows = {(r["provider"], r["ms"], r["copies"], r["speedup"]) for r in json.loads(output) if r["provider"] in times}
    assert rows == {("plain torch", 6.0, 4.0, 1.0), ("eager", 3.0, 2.0, 2.0), ("triton", 2.0, 1.33, 3.0)}


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_an_interrupt_keeps_what_is_measured(
    json_too: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = bench.measure

    def measure(op: Any, case: Any, *args: Any) -> Iterator[dict[str, Any]]:
        records = real(op, case, *args)
        yield next(records)
        if case.name == CASES[-1].name:
            raise KeyboardInterrupt
        yield from records

    monkeypatch.setattr(bench, "measure", measure)
    code = main([*BENCH, *json_too])
    captured = capsys.readouterr()
    assert code == 130
    (count,) = re.findall(r"^fusedops: warning: stopped; (\d+) measurements are kept$", captured.err, re.M)
    if json_too:
        assert len(json.loads(captured.out)) == int(count)
    else:
        assert len(re.findall(r"^(?:for|back)ward ", captured.out, re.M)) == int(count)
        assert f"bias_gelu, {CASES[-1].name}" in captured.out


@pytest.mark.slow
def test_the_signal_of_ctrl_c_keeps_what_is_measured() -> None:
    """The first line of the table is written before the second case is measured."""
    command = [sys.executable, "-m", "fusedops", *BENCH[:-1], "0.05"]
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # a shell starts its background jobs with the signal ignored, and so their children
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, env=variables, preexec_fn=heeds, **pipes) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = iter(process.stdout.readline, "")
        head = [next(line for line in lines if line.startswith("direction")), next(lines)]
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert head[1].startswith("forward")
    assert process.returncode == 130
    assert "Traceback" not in error
    assert re.search(r"^fusedops: warning: stopped; [1-9]\d* measurements are kept$", error, re.M)


def test_a_busy_machine_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "measure", lambda *args: iter([RECORD]))
    cores = os.cpu_count() or 1
    for load, warned in ((cores - 0.5, False), (cores + 0.5, True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert main(BENCH) == 0
        assert ("fusedops: warning: got a load average of" in capsys.readouterr().err) == warned


def test_a_kernel_that_raises_is_left_out(fakes: Any, capsys: pytest.CaptureFixture[str]) -> None:
    @fusedops.kernel("bias_gelu")
    def broken(x: Any, bias: Any, approximate: str) -> Any:
        raise RuntimeError("out of registers")

    fusedops.register(fusedops.Backend("broken", ("cpu",), 300, (broken,)))
    code = main([*BENCH, "--json"])
    captured = capsys.readouterr()
    assert code == 0
    assert "left out: broken for bias_gelu: RuntimeError: out of registers" in captured.err
    assert "eager" in {record["provider"] for record in json.loads(captured.out)}


def test_nothing_that_can_be_measured_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_first_calls", lambda *args: iter(()))
    assert main(BENCH) == 1


def test_a_case_that_cannot_be_cut_is_left_out() -> None:
    """Of a mask (1, 1, 1, 48) the last size is kept, where the keys of the call become fewer."""
    attention = OPS["attention"]
    assert len(list(ALL_CASES([attention], 2**22))) == len(attention.evidence.cases)
    cut = list(ALL_CASES([attention], 1024))
    assert 0 < len(cut) < len(attention.evidence.cases)
    for op, case in cut:
        op.validate(testing.arguments(op, case, torch.float32))


def test_the_policy_of_the_measured_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = {"eager": 3.0, "triton": 1.0}

    def timed(work: Mapping[str, Callable[[], object]], device: str, seconds: float) -> dict[str, testing.Times]:
        return {name: testing.Times(times.get(name, 4.0), 1.0, 9.0) for name in work}

    monkeypatch.setattr(testing, "interleaved", timed)
    for kind in ([], ["inference"], ["training"]):
        code, output = run(*BENCH, "--rank", *kind, capsys=capsys)
        assert code == 0
        assert output == "triton,eager\n"
        with fusedops.use(output.strip(), fallback="silent"):  # the text is a policy
            assert fusedops.explain("bias_gelu", torch.ones(4, 8), torch.ones(8)).backend == "triton"
    _, output = run(*BENCH, "--rank", "--json", capsys=capsys)
    assert json.loads(output)["orders"]["bias_gelu"][0] == "triton"
