"""The fuzzer: it finds a planted fault of each kind and prints a program that shows it; and calls of all ops."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import planted_backend
import pytest
from repository import ROOT

import fusedops
from tests.fuzz.generate import generate
from tests.fuzz.machine import LARGE, Target, targets


def fuzz(*options: str, planted: str = "right", seconds: float = 1800) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return python("-m", "tests.fuzz", *options, planted=planted, seconds=seconds)


def python(*arguments: str, planted: str = "right", seconds: float = 600) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PLANTED": planted, "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=seconds
    )


PLANTED = ("--plugin", "planted_backend", "--backend", "planted", "--seed", "1", "--calls")


def program_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the first program that a run printed."""
    found = re.search(r"^---- .*?\n# .*?\n(.*?outcome = .*?\n)", done.stderr, re.S | re.M)
    assert found is not None, done.stderr
    return found[1]


@pytest.mark.slow
def test_a_wrong_number_is_found_and_its_program_is_small_and_shows_it(
    tmp_path: pathlib.Path, program: Callable[..., Any]
) -> None:
    done = fuzz(*PLANTED, "8", planted="value")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "seed 1\n" in done.stdout
    assert re.search(r"^bias_gelu +planted +cpu ", done.stdout, re.M)
    text = program_of(done)
    path = tmp_path / "program.py"
    path.write_text(text)
    shown, right = (program(path, path=(ROOT,), folder=ROOT, PLANTED=fault) for fault in ("value", "right"))
    assert shown.returncode == 1
    assert "got output y beyond the tolerance in 1 of 33 elements" in shown.stderr
    assert right.returncode == 0, "without the fault the program passes"
    sizes = {
        int(size)
        for shape in re.findall(r"(?:randn|zeros)\(\(([\d, ]*)\)", text)
        for size in shape.split(",")
        if size.strip()
    }
    assert sizes <= {1, 33}
    assert not re.search(r"expand|transpose|stack|view|requires_grad|set_policy|inference'", text), text


@pytest.mark.slow
def test_a_backend_without_fault_passes() -> None:
    done = fuzz(*PLANTED, "6")
    assert done.returncode == 0, done.stderr
    assert "6 calls: 0 wrong, 0 crash, 0 hang" in done.stdout


@pytest.mark.slow
def test_the_end_of_the_process_is_reported_with_its_call_and_the_others_run() -> None:
    done = fuzz(*PLANTED, "14", "--hang", "3", planted="ends")
    assert done.returncode == 1
    assert "\n14 calls: 0 wrong, 1 crash, 1 hang\n" in done.stdout, done.stdout + done.stderr
    fusedops.register(planted_backend)
    for column, shape in (("crash", (65,)), ("hang", (8, 4096))):
        first = rf"^---- {column}: [^\n]*, seed (\S+)\n#[^\n]*\n(.*?outcome = .*?\n)"
        found = re.search(first, done.stderr, re.S | re.M)
        assert found is not None, done.stderr
        # a seed gives the same call in another process
        call = generate(Target("bias_gelu", "planted", "cpu", LARGE, ("planted",)), found[1])
        assert call.program(("planted_backend",)) == found[2]
        assert call.tensors()["x"].shape == shape


FAULTS = {
    "written": "written by the call",
    "alias": "shares memory with x",
    "draw": "another state of torch's generator",
    "strides": "expected a contiguous one",
    "unsteady": "expected the same bits",
    "raises": "the kernel needs contiguous rows",
    "reads": "where new memory is filled",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_kind_of_fault_is_found(fault: str, tmp_path: pathlib.Path, program: Callable[..., Any]) -> None:
    """By the loop alone, in a fork of a process that has torch: the tests above start it as the command does."""
    calls = 150 if fault == "alias" else 40  # it is in two of those, and each other one in one of the first eleven
    options = (*PLANTED, calls, "--last", tmp_path / "last.json", "--child")
    done = program("-m", "tests.fuzz", *options, path=(ROOT,), folder=ROOT, PLANTED=fault)
    assert done.returncode == 0, done.stderr
    *events, end = map(json.loads, done.stdout.splitlines())
    assert end == {"event": "end"}
    assert any(FAULTS[fault] in event["message"] for event in events if event["event"] == "failed"), done.stdout


@pytest.mark.parametrize(("kind", "known"), [("op", "rms_norm"), ("backend", "eager")])
def test_an_unknown_name_is_an_error_that_lists_the_names(kind: str, known: str) -> None:
    with pytest.raises(SystemExit, match=rf"got {kind} 'nosuch', expected one of .*{known}"):
        targets(**{f"{kind}s": ["nosuch"]})


@pytest.mark.slow
def test_calls_of_all_ops_and_backends() -> None:
    """The calls are fixed by the seed and their number: one of each slow target, two of each other one."""
    done = fuzz("--seed", "20240607", "--calls", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong, 0 crash, 0 hang" in done.stdout


@pytest.mark.slow
def test_verify_has_no_false_alarm_and_reports_planted_errors() -> None:
    done = python("-m", "tests.fuzz.verified", "--calls", "30", "--errors", "15", seconds=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^15 planted errors, \d+ in sums over 256 to 16384 rows: 0 unseen$", done.stdout, re.M)
    assert re.search(r"^30 right calls, .*: 0 false alarms$", done.stdout, re.M)


@pytest.mark.slow
def test_threads_forks_and_the_end_of_the_interpreter() -> None:
    done = fuzz("--concurrency", "--seed", "1", "--calls", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 clean, 0 wrong, 0 crash, 0 hang") == 3
