"""Attention in chunks of queries: the scores of a chunk, and never those of the whole.

A chunk has some queries of some heads, with all query heads of a key head, and the keys between the lowest and the
highest that one of its queries sees. Backward computes the probabilities again from lse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fusedops import masks
from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.ops.attention.arguments import AttentionArgs, AttentionGradArgs

# Scores of a chunk: 4 MiB of float32, which stays in the cache of two cores between its matmuls
CHUNK = 1024 * 1024
_LARGE = 2.0**-7  # times 1 / eps, an lse whose rounding changes the probabilities by 1/128


class Part(NamedTuple):
    """A chunk of a call: slices of the batch, the key heads, the queries and the keys.

    Attributes:
        b: of the batch.
        n: of the key heads.
        i: of the queries.
        j: of the keys.
    """

    b: slice
    n: slice
    i: slice
    j: slice


class Call:
    """The tensors of a call, with query heads split into key heads and groups, and its masks by chunk."""

    def __init__(self, a: AttentionArgs | AttentionGradArgs) -> None:
        q, k, mask = a.q, a.k, a.mask
        self.dtype = compute_dtype(q.dtype)
        self.scale = 1.0 / math.sqrt(max(q.shape[3], 1)) if a.scale is None else a.scale
        self.heads, self.group = k.shape[1], q.shape[1] // max(k.shape[1], 1)
        self.sq, self.sk = q.shape[2], k.shape[2]
        self.q = self.grouped(q)
        self.k = k
        self.v = a.v
        self.band = masks.band(self.sq, self.sk, a.causal, a.window)
        self.mask = None if mask is None else self._grouped_mask(mask)
        self.masks_some = mask is not None or self.band != (None, None)

    def grouped(self, tensor: Tensor) -> Tensor:
        """Return a view (B, Nk, G, ...) of a tensor (B, Nq, ...)."""
        return cast("Tensor", tensor.unflatten(1, (self.heads, self.group)))

    def _grouped_mask(self, mask: Tensor) -> Tensor:
        """Return the mask as (B or 1, Nk or 1, G or 1, Sq or 1, Sk or 1), uint8."""
        mask = mask.view(torch.uint8)  # a bool may have any byte for True, and is compared with 0
        mask = mask[(None,) * (4 - mask.dim())]
        return mask[:, :, None] if mask.shape[1] == 1 else self.grouped(mask)

    def parts(self) -> Iterator[list[Part]]:
        """Yield for each slice of batch and key heads its chunks of queries."""
        batch = self.q.shape[0]
        one = self.group * self.sk  # the scores of a query
        rows = min(self.sq, max(1, CHUNK // one))
        heads = min(self.heads, max(1, CHUNK // (one * rows))) if rows == self.sq else 1
        several = min(batch, max(1, CHUNK // (one * rows * heads))) if heads == self.heads else 1
        for b in range(0, batch, several):
            for n in range(0, self.heads, heads):
                yield [
                    Part(slice(b, b + several), slice(n, n + heads), slice(i, min(i + rows, self.sq)), keys)
                    for i in range(0, self.sq, rows)
                    for keys in [self._keys(i, min(i + rows, self.sq))]
                ]

    def _keys(self, first: int, end: int) -> slice:
        """Return the keys that the queries from ``first`` to ``end`` see by the band."""
        low, high = self.band
        start = 0 if low is None else min(max(0, first + low), self.sk)
        stop = self.sk if high is None else min(max(start, end + high), self.sk)
        return slice(start, stop)

    def wide(self, tensor: Tensor, part: Part, *more: slice) -> Tensor:
        """Return a part of a tensor in the arithmetic's dtype."""
        return tensor[(part.b, part.n, *more)].to(self.dtype)

    def masked(self, part: Part) -> list[Tensor]:
        """Return what masks a chunk, each broadcastable to its scores (b, n, G, rows, keys)."""
        rows, keys = part.i.stop - part.i.start, part.j.stop - part.j.start
        outside = masks.from_band(rows, keys, self.band, self.q.device, part.i.start, part.j.start)
        each = [] if outside is None else [outside]
        if self.mask is not None:
            slices = (part.b, part.n, slice(None), part.i, part.j)
            each.append(self.mask[tuple(s if n > 1 else slice(None) for s, n in zip(slices, self.mask.shape))] != 0)
        return each

    def scores(self, q: Tensor, k: Tensor, masked: list[Tensor]) -> Tensor:
        """Return the scores (b, n, G, rows, keys) of a chunk, -inf where masked.

        Args:
            q: (b, n, G, rows, D).
            k: (b, n, keys, D).
            masked: from :meth:`masked`.
        """
        scores = (q.flatten(2, 3) @ k.transpose(-2, -1)).view(*q.shape[:4], k.shape[2])
        scores *= self.scale
        for each in masked:
            scores.masked_fill_(each, -math.inf)
        return scores


def attention(a: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any sizes and masks, with the scores of some queries at a time."""
    with no_autocast(a.q.device.type):
        return attention_forward(a)


def attention_backward(a: AttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v, with the probabilities of some queries at a time."""
    with no_autocast(a.q.device.type):
        return attention_gradients(a)


def attention_forward(a: AttentionArgs, call: Call | None = None) -> tuple[Tensor, Tensor]:
    """Compute out and lse. ``call``: where its chunks hide more than those of the arguments."""
    call, (q, k, v, *_) = call or Call(a), a
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=call.dtype)
    if not call.sk:
        return out.zero_(), lse.fill_(-math.inf)
    if not lse.numel():
        return out, lse
    out5, lse4 = call.grouped(out), call.grouped(lse)
    exact = not call.masks_some or v.is_meta or bool(v.isfinite().all())
    for parts in call.parts():
        keys, values = call.wide(k, parts[0]), call.wide(v, parts[0])
        for part in parts:
            queries = call.wide(call.q, part, slice(None), part.i)
            masked = call.masked(part)
            p = call.scores(queries, keys[:, :, part.j], masked)
            at = (part.b, part.n, slice(None), part.i)
            if not p.shape[-1]:
                out5[at], lse4[at] = 0.0, -math.inf
                continue
            top = p.amax(-1, keepdim=True)
            top = top.masked_fill_(top == -math.inf, 0.0)  # of a fully masked row
            total = p.sub_(top).exp_().sum(-1, keepdim=True)
            lse4[at] = torch.where(top == math.inf, top, top + total.log())[..., 0]
            seen = values[:, :, part.j]
            product = p.flatten(2, 3) @ (seen if exact else _finite(seen))
            y = product.view(*p.shape[:4], -1) / total.masked_fill(total == 0, 1.0)
            out5[at] = y if exact else y + _not_finite(p, masked, seen)
    return out, lse


def attention_gradients(
    a: AttentionGradArgs, call: Call | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of q, k and v from out and lse. ``call``: as of :func:`attention_forward`."""
    call, q, k, v, out, lse = call or Call(a), a.q, a.k, a.v, a.out, a.lse
    dq, dk, dv = (
        torch.zeros_like(each, memory_format=torch.contiguous_format) if need else None
        for each, need in zip((q, k, v), a.needs)
    )
    if not (call.sk and lse.numel()):
        return dq, dk, dv
    dq5 = None if dq is None else call.grouped(dq)
    grad5, out5, lse4 = call.grouped(a.grad_out), call.grouped(out), call.grouped(lse)
    lse_grad4 = call.grouped(a.grad_lse) if a.return_lse else None
    exact = not call.masks_some or v.is_meta or bool(k.isfinite().all() & v.isfinite().all())
    # if an lse of another kernel is large, exp(score - lse) is inaccurate. On a CPU alone: a device would be waited for
    large = lse.is_cpu and not torch.linalg.vector_norm(lse, math.inf).item() <= _LARGE / torch.finfo(lse.dtype).eps
    for parts in call.parts():
        keys, values = call.wide(k, parts[0]), call.wide(v, parts[0])
        clean_keys = keys
        if not exact:  # 0 * NaN of a masked key is NaN
            clean_keys, values = _finite(keys), _finite(values)
        dkeys = torch.zeros_like(keys) if a.needs[1] else None
        dvalues = torch.zeros_like(values) if a.needs[2] else None
        for part in parts:
            at = (part.b, part.n, slice(None), part.i)
            queries, g = call.wide(call.q, part, slice(None), part.i), grad5[at].to(call.dtype)
            row_lse = lse4[at][..., None]
            row_lse = row_lse.masked_fill(row_lse == math.inf, math.nan)  # such a row's gradients are NaN
            delta = (g * out5[at]).sum(-1, keepdim=True)
            if lse_grad4 is not None:
                delta -= lse_grad4[at][..., None]
            p = call.scores(queries, keys[:, :, part.j], call.masked(part))
            if large:
                row_lse = torch.where(row_lse.isfinite(), p.logsumexp(-1, keepdim=True), row_lse)
            if call.masks_some:
                dead = row_lse == -math.inf
                row_lse, delta = row_lse.masked_fill(dead, 0.0), delta.masked_fill(dead, 0.0)
                queries, g = queries.masked_fill(dead, 0.0), g.masked_fill(dead, 0.0)
            p = p.sub_(row_lse).exp_()
            rows_g = g.flatten(2, 3)
            if dvalues is not None:
                dvalues[:, :, part.j] += p.flatten(2, 3).transpose(-2, -1) @ rows_g
            if dq5 is None and dkeys is None:
                continue
            ds = (rows_g @ values[:, :, part.j].transpose(-2, -1)).view(p.shape)
            if large:  # the same products on both sides of the difference: what they round differently would be scaled
                delta += (p * ds).sum(-1, keepdim=True) - (g * out5[at]).sum(-1, keepdim=True)
            ds = ds.sub_(delta).mul_(p).mul_(call.scale).flatten(2, 3)
            if dq5 is not None:
                dq5[at] = (ds @ clean_keys[:, :, part.j]).view(queries.shape)
            if dkeys is not None:
                dkeys[:, :, part.j] += ds.transpose(-2, -1) @ queries.flatten(2, 3)
        for whole, sums in ((dk, dkeys), (dv, dvalues)):
            if whole is not None and sums is not None:
                whole[parts[0].b, parts[0].n] = sums
    return dq, dk, dv


def _finite(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(~tensor.isfinite(), 0.0)


def _not_finite(p: Tensor, masked: list[Tensor], v: Tensor) -> Tensor:
    """Return what the numbers of v that are not finite add to a chunk: 0, inf, -inf or NaN.

    Args:
        p: (b, n, G, rows, keys), in proportion to the probabilities.
        masked: of the same chunk.
        v: (b, n, keys, Dv).
    """
    sees = torch.ones_like(p)
    for each in masked:
        sees.masked_fill_(each, 0.0)
    weighs = (p > 0).to(p.dtype)

    def count(rows: Tensor, which: Tensor) -> Tensor:
        return (rows.flatten(2, 3) @ which.to(p.dtype)).view(*p.shape[:4], -1)

    nan = count(sees, v.isnan()) + count((sees - weighs).clamp_(min=0.0), v.isinf())
    up, down = count(weighs, v == math.inf), count(weighs, v == -math.inf)
    part = torch.zeros_like(up).masked_fill_(up > 0, math.inf).masked_fill_(down > 0, -math.inf)
    return part.masked_fill_((nan > 0) | ((up > 0) & (down > 0)), math.nan)
