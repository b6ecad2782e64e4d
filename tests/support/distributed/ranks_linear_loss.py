"""Checks of linear_cross_entropy on every rank: sharded rows and classes against the whole, and what is sent."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from ranks import BACKENDS, check, counted, refused
from state import forget_warnings
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fusedops

CLASSES = 11  # neither 2 nor 4 processes share them out evenly
ROWS, CLASS = (Shard(0), Shard(1)), "classes"
Way = Placement | str  # of the rows, or CLASS


def placed(ways: list[Any], rows: bool, classes: bool) -> list[Placement]:
    """Return the placements of a tensor whose leading dims are those of the rows, or whose first one are classes."""
    return [(Shard(0) if classes else Replicate()) if way == CLASS else way if rows else Replicate() for way in ways]


def compare(
    mesh: DeviceMesh, ways: list[Any], backend: str, op: Any = fusedops.linear_cross_entropy, **options: Any
) -> dict[str, int]:
    """Compare a call on DTensors with the whole, forward and backward, and return what is sent."""
    x, target = torch.randn(3, 4, 6), torch.randint(CLASSES - 1, (3, 4))
    target[0, 1] = target[2, 2] = -100
    weight, bias = torch.randn(CLASSES, 6), torch.randn(CLASSES)
    if op is fusedops.linear_log_probs:
        bias[-1] = -torch.inf  # a class that is left out: on the last rank, and no target
    whole = [each.clone().requires_grad_() for each in (x, weight, bias)]
    results = _each(op(whole[0], whole[1], target, whole[2], **options))
    grads = [torch.randn(y.shape) for y in results]
    torch.autograd.backward(results, grads)
    of_rows, of_classes = placed(ways, True, False), placed(ways, False, True)
    places = (of_rows, of_classes, of_classes)
    cut = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip((x, weight, bias), places)]
    of_y = of_rows if results[0].dim() else [Replicate()] * mesh.ndim
    cut_grads = [distribute_tensor(grad, mesh, of_y) for grad in grads]
    parts = distribute_tensor(target, mesh, of_rows)
    with CommDebugMode() as sent:
        found = _each(op(cut[0], cut[1], parts, cut[2], backend=backend, **options))
        torch.autograd.backward(found, cut_grads)
    what = f"{ways} {backend} {options}"
    for mine, theirs in zip(found, results, strict=True):
        assert list(mine.placements) == of_y, what
        close(mine, theirs.detach(), what, rtol=5e-6, atol=5e-6)
    of_x = [Partial() if way == CLASS else way for way in ways]
    of_weight = [Shard(0) if way == CLASS else Partial() for way in ways]
    for name, mine, theirs, placements in zip(("x", "weight", "bias"), cut, whole, (of_x, of_weight, of_weight)):
        assert list(mine.grad.placements) == placements, f"{what}: {name}"
        close(mine.grad, theirs.grad, f"{what}: {name}", rtol=1e-5, atol=1e-5)
    return counted(sent)


def close(found: Any, wanted: Tensor, what: str, **tolerances: float) -> None:
    """Assert that a DTensor is near to the whole tensor."""
    torch.testing.assert_close(found.full_tensor(), wanted, msg=lambda text: f"{what}: {text}", **tolerances)


def _each(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def of_ways(mesh: DeviceMesh) -> Iterator[tuple[DeviceMesh, list[Way]]]:
    """Yield the ways to cut rows or classes; of four ranks also both at once."""
    yield from ((mesh, [way]) for way in (*ROWS, CLASS))
    if mesh.size() == 4:
        square = init_device_mesh("cpu", (2, 2))
        yield from ((square, [a, b]) for a, b in ((ROWS[0], CLASS), (CLASS, ROWS[1]), ROWS, (CLASS, CLASS)))


@check
def a_linear_loss_of_cut_rows_or_classes_is_that_of_the_whole(mesh: DeviceMesh) -> None:
    """Every reduction with each of the options in turn, in one chunk and in several."""
    options: tuple[dict[str, Any], ...] = (
        {},
        {"label_smoothing": 0.1, "chunk": 5},
        {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 4.0},
    )
    for turn, (on, way) in enumerate(of_ways(mesh)):
        for place, reduction in enumerate(("mean", "sum", "none")):
            compare(on, way, "eager", reduction=reduction, **options[(turn + place) % len(options)])
    for backend, way in product(BACKENDS, (ROWS[0], CLASS)):
        compare(mesh, [way], backend, denominator=7.0)


@check
def what_a_linear_loss_sends(mesh: DeviceMesh) -> None:
    """Neither x nor logits nor the weight: all-reduces of one number, or of a few for each row."""
    assert compare(mesh, [Shard(0)], "eager", reduction="none") == {}
    assert compare(mesh, [Shard(0)], "eager", reduction="sum") == {"all_reduce": 1}
    assert compare(mesh, [Shard(0)], "eager") == {"all_reduce": 3}  # the sum and the count; backward counts again
    assert compare(mesh, [CLASS], "eager", label_smoothing=0.1) == {"all_reduce": 2}
    assert compare(mesh, [CLASS], "eager", chunk=4) == {"all_reduce": 6}
    # each row has its own gradient: backward computes the chunks again
    assert compare(mesh, [CLASS], "eager", reduction="none") == {"all_reduce": 4}


@check
def a_linear_loss_with_some_gradients(mesh: DeviceMesh) -> None:
    """Only what is wanted has a gradient, also in 16 bits and where a rank has no class."""
    x, weight = torch.randn(4, 6).bfloat16(), torch.randn(mesh.size() - 1, 6).bfloat16()
    target = torch.zeros(4, dtype=torch.int64)
    for wanted, rows in product(range(2), (True, False)):
        whole = [x.clone(), weight.clone()]
        whole[wanted].requires_grad_()
        fusedops.linear_cross_entropy(whole[0], whole[1], target, z_loss=0.1).backward()
        places = ([Shard(0)], [Replicate()]) if rows else ([Replicate()], [Shard(0)])
        cut = [distribute_tensor(t, mesh, p) for t, p in zip((x, weight), places)]
        cut[wanted].requires_grad_()
        fusedops.linear_cross_entropy(*cut, distribute_tensor(target, mesh, places[0]), z_loss=0.1).backward()
        assert cut[1 - wanted].grad is None
        got: Tensor = cut[wanted].grad.full_tensor()
        torch.testing.assert_close(got, whole[wanted].grad, rtol=2e-2, atol=2e-2)


@check
def a_linear_loss_refuses_cut_columns(mesh: DeviceMesh) -> None:
    x, weight, target = torch.randn(4, 8), torch.randn(CLASSES, 8), torch.randint(CLASSES, (4,))
    whole = [Replicate()]
    parts = distribute_tensor(target, mesh, whole)
    for at, name in enumerate(("x", "weight")):
        given = [distribute_tensor(t, mesh, [Shard(1)] if i == at else whole) for i, t in enumerate((x, weight))]
        call = f"linear_cross_entropy: got {name} with Shard(dim=1) on mesh dim 0, expected dim -1 whole on every rank"
        refused(lambda given=given: fusedops.linear_cross_entropy(*given, parts), call)
    both = [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, weight)]
    refused(
        lambda: fusedops.linear_cross_entropy(*both, parts),
        "got weight with [Shard(dim=0)], which would have to be gathered, expected [Replicate()]",
    )
    head = distribute_tensor(weight, mesh, [Shard(0)])
    wrong = distribute_tensor(torch.tensor([0, CLASSES, 1, 2]), mesh, whole)
    with pytest.raises(fusedops.InvalidInputError, match=rf"linear_cross_entropy: got target {CLASSES}, expected one"):
        fusedops.linear_cross_entropy(distribute_tensor(x, mesh, whole), head, wrong)


@check
def a_linear_loss_of_cut_classes_is_a_fallback_that_is_seen(mesh: DeviceMesh) -> None:
    x, target = (distribute_tensor(t, mesh, [Replicate()]) for t in (torch.randn(4, 8), torch.tensor([0, 1, 2, 3])))
    weight = distribute_tensor(torch.randn(CLASSES, 8), mesh, [Shard(0)])
    forget_warnings()
    fusedops.set_policy("triton")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fusedops.linear_cross_entropy(x, weight, target)
    (text,) = [str(w.message) for w in caught if issubclass(w.category, fusedops.FallbackWarning)]
    assert "linear_cross_entropy runs on plain torch, not on triton: got a shard of weight" in text


@check
def a_linear_loss_compiled(mesh: DeviceMesh) -> None:
    """In one graph, with gradients."""
    x, weight, target = torch.randn(4, 6), torch.randn(CLASSES, 6), torch.randint(CLASSES, (4,))
    whole = [each.clone().requires_grad_() for each in (x, weight)]
    loss = fusedops.linear_cross_entropy(*whole, target)
    loss.backward()
    for at in (0, 1):
        places = [[Shard(0)] if at == place else [Replicate()] for place in range(2)]
        cut = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip((x, weight), places)]
        torch._dynamo.reset()
        compiled = torch.compile(fusedops.linear_cross_entropy, backend="aot_eager", fullgraph=True)
        found = compiled(*cut, distribute_tensor(target, mesh, places[0]))
        found.backward()
        torch.testing.assert_close(found.full_tensor(), loss.detach())
        for mine, theirs in zip(cut, whole):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)


@check
def second_derivatives_of_a_linear_loss(mesh: DeviceMesh) -> None:
    """Of x and weight, also by way of the incoming gradient; of cross_entropy after a matmul too."""
    x, weight, target = torch.randn(4, 6).double(), torch.randn(CLASSES, 6).double(), torch.randint(CLASSES, (4,))

    def second(linear: bool, x: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        given = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        if linear:
            loss = fusedops.linear_cross_entropy(*given, target).pow(3)
        else:
            loss = fusedops.cross_entropy(given[0] @ given[1].T, target).pow(3)
        slopes = torch.autograd.grad(loss, given, create_graph=True)
        return torch.autograd.grad(slopes[0].square().sum() + slopes[1].square().sum(), given)

    for linear, at in product((True, False), (0, 1)):
        want = second(linear, x, weight, target)
        places = [[Shard(0)] if at == place else [Replicate()] for place in range(2)]
        cut = [distribute_tensor(t, mesh, p) for t, p in zip((x, weight), places)]
        found = second(linear, cut[0], cut[1], distribute_tensor(target, mesh, places[0]))
        torch.testing.assert_close([each.full_tensor() for each in found], [*want])
