"""Broken and absent installations of torch_npu, each with its own reason."""

from __future__ import annotations

import shutil
from types import ModuleType

import pytest
import torch
from ascend import probe_again
from standin import absent, broken, no_device
from state import problems

import fusedops
import fusedops_npu
from fusedops.__main__ import main

HERE = torch.__version__.partition("+")[0]

NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"

STATES = [
    # what import raises, torch_npu's version, CUDA's version, and of the answer: why, the cure
    pytest.param(None, "", None, "torch_npu is not installed", "pip install", id="absent"),
    pytest.param(
        ImportError(NO_CANN), f"{HERE}.post2", None, "CANN's libhccl.so is not found", "install CANN", id="no CANN"
    ),
    pytest.param(
        RuntimeError("undefined symbol"), HERE, "12.8", "beside a CUDA build of torch", "CPU build of torch", id="CUDA"
    ),
    pytest.param(
        ImportError(NO_CANN), "2.1.0.post17", None, f"2.1.0.post17 is for torch 2.1.0, and this is torch {HERE}",
        "install torch 2.1.0, or the torch_npu for torch", id="another torch",
    ),
    pytest.param(
        RuntimeError("out of luck"), HERE, None, "import torch_npu raised RuntimeError: out of luck", "set_env.sh",
        id="unknown",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("raised", "version", "cuda", "why", "fix"), STATES)
def test_each_broken_installation_has_its_own_reason(
    raised: Exception | None,
    version: str,
    cuda: str | None,
    why: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fusedops_npu, "_version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "npu-smi" else None)
    with absent() if raised is None else broken(raised):
        probe_again("npu")
        info = next(info for info in fusedops.backends() if info.name == "npu")
        (problem,) = [problem for problem in problems() if "npu" in problem.what]
    probe_again("npu")
    assert info.state == "unavailable"
    assert why in info.why
    assert fix in info.fix
    assert info.why in problem.what
    assert problem.fix == info.fix
    others = [case.values[3] for case in STATES if case.values[3] != why]
    assert not any(other in info.why for other in others)


def test_no_device_has_its_own_reason(
    torch_npu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "npu-smi" else None)
    with no_device():
        probe_again("npu")
        info = next(info for info in fusedops.backends() if info.name == "npu")
        assert main(["doctor"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert info.state == "unavailable"
    assert "it finds no device" in info.why
    assert "npu-smi info" in info.fix
    assert info.why in output
    assert info.fix in output
