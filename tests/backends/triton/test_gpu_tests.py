"""The tests in tests/gpu where there is no GPU: they accept what differs on one, and find what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fork_server import ForkServer
from repository import ROOT, SUPPORT_FOLDERS

pytest.importorskip("triton", reason="triton is not installed")
if not (ROOT / "tests" / "gpu").exists():
    pytest.skip("needs tests/gpu, which is not beside the tests here", allow_module_level=True)


@pytest.fixture
def run(forks_with_torch: Callable[[], ForkServer]) -> Callable[[str], Any]:
    """Run the test of layouts under the interpreter, with a plugin that changes the results of misaligned rows."""
    command = ["-m", "pytest", "-q", "-o", "addopts=", "-o", "filterwarnings=", "-p", "gpu_reordered"]
    command += ["-p", "no:cacheprovider", "--confcutdir", "tests/gpu", "tests/gpu/test_gpu.py"]
    command += ["-k", "any_layout and bfloat16-257"]
    environ = {"GPU_TESTS_ON": "cpu", "TRITON_INTERPRET": "1"}
    path = [ROOT, ROOT / "backends", *SUPPORT_FOLDERS]
    return lambda planted: forks_with_torch().program(*command, path=path, folder=ROOT, GPU_PLANTED=planted, **environ)


@pytest.mark.slow
def test_sums_in_another_order_pass(run: Callable[[str], Any]) -> None:
    done = run("reordered")
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.slow
def test_a_wrong_result_of_a_misaligned_row_fails(run: Callable[[str], Any]) -> None:
    done = run("wrong")
    assert done.returncode == 1, done.stdout
    assert "got softmax beyond the tolerance" in done.stdout
