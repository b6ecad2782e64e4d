"""Checks of models, on every rank: the demo's GPT in parallel, FSDP2; and that all ranks choose alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from calls import batched, outputs
from gpt import FUSED, GPT
from parallel import parallelize
from ranks import call_of, check, counted, public
from state import Op
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F

import fusedops
from fusedops import testing
from fusedops.constraints import Bytes


def losses_of(model: nn.Module, steps: int, seed: int) -> tuple[list[float], dict[str, int]]:
    """Trains the demo's GPT on random text, dropout on. Returns the losses, and what the last step sent."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    random = torch.Generator().manual_seed(3)
    losses: list[float] = []
    for step in range(steps):
        text = torch.randint(31, (4, 17), generator=random)
        with implicit_replication(), CommDebugMode() as sent:
            loss = F.cross_entropy(model(text[:, :-1], seed + 100 * step).flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, counted(sent)


def gpt() -> nn.Module:

    torch.manual_seed(1)
    return GPT(31, FUSED, layers=2, width=32, heads=4, dropout=0.2)


@check
def gpt_spread_over_ranks(mesh: DeviceMesh) -> None:
    """Tensor and sequence parallel: the losses of one process, by the fewest collectives there can be."""

    want, _ = losses_of(gpt(), 3, seed=1)
    (other,), _ = losses_of(gpt(), 1, seed=2)
    assert abs(want[0] - other) > 1e-2  # dropout counts: its seed is seen in the losses
    for sequence in (False, True):
        got, sent = losses_of(parallelize(gpt(), mesh, sequence=sequence), 3, seed=1)
        assert max(abs(a - b) for a, b in zip(want, got)) < 1e-4, (sequence, want, got)
        # in each block two sums forward and two backward, and the embedding's; cut along the text, each sum is a
        # scatter, and each half of a block and the last norm gather what is cut
        if sequence:
            assert sent == {"reduce_scatter_tensor": 9, "all_gather_into_tensor": 14}
        else:
            assert sent == {"all_reduce": 9}


@check
def gpt_of_uneven_heads_is_refused(mesh: DeviceMesh) -> None:

    with pytest.raises(ValueError, match=f"got 5 heads, expected a number divisible by the {mesh.size()} processes"):
        parallelize(GPT(31, FUSED, layers=1, width=30, heads=5), mesh)


class Layer(nn.Module):
    """A linear layer and one op after it, whose weights are parameters here; its other tensors never change."""

    def __init__(self, op: Op, args: Sequence[Any]) -> None:
        super().__init__()
        self.op = op
        self.linear = nn.Linear(args[0].shape[-1], args[0].shape[-1], bias=False)
        given = dict(zip(op.parameters, args))
        rows = dict(zip(given, batched([arg if isinstance(arg, Tensor) else torch.empty(()) for arg in args])))
        names = [*op.differentiable, *(item.name for item in op.constraints if isinstance(item, Bytes))]
        weights = {name: given[name].clone() for name in names if given[name] is not None and not rows[name]}
        self.weights = nn.ParameterDict(
            {name: nn.Parameter(value, value.is_floating_point()) for name, value in weights.items()}
        )
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        call = {**self.given, **self.weights, self.op.parameters[0]: self.linear(x)}
        y = outputs(public(self.op)(*call.values()))[0]
        if y.shape == x.shape:
            return y
        return x + y.reshape(*x.shape[:-1], -1).mean(-1, keepdim=True)  # of the columns that the next layer needs


@check
def fsdp2(mesh: DeviceMesh, op: Op) -> None:
    """Each rank its own rows: the gradients are the mean of all ranks', as of plain modules."""
    fusedops.set_policy("eager", fallback="raise")
    args = call_of(op)
    torch.manual_seed(2)
    plain = nn.Sequential(Layer(op, args), Layer(op, args))
    torch.manual_seed(2)
    sharded = nn.Sequential(Layer(op, args), Layer(op, args))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    rows = torch.randn(mesh.size(), *args[0].shape)
    whole = [plain(part) for part in rows]
    sum(y.square().sum() for y in whole).backward()
    y = sharded(rows[distributed.get_rank()])
    y.square().sum().backward()
    assert torch.equal(y, whole[distributed.get_rank()])
    for (name, one), other in zip(sharded.named_parameters(), plain.parameters()):
        assert one.placements == (Shard(0),)
        if not other.requires_grad:  # a packed weight
            assert one.grad is None
            continue
        got = one.grad.full_tensor() * mesh.size()
        torch.testing.assert_close(got, other.grad, msg=lambda text, name=name: f"{name}: {text}")


@check
def fsdp2_around_tensor_parallel(mesh: DeviceMesh) -> None:
    """The demo's GPT on two dims of processes, where there are four; else FSDP2 alone. All ranks read one text."""

    want, _ = losses_of(gpt(), 3, seed=1)
    model = gpt()
    if mesh.size() == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model, mesh = parallelize(model, square["tensor"]), square["data"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    got, sent = losses_of(model, 3, seed=1)
    assert max(abs(a - b) for a, b in zip(want, got)) < 1e-4, (want, got)
    assert sent


@check
def the_same_choices(mesh: DeviceMesh) -> None:
    fusedops.set_policy("triton; bias_gelu=eager")
    choices = testing.assert_same_choices()
    assert choices["bias_gelu"].startswith("eager "), choices
    assert choices["bias_gelu backward"].startswith("eager "), choices
    assert choices["bias_dropout"].startswith("triton "), choices
    assert choices == testing.assert_same_choices(mesh.get_group())


@check
def other_settings_are_reported(mesh: DeviceMesh) -> None:
    """Of a policy whose orders are the same: one call may be padded on one rank alone."""
    last = mesh.size() - 1
    chosen = {"adapt": "pad", "fallback": "silent"} if distributed.get_rank() == last else {}
    with fusedops.use("auto", **chosen), pytest.raises(AssertionError) as caught:
        testing.assert_same_choices()
    assert f"rank {last} has adapt='pad', rank 0 'none'" in str(caught.value)
    assert f"rank {last} has fallback='silent', rank 0 'warn'" in str(caught.value)


@check
def other_choices_are_reported(mesh: DeviceMesh) -> None:
    """On every rank, also on those that agree with the first."""
    last = mesh.size() - 1
    fusedops.set_policy("triton; bias_gelu=eager" if distributed.get_rank() == last else "triton")
    with pytest.raises(AssertionError) as caught:
        testing.assert_same_choices()
    text = str(caught.value)
    assert f"rank {last} would run bias_gelu by eager " in text, text
    assert "rank 0 by triton " in text, text
    assert "set_policy" in text, text
    assert "fusedops.backends()" in text, text
    assert "bias_dropout" not in text, text
