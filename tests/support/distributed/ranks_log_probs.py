"""Checks of linear_log_probs on every rank: sharded rows and classes against the whole, and what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import BACKENDS, check
from ranks_linear_loss import CLASS, ROWS, compare, of_ways
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fusedops


def compare_log_probs(mesh: DeviceMesh, ways: list[Any], backend: str, **options: Any) -> dict[str, int]:
    """Compare a call with a class that is left out, as ``compare`` does that of the loss."""
    return compare(mesh, ways, backend, fusedops.linear_log_probs, **options)


@check
def log_probs_of_cut_rows_or_classes_are_those_of_the_whole(mesh: DeviceMesh) -> None:
    """Each option in turn; on four ranks also rows and classes at once."""
    options: tuple[dict[str, Any], ...] = (
        {},
        {"return_entropy": True, "temperature": 0.7},
        {"return_entropy": True, "temperature": 1.3, "softcap": 4.0},
    )
    for turn, (on, way) in enumerate(of_ways(mesh)):
        for place in range(2):
            compare_log_probs(on, way, "eager", **options[(turn + place) % len(options)])
    for backend in BACKENDS:
        compare_log_probs(mesh, [ROWS[0]], backend, return_entropy=True)


@check
def what_log_probs_send(mesh: DeviceMesh) -> None:
    """Rows: nothing. Classes: a maximum, then two or three sums of each row; backward nothing."""
    assert compare_log_probs(mesh, [Shard(0)], "eager", return_entropy=True) == {}
    assert compare_log_probs(mesh, [CLASS], "eager", return_entropy=True) == {"all_reduce": 2}


@check
def log_probs_with_few_classes_and_wrong_targets(mesh: DeviceMesh) -> None:
    """A rank without a class, in 16 bits, with one gradient; and a target that no rank has."""
    x, weight = torch.randn(4, 6).bfloat16(), torch.randn(mesh.size() - 1, 6).bfloat16()
    target = torch.zeros(4, dtype=torch.int64)
    whole = [x.clone(), weight.clone().requires_grad_()]
    fusedops.linear_log_probs(*whole, target, return_entropy=True)[1].sum().backward()
    nowhere, classes = [Replicate()], [Shard(0)]
    cut = [distribute_tensor(x, mesh, nowhere), distribute_tensor(weight, mesh, classes).requires_grad_()]
    found = fusedops.linear_log_probs(*cut, distribute_tensor(target, mesh, nowhere), return_entropy=True)[1]
    found.sum().backward()
    torch.testing.assert_close(cut[1].grad.full_tensor(), whole[1].grad, rtol=2e-2, atol=2e-2)
    wrong = distribute_tensor(target + mesh.size(), mesh, nowhere)
    with pytest.raises(fusedops.InvalidInputError, match=rf"linear_log_probs: got target {mesh.size()}, expected one"):
        fusedops.linear_log_probs(*cut, wrong)
