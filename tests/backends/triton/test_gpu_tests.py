"""The tests in tests/gpu where there is no GPU: they accept what differs on one, and find what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from repository import ROOT, SUPPORT_FOLDERS

pytest.importorskip("triton", reason="triton is not installed")
if not (ROOT / "tests" / "gpu").exists():
    pytest.skip("needs tests/gpu, which is not beside the tests here", allow_module_level=True)


def run(planted: str) -> subprocess.CompletedProcess[str]:
    """Run the test of layouts under the interpreter, with a plugin that changes the results of misaligned rows."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-o", "filterwarnings=", "-p", "gpu_reordered"]
    command += [
        "-p",
        "no:cacheprovider",
        "--confcutdir",
        "tests/gpu",
        "tests/gpu/test_gpu.py",
        "-k",
        "any_layout and bfloat16-257",
    ]
    paths = [*map(str, (ROOT, ROOT / "backends", *SUPPORT_FOLDERS)), os.environ.get("PYTHONPATH", "")]
    environ = {
        "GPU_TESTS_ON": "cpu",
        "TRITON_INTERPRET": "1",
        "GPU_PLANTED": planted,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
def test_sums_in_another_order_pass() -> None:
    done = run("reordered")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_a_wrong_result_of_a_misaligned_row_fails() -> None:
    done = run("wrong")
    assert done.returncode == 1, done.stdout
    assert "got softmax beyond the tolerance" in done.stdout
