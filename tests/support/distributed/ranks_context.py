"""Checks of attention over a sequence that ranks share: numbers, what is sent, and what a rank keeps."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from calls import outputs
from ranks import check, refused
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fusedops
from fusedops.integrations._sinks import with_sinks

SEQUENCE: list[Placement] = [Shard(2)]
WHOLE: list[Placement] = [Replicate()]


class Case(NamedTuple):
    """A call: numbers of queries and keys, the options, and what is masked."""

    queries: int
    keys: int
    options: dict[str, Any] = {}
    masked: str = ""  # "rows", "padding" or "keys", of one row
    keys_at: list[Placement] = SEQUENCE
    queries_at: list[Placement] = SEQUENCE


CASES = (
    Case(13, 13),
    Case(13, 13, {"causal": True}),
    Case(13, 13, {"causal": True, "return_lse": True}, "rows"),
    Case(13, 13, {"causal": True, "window": (4, 0), "return_lse": True}),
    Case(13, 13, {"window": (2, 3)}),
    Case(13, 13, {"window": (0, 9)}, "padding"),
    Case(6, 17, {"causal": "lower_right", "window": (7, 0)}),
    Case(6, 17, {"causal": "upper_left", "return_lse": True}),
    Case(17, 6, {"causal": "lower_right"}),  # the first queries see no key
    Case(17, 6, {"causal": "upper_left", "window": (3, 0), "return_lse": True}),  # the last ones see none
    Case(17, 7, {"window": (5, 2)}, "rows"),
    Case(9, 3, {"return_lse": True}, "keys"),  # shards without keys on 4 ranks
    Case(2, 14, {"causal": "lower_right"}),  # and without queries
    Case(1, 1, {"causal": True}),
    Case(5, 0),
    Case(0, 5),
    Case(8, 8, {"causal": True, "scale": -0.3}, "rows", WHOLE),  # the keys are whole beside sharded queries
    Case(9, 12, {"causal": "lower_right", "window": (6, 0), "return_lse": True}, "", WHOLE),
    Case(7, 12, {"causal": "lower_right"}, "", SEQUENCE, WHOLE),  # queries are cut as the keys are
)


def meshes(mesh: DeviceMesh) -> list[DeviceMesh]:
    """Return the mesh, and of 4 ranks one of 3 of them."""
    return [mesh, DeviceMesh("cpu", [0, 1, 2])] if mesh.size() == 4 else [mesh]


def tensors(case: Case, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q = torch.randn(2, 4, case.queries, 8, dtype=dtype)
    k, v = (torch.randn(2, 2, case.keys, size, dtype=dtype) for size in (8, 6))
    shape = {"rows": (2, 1, case.queries, case.keys), "padding": (2, 1, 1, case.keys), "keys": (case.keys,)}
    return q, k, v, torch.rand(shape[case.masked]) < 0.4 if case.masked else None


def compare(mesh: DeviceMesh, case: Case, dtype: torch.dtype = torch.float64, **limits: float) -> None:
    """Compare results and gradients of shards with those of the whole; with lse, those after a sink of each head."""
    *inputs, mask = tensors(case, dtype)
    sinks = torch.randn(4, dtype=dtype)
    inside = mesh.get_coordinate() is not None
    mine = [each.clone().requires_grad_() for each in inputs]
    ys = outputs(fusedops.attention(*mine, mask, **case.options))
    grads = [torch.randn_like(y) for y in ys]
    places = case.queries_at, case.keys_at, case.keys_at
    parts = [distribute_tensor(each, mesh, at).requires_grad_() for each, at in zip(inputs, places)]
    of_mask = None if mask is None else distribute_tensor(mask, mesh, SEQUENCE if case.masked == "rows" else WHOLE)
    zs = outputs(fusedops.attention(*parts, of_mask, **case.options))
    if len(ys) == 2 and inside:  # a sink is applied to a rank's rows, once
        ys = with_sinks(*ys, sinks), ys[1]
        rows = with_sinks(*(z.to_local() for z in zs), sinks)
        zs = DTensor.from_local(rows, mesh, SEQUENCE, shape=zs[0].shape, stride=zs[0].stride(), run_check=False), zs[1]
    wanted = torch.autograd.grad(ys, mine, grads)
    found = torch.autograd.grad(zs, parts, [distribute_tensor(grad, mesh, SEQUENCE) for grad in grads])
    of_keys = Partial() if case.keys_at is WHOLE else Shard(2)
    assert [each.placements for each in (*zs, *found)] == [(Shard(2),)] * (len(zs) + 1) + [(of_keys,)] * 2
    if not inside:
        return
    names = [*("out", "lse")[: len(zs)], "dq", "dk", "dv"]
    for name, part, whole in zip(names, (*zs, *found), (*ys, *wanted)):
        what = f"{name} of {case} on {mesh.size()}"
        torch.testing.assert_close(part.full_tensor(), whole, msg=lambda text, what=what: f"{what}: {text}", **limits)


@check
def attention_of_a_sequence_is_that_of_the_whole(mesh: DeviceMesh) -> None:
    """Uneven and empty shards, alignments, windows, masks, grouped heads, sinks, whole keys."""
    fusedops.set_policy("eager", fallback="raise")
    for on in meshes(mesh):
        for case in CASES:
            compare(on, case)
    fusedops.set_policy("sdpa")  # whose backward takes no gradient of lse
    for case in CASES[:3]:
        compare(mesh, case, torch.float32, rtol=1e-4, atol=1e-5)
    compare(mesh, CASES[3], torch.bfloat16, rtol=2e-2, atol=6e-2)


@check
def attention_of_a_sequence_for_some_gradients(mesh: DeviceMesh) -> None:
    """Of one tensor alone, of none, in inference mode, and of keys that are sums over the ranks."""
    *inputs, _ = tensors(CASES[7])
    options = {**CASES[7].options, "return_lse": False}
    want = fusedops.attention(*(each.requires_grad_() for each in inputs), **options)
    gradients = torch.autograd.grad(want.sum(), inputs)
    for at, gradient in enumerate(gradients):
        parts = [distribute_tensor(each.detach(), mesh, SEQUENCE) for each in inputs]
        parts[at].requires_grad_()
        (found,) = torch.autograd.grad(fusedops.attention(*parts, **options).sum(), parts[at])
        torch.testing.assert_close(found.full_tensor(), gradient)
    with torch.inference_mode():
        parts = [distribute_tensor(each.detach(), mesh, SEQUENCE) for each in inputs]
        torch.testing.assert_close(fusedops.attention(*parts, **options).full_tensor(), want)
    of_ranks = [
        DTensor.from_local(each.detach() / mesh.size(), mesh, [Partial()], run_check=False) for each in inputs[1:]
    ]
    torch.testing.assert_close(fusedops.attention(parts[0].clone(), *of_ranks, **options).full_tensor(), want)


@check
def attention_of_a_sequence_beside_other_shards(mesh: DeviceMesh) -> None:
    """A mesh of several dims, on which another dim has the batch or the heads; and what is refused."""
    q, k, v, _ = tensors(CASES[0])
    if mesh.size() == 2:
        rows = init_device_mesh("cpu", (2, 1))
        twice = [distribute_tensor(each, rows, [Shard(2), Shard(2)]) for each in (q, k, v)]
        refused(lambda: fusedops.attention(*twice), "attention: got dim -2 sharded on mesh dims 0 and 1, expected one")
        beside = distribute_tensor(torch.zeros(13, 13, dtype=torch.bool), mesh, [Shard(1)])
        parts = [distribute_tensor(each, mesh, SEQUENCE) for each in (q, k, v)]
        refused(lambda: fusedops.attention(*parts, beside), "got mask with Shard(dim=1)", "a mask's row all its keys")
        return
    square = init_device_mesh("cpu", (2, 2))
    want = fusedops.attention(q, k, v, causal=True, window=(5, 0))
    for dim in (0, 1):
        parts = [distribute_tensor(each, square, [Shard(2), Shard(dim)]) for each in (q, k, v)]
        found = fusedops.attention(*parts, causal=True, window=(5, 0))
        assert found.placements == (Shard(2), Shard(dim))
        torch.testing.assert_close(found.full_tensor(), want)


class Sent(TorchDispatchMode):
    """Count the bytes that this rank sends to others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.others: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            message, _, sizes, _ = args
            assert sizes[distributed.get_rank()] == 0
            self.bytes += sum(sizes) * message.dtype.itemsize
        elif func.namespace in ("c10d", "_c10d_functional") and not func.__name__.startswith(("wait", "_wrap")):
            self.others.append(func.__name__)
        return func(*args, **(kwargs or {}))


def visible_keys(case: Case, ranks: int) -> list[list[int]]:
    """Return, by rank and owner, the keys from the first to the last that a query of the rank sees: in plain torch."""
    causal = {True: "upper_left", False: "none"}.get(case.options.get("causal", False), case.options.get("causal"))
    band = fusedops.masks.band(case.queries, case.keys, causal, case.options.get("window"))
    masked = fusedops.masks.from_band(case.queries, case.keys, band)
    seen = torch.ones(case.queries, case.keys) if masked is None else (~masked).float()
    counts: list[list[int]] = []
    for rows in torch.arange(case.queries).chunk(ranks):
        counts.append([])
        for keys in torch.arange(case.keys).chunk(ranks):
            columns = seen[rows][:, keys].amax(0).nonzero().flatten().tolist()
            counts[-1].append(columns[-1] - columns[0] + 1 if columns else 0)
    return counts


@check
def attention_sends_the_keys_that_another_rank_sees(mesh: DeviceMesh) -> None:
    """Each key and value once forward, again backward, where its gradients come back; nothing else is sent."""
    ranks, rank = mesh.size(), distributed.get_rank()
    for case in (
        Case(24, 24),
        Case(24, 24, {"causal": True}),
        Case(24, 24, {"causal": True, "window": (5, 0), "return_lse": True}),
        Case(21, 23, {"causal": "lower_right", "window": (9, 0)}),
        Case(23, 21, {"window": (2, 2)}, "rows"),
    ):
        *inputs, mask = tensors(case, torch.float32)
        parts = [distribute_tensor(each, mesh, SEQUENCE).requires_grad_() for each in inputs]
        of_mask = None if mask is None else distribute_tensor(mask, mesh, SEQUENCE)
        of_key = 2 * 2 * (8 + 6) * 4  # batch, key heads, widths, bytes
        counts = visible_keys(case, ranks)
        others = [other for other in range(ranks) if other != rank]
        given, taken = (sum(each) for each in ([counts[o][rank] for o in others], [counts[rank][o] for o in others]))
        with Sent() as sent:
            ys = outputs(fusedops.attention(*parts, of_mask, **case.options))
        assert (sent.bytes, sent.others) == (given * of_key, []), (case, sent.bytes, sent.others, given * of_key)
        grads = [torch.ones_like(y) for y in ys]
        with Sent() as sent:
            torch.autograd.grad(ys, parts, grads)
        assert (sent.bytes, sent.others) == ((given + taken) * of_key, []), case
        share = 24 // ranks
        if case.options == {}:
            assert given == taken == (ranks - 1) * share
        elif case.options == {"causal": True}:
            assert (given, taken) == ((ranks - 1 - rank) * share, rank * share)
        elif case.queries == case.keys == 24 and share >= 5:
            assert (given, taken) == (5 * (rank < ranks - 1), 5 * (rank > 0))


class Kept(TorchDispatchMode):
    """Follow the memory of the tensors that torch makes: the largest one, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most = 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        results = func(*args, **(kwargs or {}))
        for each in results if isinstance(results, (tuple, list)) else [results]:
            if type(each) is Tensor and not each.is_meta:
                storage = each.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return results


@check
def attention_of_a_sequence_keeps_a_share_of_it(mesh: DeviceMesh) -> None:
    """The largest tensor is that of the keys and values of one shard, and the most at a time falls as 1 / ranks."""
    whole = 2 * 96 * 32 * 4  # the bytes of q, of k and of v
    for on in meshes(mesh):
        if on.get_coordinate() is None:
            continue
        local = [torch.randn(1, 2, 96 // on.size(), 32) for _ in range(3)]
        parts = [DTensor.from_local(each, on, SEQUENCE).requires_grad_() for each in local]
        for options in ({}, {"causal": True}):
            with Kept() as kept:
                y = fusedops.attention(*parts, **options)
                torch.autograd.grad(y, parts, torch.ones_like(y))
            assert kept.largest == 2 * whole // on.size(), options
            assert kept.most <= 30 * whole // on.size(), (options, kept.most * on.size() / whole)


@check
def attention_of_a_sequence_compiled(mesh: DeviceMesh) -> None:
    """In one graph, with gradients."""
    for case in (CASES[0], CASES[3]):
        *inputs, _ = tensors(case._replace(queries=12, keys=12))
        results: list[list[Tensor]] = []
        for compiles in (False, True):
            torch._dynamo.reset()
            call = (
                torch.compile(fusedops.attention, backend="aot_eager", fullgraph=True)
                if compiles
                else fusedops.attention
            )
            parts = [distribute_tensor(each, mesh, SEQUENCE).requires_grad_() for each in inputs]
            zs = outputs(call(*parts, **case.options))
            grads = torch.autograd.grad(sum(z.sum() for z in zs), parts)
            results.append([each.full_tensor() for each in (*zs, *grads)])
        torch.testing.assert_close(results[1], results[0])


@check
def attention_of_a_sequence_has_no_second_derivative(mesh: DeviceMesh) -> None:
    """It is torch's, of the reference on DTensors: right, or refused by torch."""
    q, k, v, _ = tensors(Case(8, 8))
    for options in ({}, {"causal": True}):
        found: list[Tensor] = []
        for call in ([q, k, v], [distribute_tensor(each, mesh, SEQUENCE) for each in (q, k, v)]):
            x = call[0].requires_grad_()
            (slope,) = torch.autograd.grad(fusedops.attention(*call, **options).pow(3).sum(), x, create_graph=True)
            if options and call[0] is not q:
                with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                    torch.autograd.grad(slope.square().sum(), x)
            else:
                found += torch.autograd.grad(slope.square().sum(), x)
        if len(found) == 2:
            torch.testing.assert_close(found[1].full_tensor(), found[0])
