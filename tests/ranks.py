"""What every process of a distributed test runs: checks by name, each of which all ranks enter and leave together.

Starting processes is slow, so one start serves all checks of a world size; tests/test_distributed.py reports each.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F

import fusedops
from fusedops import testing
from fusedops._op import Op

BACKENDS = ("eager", "triton")  # triton under its interpreter
# small, and with sizes that neither 2 nor 4 processes share out evenly
CALLS: dict[str, dict[str, Any]] = {
    "scaled_masked_softmax": {"x": (4, 3, 5, 8), "mask": (4, 1, 1, 8), "scale": 0.5, "causal": True},
    "bias_gelu": {"x": (5, 4, 6), "bias": (6,)},
    "bias_dropout": {"x": (5, 4, 6), "bias": (4, 1), "p": 0.3, "seed": 2**40 + 7},
    "bias_dropout_add": {"x": (5, 4, 6), "bias": (6,), "residual": (5, 4, 6), "p": 0.3, "seed": 11},
}
CHECKS: dict[str, Callable[..., None]] = {}


def check(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function a check, by its name. One with a parameter ``op`` is a check of each op."""
    if "op" not in function.__annotations__:
        CHECKS[function.__name__] = function
        return function
    for op in testing.OPS.values():
        CHECKS[f"{function.__name__} {op.name}"] = lambda mesh, op=op: function(mesh, op)
    return function


def run_on(world: int, folder: pathlib.Path) -> dict[str, list[str]]:
    """Runs every check on ``world`` processes. Returns, by check, what went wrong on each rank; empty where nothing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (world, port, str(folder)), nprocs=world)
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return {name: [one[name] for one in told] for name in told[0]}


def _rank(rank: int, world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    told: dict[str, str] = {}
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        fusedops.set_policy("eager")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's own; FallbackWarning is looked at by its check
                function(mesh)
            told[name] = ""
        except BaseException:
            told[name] = f"rank {rank}: {traceback.format_exc()}"
        pathlib.Path(folder, f"{rank}.json").write_text(json.dumps(told))
        distributed.barrier()
    distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- calls


def public(op: Op) -> Callable[..., Tensor]:
    function = getattr(fusedops, op.name)
    return lambda *args, **kwargs: function(**dict(zip(op.parameters, args)), **kwargs)


def call_of(op: Op, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return testing.arguments(op, testing.Case("sharded", CALLS[op.name]), dtype)


def aligned(tensor: Tensor, shape: Sequence[int], placements: Sequence[Placement]) -> list[Placement]:
    """Where a tensor that broadcasts to ``shape`` has to lie beside one that lies at ``placements``."""
    found: list[Placement] = []
    for placement in placements:
        at = placement.dim - len(shape) + tensor.dim() if isinstance(placement, Shard) else -1
        found.append(Shard(at) if at >= 0 and tensor.shape[at] > 1 else Replicate())
    return found


def spread(op: Op, args: Sequence[Any], mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Any]:
    """The arguments as DTensors by ``placements`` of x; the seed stays as it is, a number on every rank."""
    return [
        distribute_tensor(arg, mesh, aligned(arg, args[0].shape, placements))
        if isinstance(arg, Tensor) and name != "seed"
        else arg
        for name, arg in zip(op.parameters, args)
    ]


def leaves(op: Op, args: Sequence[Any]) -> dict[str, Tensor]:
    """The arguments that have gradients, made leaves."""
    wanted = (*op.differentiable, *((op.passed_through,) if op.passed_through else ()))
    found = {name: arg for name, arg in zip(op.parameters, args) if name in wanted and isinstance(arg, Tensor)}
    for leaf in found.values():
        leaf.requires_grad_()
    return found


def refused(call: Callable[[], object], *words: str) -> None:
    """Asserts that the call is refused, with these words, before anything is sent."""
    with CommDebugMode() as sent, pytest.raises(fusedops.InvalidInputError) as caught:
        call()
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert sent.get_total_counts() == 0, sent.get_comm_counts()


def counted(sent: CommDebugMode) -> dict[str, int]:
    return {str(name).rpartition(".")[2]: count for name, count in sent.get_comm_counts().items() if count}


# ------------------------------------------------------------------------------------------------------------ checks


@check
def shards_equal_the_whole(mesh: DeviceMesh, op: Op) -> None:
    """Every way to cut x over the mesh, forward and backward: the whole's result, and nothing is sent."""
    rank = len(CALLS[op.name]["x"])
    cuttable = [dim for dim in range(rank) if dim - rank not in op.unsharded]
    ways: list[tuple[DeviceMesh, list[Placement]]] = [(mesh, [Shard(dim)]) for dim in cuttable]
    ways.append((mesh, [Replicate()]))
    if mesh.size() == 4:
        square = init_device_mesh("cpu", (2, 2))
        ways += [(square, [Shard(a), Shard(b)]) for a in cuttable for b in cuttable]
        ways.append((square, [Replicate(), Shard(cuttable[-1])]))
    for backend in BACKENDS:
        for dtype in (torch.float32, torch.bfloat16):
            args = call_of(op, dtype)
            mine = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
            whole = leaves(op, mine)
            y = public(op)(*mine, backend=backend)
            grad = torch.randn(y.shape).to(y.dtype)
            y.backward(grad)
            for on, placements in ways:
                what = f"{backend} {dtype} {placements}"
                parts = spread(op, args, on, placements)
                cut = leaves(op, parts)
                cut_grad = distribute_tensor(grad, on, placements)
                with CommDebugMode() as sent:
                    z = public(op)(*parts, backend=backend)
                    z.backward(cut_grad)
                assert sent.get_total_counts() == 0, f"{what}: {counted(sent)}"
                assert list(z.placements) == placements, what
                assert z.shape == y.shape, what
                assert z.stride() == y.stride(), what
                if backend == "eager" and "seed" in op.parameters:
                    assert torch.equal(z.full_tensor(), y), what
                dropped = z.full_tensor() == y  # where dropped, exactly 0 or the residual on every backend
                assert "seed" not in op.parameters or dropped[y == 0].all(), what
                testing.assert_within(z.full_tensor(), y.detach().double(), op.tolerance[dtype], what)
                for name, leaf in cut.items():
                    of_leaf = [
                        Partial() if isinstance(p, Shard) and isinstance(own, Replicate) else own
                        for p, own in zip(placements, leaf.placements)
                    ]
                    assert list(leaf.grad.placements) == of_leaf, f"{what}: {name}"
                    want = whole[name].grad.double()
                    got = leaf.grad.full_tensor()
                    allowed = op.gradient_tolerance[dtype]
                    if Partial() in of_leaf:  # each rank's sum is rounded to the bias's dtype
                        allowed = replace(allowed, absolute=mesh.size() * allowed.absolute)
                    testing.assert_within(got, want, allowed, f"{what}: {name}")
                    if name == op.parameters[0] and "seed" in op.parameters:
                        assert torch.equal(got == 0, want == 0), f"{what}: the mask of {name}'s gradient"


@check
def a_shard_drops_what_the_whole_drops(mesh: DeviceMesh) -> None:
    """Of ones, so that the output is the mask; odd sizes, so that shards tear Philox's groups of four."""
    seed = torch.tensor([-3])
    for shape in ((7, 5), (3, 5, 7), (2, 3, 1, 9), (1, 13)):
        keep = testing.keep_mask(seed, 0.4, shape)
        for dim in range(len(shape)):
            for backend in BACKENDS:
                x = distribute_tensor(torch.ones(shape), mesh, [Shard(dim)])
                y = fusedops.bias_dropout(x, None, 0.4, seed=seed, backend=backend)
                assert torch.equal(y.full_tensor() != 0, keep), f"{shape} {dim} {backend}"


@check
def what_moves_for_nothing(mesh: DeviceMesh) -> None:
    """A replicated tensor beside a sharded one is cut to it."""
    x, bias = torch.randn(4, 6), torch.randn(6)
    whole, cut = distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(bias, mesh, [Shard(0)])
    with CommDebugMode() as sent:
        y = fusedops.bias_gelu(whole, cut)
    assert counted(sent) == {}
    assert y.placements == (Shard(1),)
    torch.testing.assert_close(y.full_tensor(), fusedops.bias_gelu(x, bias))


@check
def partial_sums_are_summed(mesh: DeviceMesh) -> None:
    """As a row-wise layer hands them over; scattered where the residual is cut."""
    n = mesh.size()
    x, bias, residual = torch.randn(4, 8, 6), torch.randn(6), torch.randn(4, 8, 6)
    want = fusedops.bias_dropout_add(x, bias, residual, 0.2, seed=5)
    sums = DTensor.from_local(x / n, mesh, [Partial()], run_check=False)
    beside = distribute_tensor(bias, mesh, [Replicate()])
    for placement, collective in ((Replicate(), "all_reduce"), (Shard(1), "reduce_scatter_tensor")):
        stream = distribute_tensor(residual, mesh, [placement])
        with CommDebugMode() as sent:
            y = fusedops.bias_dropout_add(sums, beside, stream, 0.2, seed=5)
        assert counted(sent) == {collective: 1}
        assert y.placements == (placement,)
        torch.testing.assert_close(y.full_tensor(), want)
    with CommDebugMode() as sent:
        y = fusedops.bias_gelu(sums)
    assert counted(sent) == {"all_reduce": 1}
    torch.testing.assert_close(y.full_tensor(), fusedops.bias_gelu(x))


@check
def a_gradient_is_brought_to_what_forward_kept(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 8, 6)
    grad = torch.randn(4, 8, 6)
    mine = x.clone().requires_grad_()
    fusedops.bias_gelu(mine).backward(grad)
    # where there is no all_to_all, as in gloo, torch gathers in its place
    moves = ((Shard(1), "all_gather_into_tensor"), (Replicate(), None), (Partial(), "reduce_scatter_tensor"))
    for placement, collective in moves:
        leaf = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        y = fusedops.bias_gelu(leaf)
        if isinstance(placement, Partial):
            cut = DTensor.from_local(grad / mesh.size(), mesh, [placement], run_check=False)
        else:
            cut = distribute_tensor(grad, mesh, [placement])
        with CommDebugMode() as sent:
            y.backward(cut)
        assert counted(sent) == ({} if collective is None else {collective: 1})
        assert leaf.grad.placements == (Shard(0),)
        torch.testing.assert_close(leaf.grad.full_tensor(), mine.grad)


@check
def what_cannot_be_sharded_is_refused(mesh: DeviceMesh) -> None:
    whole, other = [Replicate()], init_device_mesh("cpu", (1, mesh.size()))
    x = torch.randn(4, 4, 8, 8)
    mask = torch.rand(4, 1, 8, 8) < 0.3
    softmax, gelu = fusedops.scaled_masked_softmax, fusedops.bias_gelu
    last, first = distribute_tensor(x, mesh, [Shard(3)]), distribute_tensor(x, mesh, [Shard(0)])
    replicated = distribute_tensor(x, mesh, whole)
    bias = distribute_tensor(torch.randn(8), mesh, [Shard(0)])
    keys = distribute_tensor(mask, mesh, [Shard(3)])
    rows = distribute_tensor(mask, mesh, [Shard(2)])
    there = distribute_tensor(x, other, [Replicate(), Replicate()])
    refused(
        lambda: softmax(last),
        "scaled_masked_softmax: x is Shard(dim=3) on mesh dim 0; needs dim -1 whole on every rank; shard another dim, "
        "as in x.redistribute(placements=[Shard(dim=0)])",
    )
    refused(lambda: softmax(replicated, keys), "mask is Shard(dim=3) on mesh dim 0; needs dim -1 whole")
    refused(
        lambda: softmax(first, rows),
        "mask is [Shard(dim=2)] beside tensors by which it is to be [Shard(dim=0)]; that would gather it; ask for it, "
        "with mask.redistribute(placements=[Shard(dim=0)])",
    )
    refused(lambda: gelu(first, bias), "bias is [Shard(dim=0)] beside", "bias.redistribute(placements=[Replicate()])")
    refused(lambda: gelu(first, torch.randn(8)), "bias is a plain tensor beside DTensors", "distribute_tensor(bias,")
    refused(lambda: gelu(x, bias), "x is a plain tensor beside DTensors")
    refused(lambda: fusedops.bias_dropout_add(first, None, last, 0.1, seed=1), "residual is [Shard(dim=3)] beside")
    refused(lambda: fusedops.bias_dropout_add(first, None, there, 0.1, seed=1), "needs one mesh for all tensors")
    refused(lambda: softmax(first, scale=float("inf")), "scale is inf; needs a finite number")
    with implicit_replication():
        torch.testing.assert_close(softmax(first, mask).full_tensor(), softmax(x, mask))


@check
def a_drawn_seed_is_one_for_all(mesh: DeviceMesh) -> None:
    """That of the first rank, in one broadcast; a seed that was given sends nothing."""
    x = torch.ones(4, 6)
    torch.manual_seed(5)
    want = fusedops.bias_dropout(x, None, 0.5)
    for placement in (Replicate(), Shard(0)):
        cut = distribute_tensor(x, mesh, [placement])
        torch.manual_seed(5 + distributed.get_rank())
        with CommDebugMode() as sent:
            y = fusedops.bias_dropout(cut, None, 0.5)
        assert counted(sent) == {"broadcast": 1}
        assert torch.equal(y.full_tensor(), want)
        torch._dynamo.reset()
        torch.manual_seed(5 + distributed.get_rank())
        y = torch.compile(fusedops.bias_dropout, backend="aot_eager", fullgraph=True)(cut, None, 0.5)
        assert torch.equal(y.full_tensor(), want)
        with CommDebugMode() as sent:
            fusedops.bias_dropout(cut, None, 0.5, training=False)
        assert counted(sent) == {}


@check
def a_kernel_passed_over_is_seen(mesh: DeviceMesh) -> None:
    """Dropout of a shard is plain torch: news where a kernel of the device would have served."""
    x, whole = (distribute_tensor(torch.ones(4, 6), mesh, [p]) for p in (Shard(1), Replicate()))

    def dropout(x: Tensor, seed: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fusedops.bias_dropout(x, None, 0.5, seed=seed)
        return [str(w.message) for w in caught if issubclass(w.category, fusedops.FallbackWarning)]

    fusedops.set_policy("triton")
    assert dropout(whole, 1) == []
    from fusedops import _plan

    _plan.forget_warnings()
    (text,) = dropout(x, 1)
    assert "bias_dropout runs on plain torch, not on triton: x is a shard" in text
    assert dropout(x, 2) == []
    fusedops.set_policy("triton", fallback="raise")
    with pytest.raises(fusedops.NoBackendError, match=r"triton +x is a shard"):
        fusedops.bias_dropout(x, None, 0.5, seed=1)
    fusedops.bias_dropout(whole, None, 0.5, seed=1)
    fusedops.set_policy("eager", fallback="raise")
    assert dropout(x, 3) == []


@check
def the_registered_op_and_inference_mode(mesh: DeviceMesh, op: Op) -> None:
    args = call_of(op)
    want = public(op)(*args)
    function = getattr(torch.ops.fusedops, op.name).default
    parts = spread(op, args, mesh, [Shard(0)])
    torch.testing.assert_close(function(*parts).full_tensor(), want)
    with torch.inference_mode():
        torch.testing.assert_close(public(op)(*spread(op, args, mesh, [Shard(0)])).full_tensor(), want)


@check
def compiled(mesh: DeviceMesh, op: Op) -> None:
    """In one graph, with gradients."""
    args = call_of(op)
    mine = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    whole = leaves(op, mine)
    y = public(op)(*mine)
    y.sum().backward()
    parts = spread(op, args, mesh, [Shard(0)])
    cut = leaves(op, parts)
    torch._dynamo.reset()
    z = torch.compile(public(op), backend="aot_eager", fullgraph=True)(*parts)
    z.sum().backward()
    torch.testing.assert_close(z.full_tensor(), y)
    for name, leaf in cut.items():
        torch.testing.assert_close(leaf.grad.full_tensor(), whole[name].grad)


@check
def second_derivatives(mesh: DeviceMesh, op: Op) -> None:
    """Of the reference, which torch shards; it refuses dropout's, whose mask is made from a plain seed."""
    args = list(call_of(op, torch.float64))
    parts = spread(op, args, mesh, [Shard(0)])
    found: list[Tensor] = []
    for call in (args, parts):
        x = call[0].requires_grad_()
        (slope,) = torch.autograd.grad(public(op)(*call).pow(3).sum(), x, create_graph=True)
        if call is parts and "seed" in op.parameters:
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                torch.autograd.grad(slope.square().sum(), x)
            return
        found += torch.autograd.grad(slope.square().sum(), x)
    torch.testing.assert_close(found[1].full_tensor(), found[0])


# ------------------------------------------------------------------------------------------------------------ models


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
    from gpt import FUSED, GPT

    torch.manual_seed(1)
    return GPT(31, FUSED, layers=2, width=32, heads=4, dropout=0.2)


@check
def gpt_spread_over_ranks(mesh: DeviceMesh) -> None:
    """Tensor and sequence parallel: the losses of one process, by the fewest collectives there can be."""
    from parallel import parallelize

    want, _ = losses_of(gpt(), 6, seed=1)
    other, _ = losses_of(gpt(), 6, seed=2)
    assert max(abs(a - b) for a, b in zip(want, other)) > 1e-2  # dropout counts: its seed is seen in the losses
    for sequence in (False, True):
        got, sent = losses_of(parallelize(gpt(), mesh, sequence=sequence), 6, seed=1)
        assert max(abs(a - b) for a, b in zip(want, got)) < 1e-4, (sequence, want, got)
        # in each block two sums forward and two backward, and the embedding's; cut along the text, each sum is a
        # scatter, and each half of a block and the last norm gather what is cut
        if sequence:
            assert sent == {"reduce_scatter_tensor": 9, "all_gather_into_tensor": 14}
        else:
            assert sent == {"all_reduce": 9}


@check
def gpt_of_uneven_heads_is_refused(mesh: DeviceMesh) -> None:
    from gpt import FUSED, GPT
    from parallel import parallelize

    with pytest.raises(ValueError, match=f"has 5 heads; needs a number divisible by the {mesh.size()} processes"):
        parallelize(GPT(31, FUSED, layers=1, width=30, heads=5), mesh)


class Layer(nn.Module):
    """A linear layer and one op after it, whose bias, where it has one, is a parameter here."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op
        self.linear = nn.Linear(8, 8, bias=False)
        self.bias = nn.Parameter(torch.randn(8)) if "bias" in op.parameters else None

    def forward(self, x: Tensor) -> Tensor:
        inside = {"mask": None, "bias": self.bias, "residual": x, "causal": True, "p": 0.3, "seed": 5}
        given = {name: value for name, value in inside.items() if name in self.op.parameters}
        return getattr(fusedops, self.op.name)(self.linear(x), **given)


@check
def fsdp2(mesh: DeviceMesh, op: Op) -> None:
    """Each rank its own rows: the gradients are the mean of all ranks', as of plain modules."""
    for backend in BACKENDS:
        fusedops.set_policy(backend, fallback="raise")
        torch.manual_seed(2)
        plain = nn.Sequential(Layer(op), Layer(op))
        torch.manual_seed(2)
        sharded = nn.Sequential(Layer(op), Layer(op))
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        rows = torch.randn(mesh.size(), 2, 4, 8)
        whole = [plain(part) for part in rows]
        sum(y.square().sum() for y in whole).backward()
        y = sharded(rows[distributed.get_rank()])
        y.square().sum().backward()
        assert torch.equal(y, whole[distributed.get_rank()])
        for (name, one), other in zip(sharded.named_parameters(), plain.parameters()):
            assert one.placements == (Shard(0),)
            got = one.grad.full_tensor() * mesh.size()
            torch.testing.assert_close(got, other.grad, msg=lambda text, name=name: f"{name}: {text}")


@check
def fsdp2_around_tensor_parallel(mesh: DeviceMesh) -> None:
    """The demo's GPT on two dims of processes, where there are four; else FSDP2 alone. All ranks read one text."""
    from parallel import parallelize

    want, _ = losses_of(gpt(), 4, seed=1)
    model = gpt()
    if mesh.size() == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model, mesh = parallelize(model, square["tensor"]), square["data"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    got, sent = losses_of(model, 4, seed=1)
    assert max(abs(a - b) for a, b in zip(want, got)) < 1e-4, (want, got)
    assert sent


# ------------------------------------------------------------------------------------------------------ across ranks


@check
def the_same_choices(mesh: DeviceMesh) -> None:
    fusedops.set_policy("triton; bias_gelu=eager")
    choices = testing.assert_same_choices()
    assert choices["bias_gelu"].startswith("eager "), choices
    assert choices["bias_gelu backward"].startswith("eager "), choices
    assert choices["bias_dropout"].startswith("triton "), choices
    assert choices == testing.assert_same_choices(mesh.get_group())


@check
def other_choices_are_told(mesh: DeviceMesh) -> None:
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
