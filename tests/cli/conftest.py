"""The machine of the command line's tests: without an Ascend device, in a terminal of 80 columns."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the stand-in for an Ascend device, which is there in all tests, and the settings of this terminal."""
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
