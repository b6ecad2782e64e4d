"""The rules of attention for DTensors: batch, heads and the sequence; for parts of one, all dims but the last; for
packed sequences, heads.

A sequence that several ranks share (Liu et al. 2023, arXiv:2310.01889): a rank computes its own queries with its own
keys, then with those of the rank one place before it, two places before, and so on around the ring, and merges the
results. Each shard comes from the rank that owns it, cut to the keys from the first to the last that one of the queries
can see by ``causal`` and ``window``: none where all are masked, those at the end for a window. The next one is on its
way while one is computed.

Backward gets the keys in the same way, and sends each shard's gradient back to its owner, which sums them. It computes
the result of a shard again: ``out`` is a sum of the results weighted by ``exp(lse_part - lse)``, so each has a gradient
of its own, and its lse too. So any kernel of the op serves a shard, forward and backward.

An all-gather of the keys would send no fewer of them, and keep the whole sequence on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fusedops import masks
from fusedops._contract.constraint import is_tensor
from fusedops._contract.values import Combined, Ranks, Sharding
from fusedops._torch import TENSOR_TYPES
from fusedops.dtypes import compute_dtype
from fusedops.ops.attention.attention import attention
from fusedops.ops.attention.merge_attention import merge_attention

_SEQUENCE = -2
_NO_KEYS = slice(0, 0)


class Block(NamedTuple):
    """A call of attention for the queries of one shard and the keys of another.

    Attributes:
        rows: the queries that see a key, in their shard.
        keys: the keys from the first to the last that is seen, in theirs.
        causal: of the call; False is "none".
        window: of the call.
    """

    rows: slice
    keys: slice
    causal: str | bool
    window: tuple[int, int] | None


def block_of(queries: tuple[int, int], keys: tuple[int, int], band: masks.Band) -> Block | None:
    """Return the block of a call for some of its queries and keys, or None where none is seen.

    Args:
        queries: the first of them in the whole, and the end.
        keys: likewise.
        band: of the whole, from :func:`fusedops.masks.band`.

    >>> block_of((4, 8), (0, 4), (-2, 0))  # window (2, 0): query 4 sees keys 2 and 3 of another shard, query 5 key 3
    Block(rows=slice(0, 2, None), keys=slice(2, 4, None), causal=False, window=(0, 2))
    """
    # the lowest and the highest visible key - query, counted in the shards
    low, high = (None if side is None else side + queries[0] - keys[0] for side in band)
    many_queries, many_keys = queries[1] - queries[0], keys[1] - keys[0]
    first = 0 if high is None else max(0, -high)
    end = many_queries if low is None else min(many_queries, many_keys - low)
    start = 0 if low is None else max(0, low + first)
    stop = many_keys if high is None else min(many_keys, high + end)
    if first >= end or start >= stop:
        return None
    rows, columns = slice(first, end), slice(start, stop)
    size, length = end - first, stop - start
    # now of these queries and keys alone; a side that masks none of them is open
    low = None if low is None or low + first - start <= 1 - size else low + first - start
    high = None if high is None or high + first - start >= length - 1 else high + first - start
    if low is None and high is None:
        return Block(rows, columns, False, None)
    diagonal = length - size  # at the lower right: not above high, nor below low
    causal: str | bool = "upper_left" if high == 0 else "lower_right" if high == diagonal else False
    if causal == "upper_left":
        diagonal = 0
    left = length if low is None else diagonal - low
    right = size if high is None else high - diagonal
    return Block(rows, columns, causal, None if causal and low is None else (left, right))


class _Call:
    """A rank's call, as blocks of its queries and of the keys of each rank.

    Args:
        given: this rank's arguments by name, of forward or of backward.
        ranks: those of the call.
        after: in backward the gradients of the outputs, after which keys are sent.
    """

    def __init__(self, given: Mapping[str, Any], ranks: Ranks, after: Sequence[Tensor] = ()) -> None:
        length, keys = ranks.shapes["q"][2], ranks.shapes["k"][2]
        self._given, self._ranks = given, ranks
        self._after = after
        self._band = masks.band(length, keys, given["causal"], given["window"])
        self._index = ranks.place(_SEQUENCE)
        bounds = ranks.bounds(_SEQUENCE, length)
        self._queries = [*pairwise(bounds)]
        self._count = len(self._queries)
        self._steps: list[int] = []  # in which some rank gets keys
        self._keys = [(0, keys)] * self._count
        if given["k"].shape[2] != keys:  # they are sharded
            bounds = ranks.bounds(_SEQUENCE, keys)
            self._keys = [*pairwise(bounds)]
            every = range(self._count)
            self._steps = [step for step in every[1:] if any(self._block(rank, rank - step) for rank in every)]
        self.blocks = [self._block(self._index, self._index - step) for step in (0, *self._steps)]

    def _block(self, rank: int, owner: int) -> Block | None:
        """Return the block of a rank's queries and an owner's keys."""
        return block_of(self._queries[rank % self._count], self._keys[owner % self._count], self._band)

    def sent_keys(self, step: int) -> slice:
        """Return this rank's keys that the rank ``step`` places after it gets."""
        block = self._block(self._index + step, self._index)
        return _NO_KEYS if block is None else block.keys

    def shards(self) -> Iterator[tuple[int, Block | None, Tensor, Tensor]]:
        """Yield this rank's own keys, then those of each step: the step, the block, the keys and values that it has."""
        k, v = self._given["k"], self._given["v"]
        sent = self._send_keys(self._steps[0]) if self._steps else None
        own = self.blocks[0]
        keys = _NO_KEYS if own is None else own.keys
        yield 0, own, k[:, :, keys], v[:, :, keys]
        for at, (step, block) in enumerate(zip(self._steps, self.blocks[1:]), 1):
            assert sent is not None
            message = sent()
            sent = self._send_keys(self._steps[at]) if at < len(self._steps) else None
            shapes = [(*each.shape[:2], _length(block), each.shape[3]) for each in (k, v)]
            keys_there, values_there = _unpacked(message, shapes)
            yield step, block, keys_there, values_there

    def _send_keys(self, step: int) -> Callable[[], Tensor]:
        k, v = self._given["k"], self._given["v"]
        keys = self.sent_keys(step)
        received = self._block(self._index, self._index - step)
        message = _after(torch.cat([each[:, :, keys].flatten() for each in (k, v)]), *self._after)
        of_key = k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])
        return self._ranks.exchange(message, _SEQUENCE, step, of_key * _length(received))

    def own_arguments(self, step: int, block: Block) -> dict[str, Any]:
        """Return q, the mask, causal and window of a block."""
        mask = self._given["mask"]
        if mask is not None:
            first = self._keys[(self._index - step) % self._count][0]
            if mask.shape[-1] != 1:
                mask = mask[..., first + block.keys.start : first + block.keys.stop]
            if mask.dim() > 1 and mask.shape[-2] != 1:  # of one row there is no block without it
                mask = mask[..., block.rows, :]
        return {"q": self._given["q"][:, :, block.rows], "mask": mask, "causal": block.causal, "window": block.window}

    def attend(self, step: int, block: Block, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse of a block."""
        scale, backend = self._given["scale"], self._ranks.backend
        return attention(k=k, v=v, scale=scale, return_lse=True, backend=backend, **self.own_arguments(step, block))


def _length(block: Block | None) -> int:
    return 0 if block is None else block.keys.stop - block.keys.start


def _after(tensor: Tensor, *others: Tensor) -> Tensor:
    """Return the tensor, for a compiler as a result of the others too.

    A graph of torch.compile has no order but that of results. What a rank sends to others would not be in it where the
    rank gets nothing for it, and would move from backward to forward where it follows from the inputs alone, on some
    ranks and not on the others, which would wait for it.
    """
    if type(tensor) in TENSOR_TYPES:  # not traced
        return tensor
    for other in others:
        tensor = tensor + other[:0].sum().to(tensor.dtype)
    return tensor


def _unpacked(message: Tensor, shapes: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Return the tensors of these shapes of a flat message, one after the other."""
    chunks = cast("tuple[Tensor, ...]", message.split([math.prod(shape) for shape in shapes]))
    return tuple(chunk.view(shape) for chunk, shape in zip(chunks, shapes))


def _forward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Compute out and lse of this rank's queries."""
    q, v = given["q"], given["v"]
    wide, call = compute_dtype(q.dtype), _Call(given, ranks)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], -math.inf, dtype=wide)
    first = True
    for step, block, keys, values in call.shards():
        if block is None:
            out, lse = (_after(each, keys) for each in (out, lse))
            continue
        result, its_lse = call.attend(step, block, keys, values)
        all_rows = block.rows == slice(0, q.shape[2])
        if first and all_rows:
            out, lse = result, its_lse
        elif all_rows:
            out, lse = merge_attention(out.to(wide), lse, result, its_lse)  # rounded once, at the end
        else:
            rows = (slice(None), slice(None), block.rows)
            out = out.to(wide)
            out[rows], lse[rows] = merge_attention(out[rows], lse[rows], result, its_lse)
        first = False
    return out.to(q.dtype), lse


def _backward(given: Mapping[str, Any], ranks: Ranks) -> tuple[Tensor | None, ...]:
    """Compute the gradients of this rank's queries, keys and values."""
    q, *keys_and_values = (given[name] for name in ("q", "k", "v"))
    of_q, *needs = given["needs"]
    grads = given["grad_out"], given["grad_lse"]
    wide, call = compute_dtype(q.dtype), _Call(given, ranks, grads)
    dq = _zeros(q, wide)
    sums = [_zeros(each, wide) for each, need in zip(keys_and_values, needs) if need]

    def add_returned(keys: slice, wait: Callable[[], Tensor]) -> None:
        """Add the gradients of this rank's keys that another one computed."""
        message = wait()
        shapes = [(*each.shape[:2], keys.stop - keys.start, each.shape[3]) for each in sums]
        for index, gradient in enumerate(_unpacked(message, shapes)):
            sums[index] = _after(sums[index], message)
            sums[index][:, :, keys] += gradient

    on_the_way: tuple[slice, Callable[[], Tensor]] | None = None
    for step, block, k, v in call.shards():
        if block is None:
            dq, own = _after(dq, k), [each for each, need in zip((k, v), needs) if need]  # without elements
        else:
            gradients = _block_gradients(given, ranks, call, step, block, k, v)
            own = [each for each, need in zip(gradients[1:], needs) if need]
            if of_q:
                dq[:, :, block.rows] += gradients[0]
        if step == 0 and block is not None:
            for whole, gradient in zip(sums, own):
                whole[:, :, block.keys] += gradient
        elif step != 0 and sums:
            if on_the_way is not None:
                add_returned(*on_the_way)
            keys = call.sent_keys(step)
            message = _after(torch.cat([gradient.flatten() for gradient in own]), *grads)
            size = q.shape[0] * given["k"].shape[1] * sum(whole.shape[3] for whole in sums)
            on_the_way = keys, ranks.exchange(message, _SEQUENCE, -step, size * (keys.stop - keys.start))
    if on_the_way is not None:
        add_returned(*on_the_way)
    of_keys = iter(sums)
    dk, dv = (next(of_keys).to(q.dtype) if need else None for need in needs)
    return dq.to(q.dtype) if of_q else None, dk, dv


def _zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def _block_gradients(
    given: Mapping[str, Any], ranks: Ranks, call: _Call, step: int, block: Block, k: Tensor, v: Tensor
) -> list[Tensor]:
    """Return the gradients of q, k and v of a block."""
    rows = (slice(None), slice(None), block.rows)
    names = ("grad_out", "grad_lse", "out", "lse")
    grad_out, grad_lse, out, lse = (given[name][rows].contiguous() for name in names)
    own = call.own_arguments(step, block)
    causal = own.pop("causal") or "none"
    if sum(each is not None for each in call.blocks) == 1:  # its results are those of the call
        results = {"grad_out": grad_out, "grad_lse": grad_lse, "out": out, "lse": lse}
        return [*ranks.run(k=k, v=v, causal=causal, **results, **own)]
    own_out, own_lse = call.attend(step, block, k, v)
    weight = torch.exp(own_lse - lse).masked_fill(own_lse == -math.inf, 0.0)
    g, difference = grad_out.to(lse.dtype), own_out.to(lse.dtype) - out.to(lse.dtype)
    of_lse = (g * difference).sum(-1)
    if given["return_lse"]:
        of_lse = of_lse + grad_lse
    results = {
        "grad_out": (weight[..., None] * g).to(grad_out.dtype),
        "grad_lse": weight * of_lse,
        "out": own_out,
        "lse": own_lse,
        "return_lse": True,
    }
    return [*ranks.run(k=k, v=v, causal=causal, **results, **own)]


def _dims_of(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of q that those of lse and of its gradient go with, and those of keys and values.

    Keys that are replicated along their sequence stay whole beside queries that are sharded.
    """
    dims: dict[str, tuple[int | None, ...]] = dict.fromkeys(("lse", "grad_lse"), (-4, -3, -2))
    placements = [at for name in ("k", "v") for at in getattr(given[name], "placements", ())]
    if placements and not any(at.is_shard(2) or at.is_partial() for at in placements):
        dims.update(dict.fromkeys(("k", "v"), (-4, -3, None, -1)))
    return dims


def _never(given: Mapping[str, Any]) -> bool:
    """Return False: shards of the batch and of the heads are other calls."""
    return False


def _whole_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dim of the heads if a rank's part would split a group: a group's query heads share a key head."""
    heads = given["k"].shape[1]
    if heads <= 1:
        return ()  # it is whole on each rank
    # a mask or a gradient that is sharded alone cuts the other tensors too
    dims = {name: _dims_of(given).get(name, range(-each.ndim, 0)) for name, each in given.items() if is_tensor(each)}
    mesh = given["k"].device_mesh
    placements = {name: given[name].placements for name in dims}
    ranks = math.prod(
        mesh.size(at)
        for at in range(mesh.ndim)
        if any(-3 in dims[name] and each[at].is_shard(dims[name].index(-3)) for name, each in placements.items())
    )
    return (-3,) if heads % ranks else ()


SHARDING = Sharding(
    whole=(-2, -1),
    whole_of=_whole_of,
    dims_of=_dims_of,
    combined=Combined((-2,), _never, _forward, _backward, by_kernels=True),
    reason="a score needs whole vectors, a mask's row all its keys, and a group all its query heads",
)


# ------------------------------------------------------------------------------------ merge_attention, varlen_attention


def _dims_of_lse(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of out_a that the dims of each lse and of its gradient correspond to."""
    rows = tuple(range(-given["out_a"].ndim, -1))
    return dict.fromkeys(("lse_a", "lse_b", "lse", "grad_lse"), rows)


MERGE = Sharding(whole=(-1,), dims_of=_dims_of_lse, reason="a row needs all its columns")


def _dims_of_packed(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of q that the dims of lse and of its gradient correspond to."""
    return dict.fromkeys(("lse", "grad_lse"), (-3, -2))


def _whole_of_packed(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dim of the heads if a rank's part would split a group: a group's query heads share a key head."""
    heads = given["k"].shape[1]
    if heads <= 1:
        return ()
    mesh = given["k"].device_mesh
    cut = [each.placements for name, each in given.items() if is_tensor(each) and not name.startswith("cu_seqlens")]
    ranks = math.prod(mesh.size(at) for at in range(mesh.ndim) if any(each[at].is_shard(1) for each in cut))
    return (-2,) if heads % ranks else ()


PACKED = Sharding(
    whole=(-3, -1),
    whole_of=_whole_of_packed,
    dims_of=_dims_of_packed,
    replicated=("cu_seqlens_q", "cu_seqlens_k"),
    reason="a sequence needs all its keys, and a group all its query heads",
)


def _dims_of_pages(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of q that the dims of the other tensors correspond to: the heads alone are sharded."""
    of_heads = (None, None, -2, None)
    return {"lse": (-3, -2), **dict.fromkeys(("k", "v", "k_scale", "v_scale"), of_heads)}


def _whole_of_pages(given: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the dim of the heads if a rank's part would split a group."""
    mesh, heads = given["q"].device_mesh, {"q": 1, "k": 2, "v": 2}
    cut = [at for at in range(mesh.ndim) if any(given[n].placements[at].is_shard(dim) for n, dim in heads.items())]
    return (-2,) if given["k"].shape[2] % math.prod(map(mesh.size, cut)) else ()


PAGED = Sharding(
    whole=(-3, -1),
    whole_of=_whole_of_pages,
    dims_of=_dims_of_pages,
    replicated=("cu_seqlens_q", "block_table", "seqused_k"),
    reason="a sequence needs all its keys, and a group all its query heads",
)


# ---------------------------------------------------------------------------------------- select_keys, sparse_attention


def _dims_of_sparse(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of q that those of lse, of its gradient and of indices correspond to."""
    return {**dict.fromkeys(("lse", "grad_lse"), (-4, -3, -2)), "indices": (-4, -3, -2, None)}


SPARSE = Sharding(
    whole=(-2, -1),
    whole_of=_whole_of,
    dims_of=_dims_of_sparse,
    reason="a score needs whole vectors, a query all its keys, and a group all its query heads",
)


def _dims_of_selection(given: Mapping[str, Any]) -> Mapping[str, tuple[int | None, ...]]:
    """Return the dims of q that the dims of the other tensors correspond to: the batch alone is sharded."""
    rank = 0 if given.get("mask") is None else given["mask"].ndim
    rows = (-4, None, None)
    return {"k": rows, "weights": rows, "index": rows, "mask": rows[3 - rank :]}


SELECT = Sharding(
    whole=(-3, -2, -1), dims_of=_dims_of_selection, reason="a query needs all its keys, and its place among all queries"
)
