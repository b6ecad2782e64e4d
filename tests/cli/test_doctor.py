"""fusedops doctor: each problem and note, and its fix."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from command_line import flat, run
from state import problems

import fusedops
from fusedops._report import threads

pytestmark = pytest.mark.usefixtures("fakes")  # no other backends than the project's own


@pytest.fixture(autouse=True)
def no_thread_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine that would be one note more."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def report(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, str]]]:
    code, output = run("doctor", "--json", capsys=capsys)
    return code, json.loads(output)


def test_no_problem_on_a_plain_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("doctor", capsys=capsys)
    assert code == 0
    assert "no problems; ready here: eager" in flat(output)


def test_unknown_variables_and_bad_policies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEDOPS_BACKENDS", "eager")
    monkeypatch.setenv("FUSEDOPS_BACKEND", "tritn")
    code, output = run("doctor", capsys=capsys)
    assert code == 1
    text = flat(output)
    assert "got variable 'FUSEDOPS_BACKENDS'" in text
    assert "unset FUSEDOPS_BACKENDS, or write 'FUSEDOPS_BACKEND'" in text
    assert "got backend 'tritn'" in text
    assert "write 'triton'" in text
    assert "2 problems" in text


def test_a_device_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "nvidia-smi" else None)
    monkeypatch.setattr(torch.version, "cuda", None)
    (problem,) = problems()
    cpu_build = f"nvidia-smi is here, but torch sees no cuda device: torch {torch.__version__} is a CPU build"
    assert problem.what == cpu_build
    assert problem.fix == "install a CUDA or ROCm build of torch"
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "npu-smi" else None)
    (problem,) = problems()
    assert "npu-smi is here" in problem.what
    assert "backend npu cannot serve it: torch_npu is not installed" in problem.what
    assert "pip install" in problem.fix


def unavailable(name: str, *device_types: str) -> None:
    result = fusedops.Unavailable(f"lib{name}.so is not built", f"build lib{name}")
    fusedops.register(fusedops.Backend(name, device_types, 50, (), probe=lambda: result))


def test_an_unavailable_backend_beside_a_ready_one_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    unavailable("compiled", "cpu")  # eager, which serves every device, is enough on a CPU
    code, findings = report(capsys)
    assert code == 0
    (note,) = [finding for finding in findings if "compiled" in finding["what"]]
    assert note["level"] == "note"
    assert note["what"].endswith("and backend compiled cannot serve it: libcompiled.so is not built")
    assert note["fix"] == "build libcompiled"
    code, output = run("doctor", capsys=capsys)
    assert code == 0
    assert "note" in output


@pytest.mark.parametrize(
    ("packages", "level"), [(("torch", "no-such-package"), None), (("torch",), "note"), ((), "note")]
)
def test_an_unavailable_optional_backend_is_a_note_unless_its_package_is_not_installed(
    packages: tuple[str, ...], level: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fusedops.Unavailable("libfaster.so is not built", "build it")
    fusedops.register(
        fusedops.Backend("faster", ("cpu",), 50, (), probe=lambda: result, optional=True, packages=packages)
    )
    found = [finding for finding in report(capsys)[1] if "faster" in finding["what"]]
    assert [finding["level"] for finding in found] == ([level] if level else [])
    assert all(finding["fix"] == "build it" for finding in found)


def test_threads_that_spin_on_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    for load, variable, expected in ((14.0, "", 1), (0.5, "", 0), (14.0, "passive", 0)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        monkeypatch.setenv("OMP_WAIT_POLICY", variable)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        found = [each for each in report(capsys)[1] if "spin" in each["what"]]
        assert len(found) == expected, (load, variable)
        assert all(each["fix"] == "set OMP_WAIT_POLICY=passive before Python starts" for each in found)


def test_an_accelerator_with_eager_alone_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unavailable("vendor", "npu")
    monkeypatch.setattr(torch.npu, "is_available", lambda: True)
    monkeypatch.setattr("fusedops._cli.doctor.devices", lambda: {"cpu": ["x86"], "npu": ["Ascend910B"]})
    code, findings = report(capsys)
    assert code == 1
    (problem,) = [finding for finding in findings if "vendor" in finding["what"]]
    assert problem["level"] == "problem"
    assert problem["what"].startswith("torch sees Ascend910B, and backend vendor cannot serve it")
    fusedops.register(fusedops.Backend("second", ("npu",), 40, ()))
    _, findings = report(capsys)
    assert {finding["level"] for finding in findings if "vendor" in finding["what"]} == {"note"}


def test_a_broken_plugin(rediscovered: Any, distribution: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = "raise OSError('libvendor.so: cannot open shared object file')"
    rediscovered(distribution("brokenlib", {"broken": "broken_backend"}, broken_backend=source))
    code, output = run("doctor", capsys=capsys)
    assert code == 1
    text = flat(output)
    assert "backend broken of brokenlib failed: OSError: libvendor.so" in text
    assert "correct broken, or uninstall brokenlib" in text


def test_a_disabled_plugin_and_an_unknown_one(
    rediscovered: Any, distribution: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEDOPS_PLUGINS", "eager,tritn,quite_another")
    rediscovered(distribution("vendorlib", {"vendor": "vendor_backend"}, vendor_backend=""))
    code, findings = report(capsys)
    assert code == 1
    by_level = {level: [f for f in findings if f["level"] == level] for level in ("problem", "note")}
    disabled = [note for note in by_level["note"] if "plugin vendor is disabled" in note["what"]]
    assert "vendorlib is not in FUSEDOPS_PLUGINS" in disabled[0]["what"]
    assert "add vendor to FUSEDOPS_PLUGINS, or unset it" in disabled[0]["fix"]
    unknown = [p for p in by_level["problem"] if p["what"].startswith("FUSEDOPS_PLUGINS: got plugin")]
    assert [problem["fix"] for problem in unknown] == ["write 'triton'", "use one of these names"]


@pytest.mark.parametrize(
    ("threads", "processes", "fix"),
    [(5, "", "OMP_NUM_THREADS=4"), (2, "4", "OMP_NUM_THREADS=1"), (4, "", None), (1, "4", None), (4, "junk", None)],
)
def test_more_threads_than_cores(
    threads: int, processes: str, fix: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    code, findings = report(capsys)
    assert code == 0
    notes = [finding for finding in findings if "threads" in finding["what"]]
    assert len(notes) == (fix is not None)
    if fix is not None:
        assert fix in notes[0]["fix"]
        assert "OMP_WAIT_POLICY=passive" in notes[0]["fix"]


@pytest.mark.parametrize(
    ("quota", "fix"),
    [("150000 100000", "OMP_NUM_THREADS=1"), ("max 100000", None), ("400000 100000", None), ("", None)],
)
def test_the_quota_of_a_container_counts(
    quota: str, fix: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    _, findings = report(capsys)
    fixes = [finding["fix"] for finding in findings if "threads" in finding["what"]]
    assert len(fixes) == (fix is not None)
    assert all(str(fix) in text for text in fixes)


@pytest.mark.parametrize(("tool", "level"), [(None, "note"), ("nvidia-smi", None)])
def test_a_cuda_build_without_a_gpu(
    tool: str | None, level: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == tool else None)
    _, findings = report(capsys)
    assert [f["level"] for f in findings if "has no GPU" in f["what"]] == ([level] if level else [])


def test_an_old_driver(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."
    is_available: Callable[[], bool] = lambda: bool(__import__("warnings").warn(text, stacklevel=2))  # noqa: E731
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    code, findings = report(capsys)
    assert code == 1
    (problem,) = [finding for finding in findings if "too old" in finding["what"]]
    assert problem["fix"] == "install a newer driver, or a torch for CUDA below 13.0"
