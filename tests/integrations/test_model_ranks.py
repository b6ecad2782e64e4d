"""Models of transformers and layers of Megatron with fusedops on two processes.

Of transformers: FSDP2 and tensor parallel, before and after apply. Of Megatron: the spec and the patch, tensor parallel
and sequence parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import megatron_peer
import model_ranks
import pytest
import ranks_megatron
import torch
from ranks import run_on

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
    ),
]
CHECKS = [(module, name) for module in (model_ranks, ranks_megatron) for name in module.CHECKS]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModuleType], dict[str, list[str]]]:
    """Return the errors of the checks of a module on each rank; each module is run once."""
    seen: dict[ModuleType, dict[str, list[str]]] = {}

    def look(module: ModuleType) -> dict[str, list[str]]:
        if module is ranks_megatron:
            megatron_peer.modules()  # or the tests are skipped
        if module not in seen:
            seen[module] = run_on(2, tmp_path_factory.mktemp("ranks"), module.run)
        return seen[module]

    return look


@pytest.mark.parametrize(("module", "name"), CHECKS, ids=[name for _, name in CHECKS])
def test_two_ranks_equal_one_process_or_megatrons_own(
    module: ModuleType, name: str, results: Callable[..., Any]
) -> None:
    assert results(module)[name] == ["", ""], "\n".join(results(module)[name])
