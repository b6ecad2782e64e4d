"""Checks of experts on every rank: experts over ranks, with whole tokens and with tokens that are sent to them."""

from __future__ import annotations

from typing import Any

import torch
from pages import blocks
from ranks import check, counted, refused
from repository import DOCS
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

import fusedops

E, T, K, H = 6, 8, 2, 6  # 4 ranks have 2, 2, 2 and no experts
INNER = 4


def _call() -> tuple[list[Tensor], Tensor]:
    """Return x, weights, up, down and the biases, and the index: with sentinels, and an expert twice."""
    tensors = [
        torch.randn(shape) for shape in ((T, H), (T, K), (E, 2 * INNER, H), (E, H, INNER), (E, 2 * INNER), (E, H))
    ]
    index = torch.randint(E, (T, K))
    index[1], index[2], index[3, 0], index[4] = 4, torch.tensor([-1, E]), E, torch.tensor([0, 5])
    return tensors, index


def _results(tensors: list[Any], index: Any, grad: Any) -> tuple[Any, ...]:
    x, weights, up, down, up_bias, down_bias = leaves = [each.detach().requires_grad_() for each in tensors]
    y = fusedops.experts(x, index, weights, up, down, up_bias, down_bias)
    return y, *torch.autograd.grad(y, leaves, grad)


@check
def experts_over_ranks(mesh: DeviceMesh) -> None:
    """Each rank computes its experts for all tokens, and the output is the sum; nothing is sent before that."""
    one, all_of = Shard(0), Replicate()
    ways: list[tuple[DeviceMesh, list[Placement], list[Placement]]] = [(mesh, [all_of], [one])]
    if mesh.size() == 4:  # tokens over one dim of the mesh, experts over the other
        ways.append((init_device_mesh("cpu", (2, 2)), [one, all_of], [all_of, one]))
    tensors, index = _call()
    grad = torch.randn(T, H)
    want = _results(tensors, index, grad)
    for on, of_tokens, of_experts in ways:
        spread = [distribute_tensor(each, on, of_tokens) for each in tensors[:2]]
        spread += [distribute_tensor(each, on, of_experts) for each in tensors[2:]]
        chosen, of_output = (distribute_tensor(each, on, of_tokens) for each in (index, grad))
        with CommDebugMode() as sent:
            found = _results(spread, chosen, of_output)
        assert counted(sent) == {}
        sums = ([Partial() if p == all_of else p for p in placed] for placed in (of_tokens, of_experts))
        tokens, experts = map(tuple, sums)
        assert [each.placements for each in found] == [tokens] * 3 + [experts] * 4
        for got, expected in zip(found, want):
            torch.testing.assert_close(got.full_tensor(), expected)
    tokens = [distribute_tensor(each, mesh, [one]) for each in (tensors[0], index, tensors[1])]
    experts = [distribute_tensor(each, mesh, [one]) for each in tensors[2:4]]
    refused(lambda: fusedops.experts(*tokens, *experts), "got up with [Shard(dim=0)], which would have to be gathered")


@check
def tokens_are_sent_to_their_experts(mesh: DeviceMesh) -> None:
    """The function of the page, by all-to-all: values and gradients as on one process; each rank has its own tokens."""
    (code,) = (each.code for each in blocks((DOCS / "distributed.md").read_text("utf-8")) if "all_to_all" in each.code)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    ranks, rank = mesh.size(), distributed.get_rank()
    up, down = torch.randn(2 * ranks, 2 * INNER, H) / 3, torch.randn(2 * ranks, H, INNER) / 3
    x, weights = torch.randn(ranks, T, H), torch.rand(ranks, T, K)
    index = torch.randint(2 * ranks, (ranks, T, K))
    index[index == 1] = 0  # one expert without tokens
    want = [each.clone().requires_grad_() for each in (x, weights, up, down)]
    tokens = [each.flatten(0, 1) for each in (want[0], index, want[1])]
    fusedops.experts(*tokens, *want[2:]).square().sum().backward()
    own = slice(2 * rank, 2 * rank + 2)
    mine = [each.clone().requires_grad_() for each in (x[rank], weights[rank], up[own], down[own])]
    namespace["experts_of_all_ranks"](mine[0], index[rank], *mine[1:]).square().sum().backward()
    gradients = (want[0].grad[rank], want[1].grad[rank], want[2].grad[own], want[3].grad[own])
    torch.testing.assert_close([each.grad for each in mine], [*gradients])
