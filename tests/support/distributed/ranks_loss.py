"""Checks of cross_entropy on every rank: sharded rows and sharded classes against the whole, and what is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import BACKENDS, check, counted
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

import fusedops

CLASSES = 11  # neither 2 nor 4 processes share them out evenly


def compare(mesh: DeviceMesh, placements: list[Placement], backend: str, **options: Any) -> dict[str, int]:
    """Compare a call on DTensors with the whole, and return what is sent."""
    logits, target = torch.randn(3, 4, CLASSES) * 3, torch.randint(CLASSES, (3, 4))
    target[0, 1] = target[2, 2] = -100
    leaf = logits.clone().requires_grad_()
    loss = fusedops.cross_entropy(leaf, target, **options)
    grad = torch.arange(1.0, loss.numel() + 1).view(loss.shape)
    loss.backward(grad)
    of_rows = [each if isinstance(each, Shard) and each.dim < 2 else Replicate() for each in placements]
    cut = distribute_tensor(logits, mesh, placements).requires_grad_()
    parts = distribute_tensor(target, mesh, of_rows)
    cut_grad = distribute_tensor(grad, mesh, of_rows if loss.dim() else [Replicate()] * mesh.ndim)
    with CommDebugMode() as sent:
        found = fusedops.cross_entropy(cut, parts, backend=backend, **options)
        found.backward(cut_grad)
    what = f"{placements} {backend} {options}"
    assert list(found.placements) == (of_rows if loss.dim() else [Replicate()] * mesh.ndim), what
    assert list(cut.grad.placements) == placements, what
    torch.testing.assert_close(found.full_tensor(), loss.detach(), rtol=2e-6, atol=2e-6, msg=lambda m: f"{what}: {m}")
    torch.testing.assert_close(cut.grad.full_tensor(), leaf.grad, rtol=1e-5, atol=1e-6, msg=lambda m: f"{what}: {m}")
    return counted(sent)


@check
def a_loss_of_cut_rows_or_classes_is_that_of_the_whole(mesh: DeviceMesh) -> None:
    """Every reduction with each of the options in turn, over rows, over classes, and over both."""
    ways: list[tuple[DeviceMesh, list[Placement]]] = [(mesh, [Shard(dim)]) for dim in range(3)]
    if mesh.size() == 4:
        square = init_device_mesh("cpu", (2, 2))
        ways += [(square, [Shard(a), Shard(b)]) for a, b in ((0, 2), (2, 0), (0, 1), (2, 2))]
    options = ({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 4.0})
    for turn, (on, placements) in enumerate(ways):
        for place, reduction in enumerate(("mean", "sum", "none")):
            compare(on, placements, "eager", reduction=reduction, **options[(turn + place) % len(options)])
    for backend in BACKENDS:
        compare(mesh, [Shard(0)], backend, denominator=7.0)


@check
def what_a_loss_sends(mesh: DeviceMesh) -> None:
    """No logits: all-reduces of one number, or of a few for each row."""
    assert compare(mesh, [Shard(0)], "eager", reduction="none") == {}
    assert compare(mesh, [Shard(0)], "eager", reduction="sum") == {"all_reduce": 1}
    # the sum and the count; backward counts again
    assert compare(mesh, [Shard(0)], "eager") == {"all_reduce": 3}
    assert compare(mesh, [Shard(0)], "eager", denominator=5.0) == {"all_reduce": 1}
    assert compare(mesh, [Shard(2)], "eager", label_smoothing=0.1) == {"all_reduce": 2}


@check
def a_loss_of_cut_classes_refuses_what_the_whole_refuses(mesh: DeviceMesh) -> None:
    logits = distribute_tensor(torch.randn(3, CLASSES), mesh, [Shard(1)])
    target = distribute_tensor(torch.tensor([0, CLASSES, 1]), mesh, [Replicate()])
    text = rf"got target {CLASSES}, expected one in \[0, {CLASSES}\)"
    with pytest.raises(fusedops.InvalidInputError, match=text):
        fusedops.cross_entropy(logits, target)


@check
def a_loss_of_ignored_rows_alone_is_0_on_every_rank(mesh: DeviceMesh) -> None:
    for dim in range(2):
        logits = distribute_tensor(torch.randn(4, CLASSES), mesh, [Shard(dim)]).requires_grad_()
        placement = Shard(0) if dim == 0 else Replicate()
        target = distribute_tensor(torch.full((4,), -100), mesh, [placement])
        loss = fusedops.cross_entropy(logits, target, label_smoothing=0.1)
        loss.backward()
        assert loss.full_tensor() == 0
        assert not logits.grad.full_tensor().any()


@check
def a_vocabulary_over_ranks_trains_as_torchs(mesh: DeviceMesh) -> None:
    """A head whose weight is cut by classes has cut logits; the gradient of the weight is that of the whole."""
    x, weight, target = torch.randn(6, 8), torch.randn(CLASSES, 8), torch.randint(CLASSES, (6,))
    whole = weight.clone().requires_grad_()
    functional.cross_entropy(x @ whole.T, target).backward()
    head = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    rows = distribute_tensor(x, mesh, [Replicate()])
    loss = fusedops.cross_entropy(rows @ head.T, distribute_tensor(target, mesh, [Replicate()]))
    loss.backward()
    torch.testing.assert_close(head.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-6)
