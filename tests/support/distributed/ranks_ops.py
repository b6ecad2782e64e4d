"""Checks of single ops, on every rank: shards against the whole, what is sent, what is refused."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from calls import call_registered, ends_of_groups, outputs
from ranks import (
    BACKENDS,
    BATCH,
    aligned,
    call_of,
    check,
    counted,
    cuttable,
    dims_of,
    first_cut,
    leaves,
    public,
    refused,
    spread,
)
from state import Op, forget_warnings
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import Placement

import fusedops
from fusedops import testing

#: Whose gradients in 16 bits are of products that each backend rounds in its own way.
OF_ROUNDED_PRODUCTS = ("experts", "linear_cross_entropy", "linear_log_probs")


@check
def shards_equal_the_whole(mesh: DeviceMesh, op: Op) -> None:
    """The ways to cut x over the mesh, forward and backward: the whole's result, and nothing is sent.

    Two ranks take every dim in turn. Four are a square, where x is cut twice: the order of two dims counts where a
    kernel gets the place of its shard, to draw the bits of the whole: triton's too. Placements depend on neither the
    backend nor the dtype: the other ops run kernels in 16 bits on the shards of one cut, some without elements.
    """
    dims, drawn = cuttable(op, call_of(op)), "seed" in op.parameters
    ways: list[tuple[DeviceMesh, list[Placement]]] = [(mesh, [Shard(dim)]) for dim in dims] + [(mesh, [Replicate()])]
    chosen = [("eager", torch.float32, ways)]
    if mesh.size() == 4:
        square = init_device_mesh("cpu", (2, 2))
        twice: list[tuple[DeviceMesh, list[Placement]]] = [
            (square, [Shard(a), Shard(b)]) for a in dims for b in dims if a <= b or drawn
        ]
        twice.append((square, [Replicate(), Shard(dims[-1]) if dims else Replicate()]))
        chosen = [
            ("eager", torch.float32, twice),
            ("triton", torch.bfloat16, twice) if drawn else (BACKENDS[-1], torch.bfloat16, ways[:1]),
        ]
    for backend, dtype, ways in chosen:
        args = call_of(op, dtype)
        mine = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        whole = leaves(op, mine)
        # eager: the interpreter would take as long again for the whole
        ys = outputs(public(op)(*mine, backend=backend if op.name in OF_ROUNDED_PRODUCTS else "eager"))
        grads = [torch.randn(y.shape).to(y.dtype) for y in ys]
        torch.autograd.backward(ys, grads)
        limits = testing.expected(op, args, grad=grads).limits
        for on, placements in ways:
            what = f"{backend} {dtype} {placements}"
            parts = spread(op, args, on, placements)
            cut = leaves(op, parts)
            leading = op.sharding.combined is not None  # outputs have the leading dims of x
            dims = dims_of(op, args)
            of_outputs = [
                placements if leading else aligned(y, args[0].shape, placements, dims.get(name))
                for name, y in zip(op.outputs, ys)
            ]
            cut_grads = [distribute_tensor(grad, on, at) for grad, at in zip(grads, of_outputs)]
            with CommDebugMode() as sent:
                zs = outputs(public(op)(*parts, backend=backend))
                torch.autograd.backward(zs, cut_grads)
            assert sent.get_total_counts() == 0, f"{what}: {counted(sent)}"
            for output, y, z, at in zip(op.outputs, ys, zs, of_outputs):
                assert list(z.placements) == at, what
                assert z.shape == y.shape, what
                assert z.stride() == y.stride(), what
                if backend == "eager" and "seed" in op.parameters:
                    assert torch.equal(z.full_tensor(), y), what
                dropped = z.full_tensor() == y  # where dropped, exactly 0 or the residual on every backend
                assert "seed" not in op.parameters or dropped[y == 0].all(), what
                allowed = 2 * limits[f"output {output}"]  # each has an error
                testing.assert_within(z.full_tensor(), y.detach().double(), allowed, what)
            for name, leaf in cut.items():
                # else it is as the gradient of its output
                summed = name in op.backward_parameters or op.first_in_backward is not None
                of_leaf = [
                    Partial() if summed and isinstance(p, Shard) and isinstance(own, Replicate) else own
                    for p, own in zip(placements, leaf.placements)
                ]
                assert list(leaf.grad.placements) == of_leaf, f"{what}: {name}"
                want = whole[name].grad.double()
                got = leaf.grad.full_tensor()
                allowed = op.evidence.gradient_tolerance[dtype]
                allowed = allowed._replace(absolute=2 * allowed.absolute, relative=2 * allowed.relative)  # as above
                if Partial() in of_leaf:  # each rank's sum is rounded to the bias's dtype
                    rounding = mesh.size() * torch.finfo(leaf.dtype).eps * float(want.abs().max().clamp(min=1.0))
                    allowed = allowed._replace(absolute=allowed.absolute + rounding)
                testing.assert_within(got, want, allowed, f"{what}: {name}")
                if name == op.parameters[0] and "seed" in op.parameters:
                    assert torch.equal(got == 0, want == 0), f"{what}: the mask of {name}'s gradient"


@check
def tokens_of_sharded_rows(mesh: DeviceMesh) -> None:
    """Numbers for all rows, and tensors of one for each, sharded or replicated. A sharded vocabulary is refused."""
    logits, top_p, seeds = torch.randn(BATCH, 17), torch.rand(BATCH), torch.arange(BATCH)
    call = {"logits": logits, "top_p": top_p, "seed": seeds, "position": 3, "temperature": 0.7, "return_log_prob": True}
    rows, whole = [Shard(0)], [Replicate()]
    for backend in BACKENDS:
        wanted = fusedops.sample(**call, backend=backend)
        named = {"logits": rows, "top_p": rows, "seed": whole}
        cut = {name: distribute_tensor(call[name], mesh, at) for name, at in named.items()}
        with CommDebugMode() as sent:
            found = fusedops.sample(**{**call, **cut}, backend=backend)
        assert sent.get_total_counts() == 0, counted(sent)
        for got, want in zip(found, wanted, strict=True):
            assert list(got.placements) == rows
            assert torch.equal(got.full_tensor(), want)
    cut = distribute_tensor(logits, mesh, [Shard(1)])
    refused(lambda: fusedops.sample(cut, seed=1, position=3), "got logits with Shard(dim=1)", "of a row are compared")


@check
def rotary_embedding_of_shards(mesh: DeviceMesh) -> None:
    """Heads and positions in both layouts: replicated angles are cut with the positions; else a gather is refused."""
    whole = [Replicate()]
    q, k, angle = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(6, 3)
    cos, sin = angle.cos(), angle.sin()
    for seq_dim in (-2, -3):
        x, y = (q, k) if seq_dim == -2 else (q.transpose(1, 2), k.transpose(1, 2))
        want = fusedops.rotary_embedding(x, y, cos, sin, seq_dim=seq_dim)
        for dim in (0, 1, 2):
            cut = [distribute_tensor(t, mesh, [Shard(dim)]) for t in (x, y)]
            angles = [distribute_tensor(t, mesh, whole) for t in (cos, sin)]
            with CommDebugMode() as sent:
                got = fusedops.rotary_embedding(*cut, *angles, seq_dim=seq_dim)
            assert counted(sent) == {}
            assert [t.placements for t in got] == [(Shard(dim),)] * 2
            torch.testing.assert_close([t.full_tensor() for t in got], [*want])
    heads, positions = (distribute_tensor(q, mesh, [Shard(dim)]) for dim in (1, 2))
    rows = [distribute_tensor(t, mesh, [Shard(0)]) for t in (cos, sin)]
    got, none = fusedops.rotary_embedding(positions, None, *rows)
    assert none is None
    torch.testing.assert_close(got.full_tensor(), fusedops.rotary_embedding(q, None, cos, sin)[0])
    refused(
        lambda: fusedops.rotary_embedding(heads, None, *rows),
        "rotary_embedding: got cos with [Shard(dim=0)], which would have to be gathered, expected [Replicate()]",
    )
    columns = distribute_tensor(q, mesh, [Shard(3)])
    refused(lambda: fusedops.rotary_embedding(columns, None, *rows), "got q with Shard(dim=3)", "dim -1 whole")
    # a k of one head beside sharded heads is whole on each rank, and so is its gradient
    one = distribute_tensor(k[:, :1].contiguous(), mesh, whole).requires_grad_()
    angles = [distribute_tensor(t, mesh, whole) for t in (cos, sin)]
    turned = fusedops.rotary_embedding(heads, one, *angles)[1]
    turned.backward(distribute_tensor(torch.ones(2, 1, 6, 8), mesh, whole))
    mine = k[:, :1].contiguous().requires_grad_()
    fusedops.rotary_embedding(q, mine, cos, sin)[1].sum().backward()
    assert one.grad.placements == (Replicate(),)
    torch.testing.assert_close(one.grad.full_tensor(), mine.grad)


@check
def a_shard_drops_what_the_whole_drops(mesh: DeviceMesh) -> None:
    """Of ones, so that the output is the mask; odd sizes, so that shards tear Philox's groups of four."""
    seed = torch.tensor([-3])
    for shape in ((7, 5), (2, 3, 1, 9)):
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
        "scaled_masked_softmax: got x with Shard(dim=3) on mesh dim 0, expected dim -1 whole on every rank; to fix: "
        "shard another dim, as in x.redistribute(placements=[Shard(dim=0)])",
    )
    refused(lambda: softmax(replicated, keys), "got mask with Shard(dim=3) on mesh dim 0, expected dim -1 whole")
    refused(
        lambda: softmax(first, rows),
        "got mask with [Shard(dim=2)], which would have to be gathered, expected [Shard(dim=0)], as the other tensors "
        "are placed; to fix: call mask.redistribute(placements=[Shard(dim=0)])",
    )
    refused(lambda: gelu(first, bias), "got bias with [Shard(dim=0)]", "bias.redistribute(placements=[Replicate()])")
    refused(
        lambda: gelu(first, torch.randn(8)), "got bias as a plain tensor beside DTensors", "distribute_tensor(bias,"
    )
    refused(lambda: gelu(x, bias), "got x as a plain tensor beside DTensors")
    refused(lambda: fusedops.bias_dropout_add(first, None, last, 0.1, seed=1), "got residual with [Shard(dim=3)]")
    refused(lambda: fusedops.bias_dropout_add(first, None, there, 0.1, seed=1), "expected one mesh for all tensors")
    refused(lambda: softmax(first, scale=float("inf")), "got scale = inf, expected a Python number, finite in float32")
    with implicit_replication():
        torch.testing.assert_close(softmax(first, mask).full_tensor(), softmax(x, mask))


def drawn() -> Tensor:
    torch.manual_seed(5)
    return fusedops.bias_dropout(torch.ones(4, 6), None, 0.5)


@check
def a_drawn_seed_is_one_for_all(mesh: DeviceMesh) -> None:
    """That of the first rank, in one broadcast; a seed that was given sends nothing."""
    x, want = torch.ones(4, 6), drawn()
    for placement in (Replicate(), Shard(0)):
        cut = distribute_tensor(x, mesh, [placement])
        torch.manual_seed(5 + distributed.get_rank())
        with CommDebugMode() as sent:
            y = fusedops.bias_dropout(cut, None, 0.5)
        assert counted(sent) == {"broadcast": 1}
        assert torch.equal(y.full_tensor(), want)
        with CommDebugMode() as sent:
            fusedops.bias_dropout(cut, None, 0.5, training=False)
        assert counted(sent) == {}


@check
def a_drawn_seed_is_one_for_all_compiled(mesh: DeviceMesh) -> None:
    x, want = torch.ones(4, 6), drawn()
    for placement in (Replicate(), Shard(0)):
        cut = distribute_tensor(x, mesh, [placement])
        torch._dynamo.reset()
        torch.manual_seed(5 + distributed.get_rank())
        y = torch.compile(fusedops.bias_dropout, backend="aot_eager", fullgraph=True)(cut, None, 0.5)
        assert torch.equal(y.full_tensor(), want)


@check
def a_kernel_passed_over_is_seen(mesh: DeviceMesh) -> None:
    """Dropout of a shard is plain torch: reported where a kernel of the device would have run."""
    x, whole = (distribute_tensor(torch.ones(4, 6), mesh, [p]) for p in (Shard(1), Replicate()))

    def dropout(x: Tensor, seed: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fusedops.bias_dropout(x, None, 0.5, seed=seed)
        return [str(w.message) for w in caught if issubclass(w.category, fusedops.FallbackWarning)]

    fusedops.set_policy("triton")
    assert dropout(whole, 1) == []
    forget_warnings()
    (text,) = dropout(x, 1)
    assert "bias_dropout runs on plain torch, not on triton: got a shard of x" in text
    assert dropout(x, 2) == []
    fusedops.set_policy("triton", fallback="raise")
    with pytest.raises(fusedops.NoBackendError, match=r"triton +got a shard of x"):
        fusedops.bias_dropout(x, None, 0.5, seed=1)
    fusedops.bias_dropout(whole, None, 0.5, seed=1)
    fusedops.set_policy("eager", fallback="raise")
    assert dropout(x, 3) == []


@check
def the_registered_op_and_inference_mode(mesh: DeviceMesh, op: Op) -> None:
    args = call_of(op)
    want = public(op)(*args)
    function = partial(call_registered, op.name)
    parts = spread(op, args, mesh, first_cut(op, args))
    torch.testing.assert_close([y.full_tensor() for y in outputs(function(*parts))], [*outputs(want)])
    with torch.inference_mode():
        found = outputs(public(op)(*spread(op, args, mesh, first_cut(op, args))))
        torch.testing.assert_close([y.full_tensor() for y in found], [*outputs(want)])


@check
def a_rank_outside_the_mesh_gets_empty_results(mesh: DeviceMesh, op: Op) -> None:
    """Of the whole's shape, and gradients too, as those of torch's ops; the ranks of the mesh compute theirs."""
    inside = distributed.get_rank() > 0
    part = DeviceMesh("cpu", list(range(1, mesh.size())))
    args = call_of(op)
    mine = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    whole = leaves(op, mine)
    ys = outputs(public(op)(*mine))
    sum(y.sum() for y in ys).backward()
    parts = spread(op, args, part, first_cut(op, args))
    cut = leaves(op, parts)
    zs = outputs(public(op)(*parts))
    # not backward(): torch cannot copy a gradient into .grad there
    grads = torch.autograd.grad(zs, [*cut.values()], [torch.ones_like(z) for z in zs])
    for got, want in [*zip(zs, ys), *zip(grads, (whole[name].grad for name in cut))]:
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert inside or got.to_local().shape == (0,)
        if inside:
            torch.testing.assert_close(got.full_tensor(), want)


@check
def a_seed_is_not_sent_to_a_rank_outside_the_mesh(mesh: DeviceMesh) -> None:
    part = DeviceMesh("cpu", list(range(1, mesh.size())))
    y = fusedops.bias_dropout(distribute_tensor(torch.ones(4, 6), part, [Replicate()]), None, 0.5)
    assert y.shape == (4, 6)
    assert y.to_local().shape == ((4, 6) if distributed.get_rank() > 0 else (0,))


@check
def compiled(mesh: DeviceMesh, op: Op) -> None:
    """In one graph, with gradients. Of every second op a batch of one: the second rank has none of it."""
    args = call_of(op, batch=1 if [*testing.OPS].index(op.name) % 2 else BATCH)
    mine = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    whole = leaves(op, mine)
    ys = outputs(public(op)(*mine))
    sum(y.sum() for y in ys).backward()
    parts = spread(op, args, mesh, first_cut(op, args))
    cut = leaves(op, parts)
    torch._dynamo.reset()
    zs = outputs(torch.compile(public(op), backend="aot_eager", fullgraph=True)(*parts))
    sum(z.sum() for z in zs).backward()
    torch.testing.assert_close([z.full_tensor() for z in zs], [*ys])
    for name, leaf in cut.items():
        torch.testing.assert_close(leaf.grad.full_tensor(), whole[name].grad)


@check
def second_derivatives(mesh: DeviceMesh, op: Op) -> None:
    """Of the reference, which torch shards; it refuses those whose mask is made in plain torch."""
    args = list(call_of(op, torch.float64))
    parts = spread(op, args, mesh, first_cut(op, args))
    found: list[Tensor] = []
    for call in (args, parts):
        x = call[0].requires_grad_()
        try:
            (slope,) = torch.autograd.grad(outputs(public(op)(*call))[0].pow(3).sum(), x, create_graph=True)
            # a mask of bounds is a DTensor as they are
            if call is parts and {"seed", "window"} & {*op.parameters} and not ends_of_groups(op.name):
                with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                    torch.autograd.grad(slope.square().sum(), x)
                return
            found += torch.autograd.grad(slope.square().sum(), x)
        except RuntimeError as error:  # torch has no matmul of more than 2 dims then
            if call is parts and "Cannot flatten unevenly sharded tensor" in str(error):
                return
            raise
    torch.testing.assert_close(found[1].full_tensor(), found[0])
