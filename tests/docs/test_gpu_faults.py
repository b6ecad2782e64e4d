"""``make gpu`` where something breaks: the steps after it run, and what was measured is kept."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

if not (ROOT / "benchmarks").exists():
    pytest.skip("needs benchmarks, which is not beside the tests here", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import __main__ as program
from benchmarks.gpu.packages import python_path
from benchmarks.gpu.runner import log_of, run_all
from benchmarks.gpu.steps import BROKEN, Step, Target, commands


def python(name: str, code: str, seconds: float = 30.0, **fields: Any) -> Step:
    return Step(name, (sys.executable, "-c", code), seconds, **fields)


def run(steps: list[list[Step]], folder: Path, **options: Any) -> dict[str, tuple[str, str]]:
    """Return status and detail of each step."""
    outcomes = run_all(steps, os.environ, folder / "logs", folder, 60.0, **options)
    return {one.step: (one.status, one.detail) for one in outcomes}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the repository, for the folders that the program writes."""
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "python_path", lambda work, wheels: str(ROOT))
    return tmp_path


# ---------------------------------------------------------------------------------------------------------------- steps


def test_a_measurement_that_dies_is_continued(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
began = pathlib.Path("began")
began.write_text((began.read_text() if began.exists() else "") + "x")
print("attempt", began.read_text(), flush=True)
if len(began.read_text()) == 1:
    os.abort()
raise SystemExit({BROKEN} if len(began.read_text()) == 2 else 0)
"""
    outcomes = run([[python("measure", code, restarts=3)]], tmp_path)
    assert outcomes == {"measure": ("failed", "exit status 0, after 2 restarts")}
    log = log_of(tmp_path / "logs", "measure").read_text()
    assert [line for line in log.splitlines() if line.startswith("attempt")] == [
        "attempt x", "attempt xx", "attempt xxx",
    ]  # fmt: skip


def test_what_a_step_has_left_behind_does_not_run_beside_the_next(tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid)"
    assert run([[python("leaves", code)]], tmp_path) == {"leaves": ("passed", "")}
    path = Path(f"/proc/{log_of(tmp_path / 'logs', 'leaves').read_text().strip()}/stat")
    end = time.monotonic() + 10
    while path.exists() and path.read_text().split()[2] != "Z" and time.monotonic() < end:
        time.sleep(0.05)
    assert not path.exists() or path.read_text().split()[2] == "Z"


def test_a_measurement_continues_and_other_steps_do_not() -> None:
    for step in [step for phases in commands(Target(Path("out"))) for phase in phases for step in phase]:
        assert bool(step.restarts) == step.name.startswith("measure") == ("--continue" in step.command)


# ------------------------------------------------------------------------------------------------------------ interrupt


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_is_there(
    which: signal.Signals, root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measured = {"launcher": "softmax", "bare_us": 2.0, "launcher_us": 1.0, "device": "GPU", "torch": "2",
                "triton": "3", "commit": "f" * 40}  # fmt: skip
    writes = f"open('build/gpu-dry/results/launch.jsonl', 'w').write({json.dumps(measured) + chr(10)!r} + '{{')"
    steps = [
        [python("first", writes)],
        [python("hangs", "import time; print('began', flush=True); time.sleep(60)", 50.0)],
        [python("last", "")],
    ]
    monkeypatch.setattr(program, "commands", lambda target: [steps, [], [[python("next", "")]]])
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry", "--out", str(root / "out")])

    def interrupt() -> None:
        log = log_of(root / "build" / "gpu-dry" / "logs", "hangs")
        while not (log.exists() and log.read_text()):
            time.sleep(0.05)
        summaries.append((root / "out" / "summary.md").read_text())
        os.kill(os.getpid(), which)

    summaries: list[str] = []
    before = signal.getsignal(which)
    thread = threading.Thread(target=interrupt)
    thread.start()
    start = time.monotonic()
    assert program.main() == 130
    thread.join()
    assert time.monotonic() - start < 30
    assert signal.getsignal(which) == before
    assert "| first | passed |" in summaries[0]  # before the end, for a run that is ended by force
    summary = (root / "out" / "summary.md").read_text()
    assert "| first | passed |" in summary
    assert "| hangs | stopped |" in summary
    assert "| interrupted |" in summary
    assert "| last | skipped | 0.0 | interrupted |" in summary
    assert "| next | skipped | 0.0 | interrupted |" in summary  # of a command after it
    assert "| softmax | 2.00 | 1.00 | 0.50 |" in summary
    assert "hangs" in capfd.readouterr().out


# ---------------------------------------------------------------------------------------------------------- the folders


def test_a_folder_that_cannot_be_written_is_reported_before_the_steps(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "file").write_text("")
    monkeypatch.setattr(program, "commands", lambda target: pytest.fail("a step would run"))
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry", "--out", str(root / "file" / "out")])
    assert program.main() == 2
    text = capsys.readouterr().out
    assert "expected folders to write to; to fix: " in text
    assert str(root / "file" / "out") in text


def test_a_folder_without_wheels_is_reported(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "--dry", "--wheels", str(root)])
    with pytest.raises(SystemExit):
        program.main()
    assert "without a .whl file" in capsys.readouterr().err


def test_a_wheel_that_cannot_be_read_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken-1-py3-none-any.whl").write_bytes(b"half of it")
    with zipfile.ZipFile(tmp_path / "peer-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer.py", "")
    python_path(tmp_path / "work", tmp_path)
    assert (tmp_path / "work" / "wheels" / "peer.py").exists()
    assert "left out: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("exec sleep 60", "no answer of the driver"),
        ("echo Traceback >&2\necho 'RuntimeError: The NVIDIA driver is too old' >&2\nexit 1", "driver is too old"),
    ],
    ids=["no answer", "too old"],
)
def test_a_driver_that_fails_is_no_gpu(
    script: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setattr(program, "_GPU_SECONDS", 0.2 if "sleep" in script else program._GPU_SECONDS)
    assert program._gpu(dict(os.environ)) is None
    assert shown in capsys.readouterr().out
