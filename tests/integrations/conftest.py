"""Fixtures of the tests in this folder."""

from __future__ import annotations

from typing import Any

import megatron_peer
import pytest


@pytest.fixture
def peer() -> Any:
    return megatron_peer.modules()
