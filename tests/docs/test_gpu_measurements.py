"""The measurements of ``make gpu`` where a call or the device fails: the other calls are measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

if not (ROOT / "benchmarks").exists():
    pytest.skip("needs benchmarks, which is not beside the tests here", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command_line
from benchmarks import measure, report
from benchmarks.gpu import __main__ as program
from benchmarks.gpu.steps import BROKEN

SMALL = ["--device", "cpu", "--elements", "4096", "--seconds", "0.001", "--dtypes", "float32", "--modes", "forward",
         "--sweep", "length", "--ops", "rms_norm", "--without", "torch.compile", "fusedops.triton", "--cases",
         *(f"length {length}" for length in (64, 128, 256, 512))]  # fmt: skip


def measured(out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", *SMALL, "--out", str(out), *more])
    return command_line.main()


@pytest.fixture(autouse=True)
def nothing_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave what a call has left: 0.2 s each time, and no memory is measured here."""
    monkeypatch.setattr(measure.gc, "collect", lambda: None)


def cases_of(out: Path) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in report.read(out)))


@pytest.fixture
def fails_at(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """Errors by the case whose arguments cannot be made."""
    errors: dict[str, Exception] = {}
    whole = measure.arguments

    def arguments(op: Any, case: Any, dtype: Any, device: str) -> Any:
        if case.name in errors:
            raise errors[case.name]
        return whole(op, case, dtype, device)

    monkeypatch.setattr(measure, "arguments", arguments)
    return errors


def test_a_call_that_does_not_fit_in_memory_is_reported_and_the_next_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails_at: dict[str, Exception],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fails_at["length 128"] = torch.OutOfMemoryError("CUDA out of memory")
    out = tmp_path / "length.jsonl"
    assert measured(out, monkeypatch) == 1
    assert {"length 64", "length 256", "length 512"} <= set(cases_of(out))
    assert "length 128" not in cases_of(out)
    expected = "failed: rms_norm length 128 float32: OutOfMemoryError: CUDA out of memory"
    lines = capsys.readouterr().out.splitlines()
    assert expected in lines
    assert program._FAILED.match(expected)


def test_a_process_without_a_device_ends_and_the_next_one_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: dict[str, Exception]
) -> None:
    fails_at["length 256"] = RuntimeError("CUDA error: an illegal memory access was encountered")
    out = tmp_path / "length.jsonl"

    def synchronize() -> None:
        if "length 128" in cases_of(out):  # an illegal access fails all that follows in the process
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cpu, "synchronize", synchronize)
        assert measured(out, patch, "--continue") == BROKEN
    assert cases_of(out) == ["length 64", "length 128"]
    with out.open("a") as file:
        file.write('{"case": "half of a li')
    assert measured(out, monkeypatch, "--continue") == 1
    assert cases_of(out) == ["length 64", "length 128", "length 512"]
    assert measured(out, monkeypatch, "--continue") == 0  # nothing is left


def test_without_continue_a_measurement_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "length.jsonl"
    assert measured(out, monkeypatch) == 0
    first = cases_of(out)
    assert measured(out, monkeypatch) == 0
    rows = report.read(out)
    assert cases_of(out) == first
    assert len(rows) == len({(row["case"], row["provider"]) for row in rows})


def test_other_errors_of_compilation_ahead_leave_the_next_call(
    monkeypatch: pytest.MonkeyPatch, fails_at: dict[str, Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    fails_at["length 128"] = RuntimeError("no such width")
    fails_at["length 256"] = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    calls: list[str] = []
    monkeypatch.setattr(measure, "with_grad", lambda op, args: calls.append(str(args[0].shape[-1])) or (list(args), []))
    assert measured(Path("unused"), monkeypatch, "--compile-only", "0/1") == 0
    assert calls[:2] == ["64", "512"]
    text = capsys.readouterr().out
    assert "not compiled: rms_norm length 128: RuntimeError: no such width" in text
    assert "not compiled: rms_norm length 256: the memory of the device was full" in text


def test_cases_without_time_are_in_the_summary() -> None:
    line = "stopped after 120 s: 5 of 72 cases are left out"
    match = program._COUNTS.match(line)
    assert match is not None
    assert match[1] == line
