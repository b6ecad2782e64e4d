"""verify keeps no tensor of a call alive once its block and its report are gone."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops


@pytest.fixture
def relu(fakes: Any) -> None:
    @fusedops.kernel("bias_gelu")
    def relu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        return torch.relu(x)

    fusedops.register(fusedops.Backend("relu", ("cpu",), -5, (relu,)))


@pytest.mark.usefixtures("relu")
@pytest.mark.parametrize("backend", ["eager", "relu"], ids=["right", "wrong"])
@pytest.mark.filterwarnings("ignore::fusedops.FusedOpsWarning")
def test_the_tensors_of_a_block_are_freed(backend: str) -> None:
    alive: list[weakref.ref[Tensor]] = []
    for _ in range(20):
        x = torch.randn(8)
        alive.append(weakref.ref(x))
        with fusedops.verify("reference", raise_on_mismatch=False) as report, fusedops.use(backend):
            y = fusedops.bias_gelu(x)
        assert (report.mismatches > 0) == (backend == "relu")
        alive.append(weakref.ref(y))
        del x, y, report
    gc.collect()
    assert sum(each() is not None for each in alive) == 0
