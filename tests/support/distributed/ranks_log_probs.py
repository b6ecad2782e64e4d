"""Checks of linear_log_probs on every rank: sharded rows and classes against the whole, and what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import BACKENDS, check, counted
from ranks_linear_loss import CLASS, CLASSES, ROWS, Way, placed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fusedops


def compare_log_probs(mesh: DeviceMesh, ways: list[Any], backend: str, **options: Any) -> dict[str, int]:
    """Compare a call on DTensors with the whole, forward and backward, and return what is sent."""
    x, target = torch.randn(3, 4, 6), torch.randint(CLASSES, (3, 4))
    target[0, 1] = target[2, 2] = -100
    weight, bias = torch.randn(CLASSES, 6), torch.randn(CLASSES)
    bias[-1] = -torch.inf  # a class that is left out: on the last rank
    whole = [each.clone().requires_grad_() for each in (x, weight, bias)]
    entropy = options.get("return_entropy", False)
    results = fusedops.linear_log_probs(whole[0], whole[1], target.clamp(max=CLASSES - 2), whole[2], **options)
    results = results if entropy else (results,)
    grads = [torch.randn(3, 4) for _ in results]
    torch.autograd.backward(results, grads)
    of_rows, of_classes = placed(ways, True, False), placed(ways, False, True)
    places = (of_rows, of_classes, of_classes)
    cut = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip((x, weight, bias), places)]
    cut_grads = [distribute_tensor(grad, mesh, of_rows) for grad in grads]
    parts = distribute_tensor(target.clamp(max=CLASSES - 2), mesh, of_rows)
    with CommDebugMode() as sent:
        found = fusedops.linear_log_probs(cut[0], cut[1], parts, cut[2], backend=backend, **options)
        found = found if entropy else (found,)
        torch.autograd.backward(found, cut_grads)
    what = f"{ways} {backend} {options}"
    for mine, theirs in zip(found, results):
        assert list(mine.placements) == of_rows, what
        torch.testing.assert_close(
            mine.full_tensor(), theirs.detach(), rtol=5e-6, atol=5e-6, msg=lambda m: f"{what}: {m}"
        )
    of_x = [Partial() if way == CLASS else way for way in ways]
    of_weight = [Shard(0) if way == CLASS else Partial() for way in ways]
    for name, mine, theirs, placements in zip(("x", "weight", "bias"), cut, whole, (of_x, of_weight, of_weight)):
        assert list(mine.grad.placements) == placements, f"{what}: {name}"
        error = f"{what}: {name}: "
        torch.testing.assert_close(
            mine.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5, msg=lambda m, error=error: error + m
        )
    return counted(sent)


@check
def log_probs_of_cut_rows_or_classes_are_those_of_the_whole(mesh: DeviceMesh) -> None:
    """Each option in turn; on four ranks also rows and classes at once."""
    ways: list[tuple[DeviceMesh, list[Way]]] = [(mesh, [way]) for way in (*ROWS, CLASS)]
    if mesh.size() == 4:
        square = init_device_mesh("cpu", (2, 2))
        ways += [(square, [a, b]) for a, b in ((ROWS[0], CLASS), (CLASS, CLASS))]
    options: tuple[dict[str, Any], ...] = (
        {},
        {"return_entropy": True, "temperature": 0.7},
        {"return_entropy": True, "temperature": 1.3, "softcap": 4.0},
    )
    for turn, (on, way) in enumerate(ways):
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
