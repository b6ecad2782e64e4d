"""Checks of attention on every rank: shards of the batch and of grouped heads, and those that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import check, refused
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

import fusedops

REASON = "a score needs whole vectors, a mask's row all its keys, and a group all its query heads"
OPTIONS = ({}, {"causal": "lower_right"}, {"causal": "upper_left", "window": (2, 0)}, {"scale": -0.3})


def tensors(heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(4, heads, 5, 8), torch.randn(4, key_heads, 7, 8), torch.randn(4, key_heads, 7, 6)
    return q, k, v


def compare(
    mesh: DeviceMesh,
    whole: tuple[Tensor, Tensor, Tensor],
    placements: tuple[list[Placement], list[Placement]],
    mask: tuple[Tensor, list[Placement]] | None = None,
    grad: list[Placement] | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compare out, lse and the gradients of DTensors with those of the whole. Returns the gradients' DTensors."""
    mine = [each.clone().requires_grad_() for each in whole]
    mine_mask = None if mask is None else mask[0]
    ys = fusedops.attention(*mine, mine_mask, return_lse=True, **options)
    grads = [torch.randn_like(y) for y in ys]
    torch.autograd.backward(ys, grads)
    of_q, of_k = placements
    parts = [distribute_tensor(e, mesh, at).requires_grad_() for e, at in zip(whole, (of_q, of_k, of_k))]
    spread_mask = None if mask is None else distribute_tensor(mask[0], mesh, mask[1])
    what = f"{placements} {options}"
    with CommDebugMode() as sent:
        zs = fusedops.attention(*parts, spread_mask, return_lse=True, **options)
    assert sent.get_total_counts() == 0, what
    cut_grads = [distribute_tensor(g, mesh, z.placements if grad is None else grad) for g, z in zip(grads, zs)]
    with CommDebugMode() as sent:
        torch.autograd.backward(zs, cut_grads)
    assert sent.get_total_counts() == 0 or grad is not None, what
    for y, z in zip(ys, zs):
        torch.testing.assert_close(z.full_tensor(), y, msg=lambda text: f"{what}: {text}")
    for own, part in zip(mine, parts):
        torch.testing.assert_close(part.grad.full_tensor(), own.grad, rtol=1e-4, atol=1e-5, msg=f"{what}: gradients")
    return tuple(part.grad for part in parts)


@check
def attention_of_sharded_heads_and_batches(mesh: DeviceMesh) -> None:
    padding = fusedops.masks.from_lengths(torch.tensor([7, 3, 0, 5]), 7)
    scores = torch.rand(4, 8, 5, 7) < 0.4
    for dim in (0, 1):
        cut: list[Placement] = [Shard(dim)]
        for options in OPTIONS:
            if "window" in options:
                options = {**options, "causal": "lower_right"}
            compare(mesh, tensors(8, 4), (cut, cut), **options)
        of_padding: list[Placement] = cut if dim == 0 else [Replicate()]
        compare(mesh, tensors(8, 4), (cut, cut), (padding, of_padding))
        compare(mesh, tensors(8, 4), (cut, cut), (scores, cut), causal="upper_left")
    if mesh.size() == 4:
        both: list[Placement] = [Shard(0), Shard(1)]
        compare(init_device_mesh("cpu", (2, 2)), tensors(4, 2), (both, both), (scores[:, :4], both))


@check
def attention_of_one_key_head_beside_sharded_heads(mesh: DeviceMesh) -> None:
    """k and v are whole on each rank, and their gradients are not yet summed."""
    heads: list[Placement] = [Shard(1)]
    for number in (8, 5):
        dq, dk, dv = compare(mesh, tensors(number, 1), (heads, [Replicate()]), causal="lower_right")
        assert dq.placements == (Shard(1),)
        assert dk.placements == dv.placements == (Partial(),)


@check
def attention_cuts_what_is_whole(mesh: DeviceMesh) -> None:
    """Replicated keys beside sharded queries are cut, and a mask or a gradient that is sharded alone cuts the rest."""
    heads, whole = [Shard(1)], [Replicate()]
    compare(mesh, tensors(8, 4), (heads, whole))
    compare(mesh, tensors(8, 4), (whole, whole), (torch.rand(4, 8, 5, 7) < 0.4, heads))
    compare(mesh, tensors(8, 4), (whole, whole), grad=heads)
    # of 3 key heads no rank has whole groups: the gradient is gathered, nothing else is cut
    compare(mesh, tensors(12, 3), (whole, whole), grad=heads)


@check
def attention_refuses_sharded_vectors_groups_and_keys_of_a_mask(mesh: DeviceMesh) -> None:
    q, k, v = tensors(8, 4)
    whole: list[Placement] = [Replicate()]

    def call(*dims: int | None, heads: tuple[Tensor, Tensor, Tensor] = (q, k, v)) -> Callable[[], Any]:
        parts = [distribute_tensor(t, mesh, whole if at is None else [Shard(at)]) for t, at in zip(heads, dims)]
        return lambda: fusedops.attention(*parts)

    refused(call(3, None, None), "got q with Shard(dim=3)", "dim -1 whole on every rank", REASON)
    refused(call(1, 1, 1, heads=tensors(12, 3)), "got q with Shard(dim=1)", "dim -3 whole on every rank")
    refused(call(2, 1, 1), "got k with [Shard(dim=1)], which would have to be gathered")
    mask = distribute_tensor(torch.zeros(5, 7, dtype=torch.bool), mesh, [Shard(1)])
    args = [distribute_tensor(t, mesh, whole) for t in (q, k, v)]
    refused(lambda: fusedops.attention(*args, mask), "got mask with Shard(dim=1)", REASON)
