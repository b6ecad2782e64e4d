"""Fixtures of the tests in this folder."""

from __future__ import annotations

import pytest
import torch

from fusedops_eager import _slabs
from fusedops_eager.bias import _gelu
from fusedops_eager.norms import _norms


@pytest.fixture(params=["one slab", "tiny slabs"])
def slabs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of 64 elements cross every boundary at sizes that a test can afford."""
    monkeypatch.setattr(_gelu, "_MIN_SLAB_ELEMENTS", 0)
    monkeypatch.setattr(_norms, "_MIN_SLAB_ELEMENTS", 0)
    if request.param == "tiny slabs":
        monkeypatch.setattr(_slabs, "SLAB", 64)


@pytest.fixture(autouse=True)
def same_numbers(one_thread: None) -> None:
    """Give each test the same random numbers."""
    torch.manual_seed(0)
