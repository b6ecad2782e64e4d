"""Fixtures of the tests in this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import megatron_layers
import megatron_peer
import pytest
import torch


@pytest.fixture
def peer() -> Any:
    return megatron_peer.modules()


@pytest.fixture(scope="module")
def job() -> Iterator[None]:
    """Be the one rank of a job of Megatron in all tests of a file."""
    with megatron_layers.job():
        yield


@pytest.fixture
def one_rank(job: None) -> Iterator[None]:
    """Run a test as the one rank of a job of Megatron."""
    with megatron_layers.on_cpu():
        yield


@pytest.fixture
def patch_removed(one_rank: None) -> Iterator[None]:
    """Remove the patch of Megatron after a test."""
    yield
    if "fusedops.integrations.megatron" in sys.modules:
        from fusedops.integrations.megatron._patch import remove

        remove()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No graph of another test is found again."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
