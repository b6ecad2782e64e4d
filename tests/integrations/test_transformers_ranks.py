"""Models of transformers with fusedops on two processes: FSDP2 and tensor parallel, before and after apply."""

from __future__ import annotations

import pytest
import torch
from model_ranks import CHECKS, run
from ranks import run_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_on(2, tmp_path_factory.mktemp("ranks"), run)


@pytest.mark.parametrize("name", CHECKS)
def test_the_losses_are_those_of_one_process(name: str, results: dict[str, list[str]]) -> None:
    assert results[name] == ["", ""], "\n".join(results[name])
