"""The spec and the patch of Megatron on two processes: tensor parallel and sequence parallel."""

from __future__ import annotations

import megatron_peer
import pytest
import torch
from ranks import run_on
from ranks_megatron import CHECKS, RANKS, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    megatron_peer.modules()  # or the tests are skipped
    return run_on(RANKS, tmp_path_factory.mktemp("ranks"), run)


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_equal_megatrons_own(name: str, results: dict[str, list[str]]) -> None:
    assert results[name] == ["", ""], "\n".join(results[name])
