"""Fixtures of the tests in this folder."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers(one_thread: None) -> None:
    """Give each test the same random numbers."""
    torch.manual_seed(0)
