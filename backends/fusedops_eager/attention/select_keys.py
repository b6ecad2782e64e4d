"""select_keys in plain torch, in chunks of queries: the scores of a chunk, and never those of all queries."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import masks
from fusedops.dtypes import arithmetic, no_autocast
from fusedops.ops.attention.arguments import SelectKeysArgs
from fusedops_eager.attention._attention import CHUNK


def select_keys(a: SelectKeysArgs) -> Tensor:
    """Compute the op on any device."""
    batch, queries, heads, _ = a.q.shape
    keys = a.k.shape[1]
    index = a.q.new_full((batch, queries, a.count), -1, dtype=torch.int32)
    if not keys or not index.numel():
        return index
    band = masks.band(queries, keys, a.causal, None)
    mask = None if a.mask is None else a.mask.view(torch.uint8).expand(batch, queries, keys)
    one = max(heads, 1) * keys
    rows = min(queries, max(1, CHUNK // one))
    several = min(batch, max(1, CHUNK // (one * rows))) if rows == queries else 1
    with no_autocast(a.q.device.type):
        for b in range(0, batch, several):
            for i in range(0, queries, rows):
                at = slice(b, b + several), slice(i, i + rows)
                scores = _scores(a, *at)
                hidden = masks.from_band(scores.shape[1], keys, band, a.q.device, i)
                if mask is not None:
                    masked = mask[at] != 0
                    hidden = masked if hidden is None else hidden | masked
                index[at] = _best(scores, hidden, a.count)
    return index


def _scores(a: SelectKeysArgs, b: slice, i: slice) -> Tensor:
    """Return the scores of some queries, (b, rows, T)."""
    dtype = arithmetic(a.q, a.weights)
    q, k, weights = a.q[b, i].to(dtype), a.k[b].to(dtype), a.weights[b, i].to(dtype)
    products = (q.flatten(1, 2) @ k.transpose(-2, -1)).view(*q.shape[:3], k.shape[1])
    products = products.mul_(a.scale).relu_()
    return (weights[..., None, :] @ products)[..., 0, :]


def _best(scores: Tensor, hidden: Tensor | None, count: int) -> Tensor:
    """Return the indices of the largest scores of each row, in rising order, -1 after the last.

    Numbers become integers of the same order, of which the least stands for a hidden key and the largest for NaN: the
    last one that is chosen is found without a sort, and with it the others.
    """
    integers = torch.int64 if scores.dtype == torch.float64 else torch.int32
    info, keys = torch.iinfo(integers), scores.shape[-1]
    bits = (scores + 0.0).view(integers)  # -0 is 0
    ranks = torch.where(bits < 0, bits ^ info.max, bits).masked_fill_(scores.isnan(), info.max)
    if hidden is not None:
        ranks.masked_fill_(hidden, info.min)
    least = ranks.topk(min(count, keys), -1).values[..., -1:]
    above, ties = ranks > least, (ranks == least) & (ranks > info.min)
    chosen = above | (ties & (ties.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    places = torch.where(chosen, chosen.cumsum(-1) - 1, count)
    result = scores.new_full((*scores.shape[:-1], count + 1), -1, dtype=torch.int32)
    numbers = torch.arange(keys, dtype=torch.int32, device=scores.device).expand(scores.shape)
    return result.scatter_(-1, places, numbers)[..., :count]
