"""The page of attention has the table of the constraints; its benchmark runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from repository import DOCS, ROOT

import fusedops


@pytest.fixture(scope="module")
def page() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_attention", DOCS / "make_attention.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_of_the_constraints(page: ModuleType) -> None:
    text = (DOCS / "attention.md").read_text("utf-8")
    table = text.partition(page.BEGIN)[2].partition(page.END)[0]
    assert table == f"\n{page.table()}\n", "run `make docs`"


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_the_table_is_what_a_call_gets(page: ModuleType, name: str) -> None:
    """Each row beside explain, on the CPU, where both backends are ready."""
    kernels = _kernels(page, name)
    seen = set()
    for what, call in page.CALLS.items():
        cell = page.cell(kernels, "cpu", call)
        with fusedops.use(name):
            q, k, v, mask, scale, causal, window, return_lse = page.arguments("cpu", call)
            options = {"causal": causal, "window": window, "return_lse": return_lse}
            decision = fusedops.explain("attention", q, k, v, mask, scale, **options)
        served = [decision.backend == name, decision.backward == name]
        assert cell == {(True, True): "yes", (True, False): "forward"}.get(tuple(served), "no"), what
        seen.add(cell)
    assert seen == ({"yes"} if name == "eager" else {"yes", "forward", "no"})


def _kernels(page: ModuleType, name: str) -> list[fusedops.Kernel]:
    (record,) = (record for record in page.registry.records() if record.name == name)
    return [kernel for kernel in record.backend.kernels if kernel.op == "attention" and kernel.serves("cpu")]


def test_the_benchmark_runs() -> None:
    command = [sys.executable, "-m", "benchmarks.attention", "--shape", "1", "2", "64", "32", "--turns", "1"]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + 3 * 2 * 2 + 1  # the forms, two dtypes, two directions; choosing
    assert lines[-1].startswith("choosing [2, 2, 4, 8]: fusedops ")
    assert torch.__version__ in lines[0]
