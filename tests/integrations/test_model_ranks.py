"""Models of transformers and layers of Megatron with fusedops on two processes.

Of transformers: FSDP2 and tensor parallel, before and after apply. Of Megatron: the spec and the patch, tensor parallel
and sequence parallel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import megatron_peer
import model_ranks
import pytest
import ranks_megatron
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="needs gloo"
    ),
]
CHECKS = [(module, name) for module in (model_ranks, ranks_megatron) for name in module.CHECKS]


RUN = """
import json, pathlib
import megatron_peer, ranks, {module}
if {module}.__name__ == "ranks_megatron":
    megatron_peer.modules()  # imported once, before the ranks are forked
print(json.dumps(ranks.run_on(2, pathlib.Path({folder!r}), {module}.run, start="fork")))
"""


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, python: Callable[..., dict[str, list[str]]]
) -> Callable[[ModuleType], dict[str, list[str]]]:
    """Return the errors of the checks of a module on each rank; each module is run once."""
    seen: dict[ModuleType, dict[str, list[str]]] = {}

    def look(module: ModuleType) -> dict[str, list[str]]:
        if module is ranks_megatron:
            megatron_peer.modules()  # or the tests are skipped
        if module not in seen:
            code = RUN.format(module=module.__name__, folder=str(tmp_path_factory.mktemp("ranks")))
            seen[module] = python(code, *sys.path, TRITON_INTERPRET="1")
        return seen[module]

    return look


@pytest.mark.parametrize(("module", "name"), CHECKS, ids=[name for _, name in CHECKS])
def test_two_ranks_equal_one_process_or_megatrons_own(
    module: ModuleType, name: str, results: Callable[..., Any]
) -> None:
    assert results(module)[name] == ["", ""], "\n".join(results(module)[name])
