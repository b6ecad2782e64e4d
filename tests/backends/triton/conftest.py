"""Fixtures of the tests of the triton backend. Without triton the tests are skipped, so imports are in the fixtures."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiled_facts import compiled_facts, compiler, wanted
from fork_server import ForkServer
from repository import ROOT


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Give each test the same random numbers."""
    torch.manual_seed(20240607)


@pytest.fixture(scope="session")
def compilations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A process that compiles. All of a run have one cache of Triton: several files compile the same kernel."""
    base = tmp_path_factory.getbasetemp()
    server = compiler((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compilations")
    yield server
    server.close()


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, compilations: ForkServer) -> dict[str, dict[str, Any]]:
    """Facts of the compiled kernel of each of the module's ``CASES``, by its name."""
    cases = wanted(request.module.CASES, request)
    return dict(zip(cases, compiled_facts([*cases.values()], compilations), strict=True))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sum in several parts of several steps each over some 50 rows, as long tensors do."""
    from fusedops_triton.launch import launcher, settings

    launcher.clear_layout_caches()
    monkeypatch.setattr(settings, "MAX_ROWS", 4)
    yield
    launcher.clear_layout_caches()


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Counts the bytes that kernels load and store in the interpreter."""
    from triton_traffic import counted  # needs triton

    return counted(monkeypatch)


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """A process that has imported torch, triton and the backend, for kernels that are not interpreted."""
    path = [str(ROOT), *sys.path]
    preload = f"import sys; sys.path[:0] = {path!r}; import torch, triton, fusedops_triton.softmax._softmax"
    server = ForkServer(preload, {"TRITON_INTERPRET": "0"})
    yield server
    server.close()


@pytest.fixture
def program(server: ForkServer, tmp_path: pathlib.Path) -> Callable[[str], Any]:
    """Run a program in a process where kernels are not interpreted; return what it prints, read as JSON."""
    return lambda code: server.run(code, TRITON_CACHE_DIR=str(tmp_path))
