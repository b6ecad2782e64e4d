"""The formulas of attention: forward and backward in plain differentiable torch.

A number that is not finite reaches a row only through a key that the row sees: 0 * NaN is NaN, so the products with
probabilities and their gradients are taken of finite numbers alone, and what the formula gives elsewhere is added.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops import masks
from fusedops._named_tuple import NamedTuple
from fusedops._torch import is_plain, is_traced, is_transformed
from fusedops.constraints import Offsets
from fusedops.dtypes import compute_dtype, no_autocast, upcast
from fusedops.ops.attention.arguments import AttentionGradArgs


def scale_of(q: Any, scale: float | None) -> float:
    """Return the factor of the scores: 1 / sqrt(D) where it is None."""
    return scale if scale is not None else 1.0 / math.sqrt(max(q.shape[-1], 1))


class Scores(NamedTuple):
    """The scores of a call, (B, Nq, Sq, Sk), in the dtype of the arithmetic, and which of them are masked.

    Attributes:
        values: -inf where masked; 0 in rows that are fully masked.
        masked: True where masked, or None.
        dead: (..., 1), True for a fully masked row, or None.
        q: the queries in that dtype, 0 in such rows.
        k: the keys in that dtype, one for each query head, with finite numbers alone.
    """

    values: Tensor
    masked: Tensor | None
    dead: Tensor | None
    q: Tensor
    k: Tensor


def for_each_query_head(tensor: Tensor, q: Tensor) -> Tensor:
    """Return keys or values with one head for each query head."""
    b, heads, length, width = tensor.shape
    group = q.shape[1] // max(heads, 1)
    return tensor[:, :, None].expand(b, heads, group, length, width).reshape(b, q.shape[1], length, width)


def finite(tensor: Tensor) -> Tensor:
    """Return the tensor with 0 for each number that is not finite."""
    return torch.where(tensor.isfinite(), tensor, 0.0)


def _is_known_finite(tensor: Tensor) -> bool:
    """Return True where all numbers are finite, and it costs little to know: of a plain tensor on a CPU.

    A graph and a transform must not depend on the numbers. Nor does a result on this question, not even by the order of
    sums in products: without gaps, a tensor has the memory that :func:`finite` gives it.
    """
    if is_traced() or is_transformed() or not is_plain((tensor,)) or not tensor.is_cpu:
        return False
    has_no_gaps = tensor.is_contiguous() or tensor.transpose(1, 2).is_contiguous()
    return has_no_gaps and bool(tensor.isfinite().all())


def scores(
    q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, causal: str, window: tuple[int, int] | None
) -> Scores:
    """Compute the scores of a call."""
    sq, sk = q.shape[2], k.shape[2]
    masked = masks.from_band(sq, sk, masks.band(sq, sk, causal, window), q.device)
    if mask is not None:
        masked = mask.bool() if masked is None else masked | mask.bool()
    queries, keys, factor = upcast(q), for_each_query_head(upcast(k), q), scale_of(q, scale)
    all_finite = _is_known_finite(k)
    known = keys if all_finite else finite(keys)
    if masked is None:
        dead = None
    else:
        masked = masked.expand(*q.shape[:3], sk)
        dead = masked.all(-1, keepdim=True)
        queries = torch.where(dead, 0.0, queries)
    values = queries @ known.transpose(-2, -1)
    if not all_finite:
        raw = (queries @ keys.transpose(-2, -1)).detach()
        values = torch.where((~keys.isfinite()).any(-1)[..., None, :], raw, values)
    values = values * factor
    if masked is not None and dead is not None:
        values = values.masked_fill(masked, -math.inf).masked_fill(dead, 0.0)
    return Scores(values, masked, dead, queries, known)


def probabilities(s: Scores) -> Tensor:
    """Return the softmax of the scores, 0 in fully masked rows."""
    p = torch.softmax(s.values, -1)
    return p if s.masked is None else p.masked_fill(s.masked, 0.0)


def not_finite_part(p: Tensor, masked: Tensor | None, v: Tensor) -> Tensor:
    """Return what the numbers of ``v`` that are not finite add to ``p @ v``: 0, inf, -inf or NaN.

    Args:
        p: (..., Sq, Sk), the probabilities.
        masked: True where a key is masked out, or None.
        v: (..., Sk, Dv).
    """
    sees = torch.ones_like(p) if masked is None else torch.where(masked, 0.0, torch.ones_like(p))
    weighs = (p > 0).to(p.dtype)
    nan = sees @ v.isnan().to(p.dtype) + (sees - weighs).clamp(min=0.0) @ v.isinf().to(p.dtype)
    up, down = weighs @ (v == math.inf).to(p.dtype), weighs @ (v == -math.inf).to(p.dtype)
    part = torch.where(up > 0, math.inf, torch.where(down > 0, -math.inf, torch.zeros_like(up)))
    return torch.where((nan > 0) | ((up > 0) & (down > 0)), math.nan, part)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: str,
    window: tuple[int, int] | None,
) -> tuple[Tensor, Tensor]:
    """Compute out, in the dtype of q, and lse, in the dtype of the arithmetic."""
    s = scores(q, k, mask, scale, causal, window)
    p, values = probabilities(s), for_each_query_head(upcast(v), q)
    if _is_known_finite(v):
        out = p @ values + 0.0  # no -0, as with the part that is added otherwise
    else:
        out = p @ finite(values) + not_finite_part(p, s.masked, values).detach()
    if not k.shape[2]:
        return out.to(q.dtype), q.new_full(q.shape[:3], -math.inf, dtype=out.dtype)
    lse = torch.logsumexp(s.values, -1)
    if s.dead is not None:
        out, lse = out.masked_fill(s.dead, 0.0), lse.masked_fill(s.dead[..., 0], -math.inf)
    return out.to(q.dtype), lse


def gradients(
    grad_out: Tensor, grad_lse: Tensor | None, v: Tensor, s: Scores, scale: float, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v in the dtype of the arithmetic.

    Args:
        grad_out: (B, Nq, Sq, Dv).
        grad_lse: (B, Nq, Sq), or None.
        v: (B, Nk, Sk, Dv).
        s: from :func:`scores`.
        scale: from :func:`scale_of`.
        heads: Nk.
    """
    p, values, g = probabilities(s), for_each_query_head(upcast(v), s.q), upcast(grad_out)
    if s.dead is not None:
        g = torch.where(s.dead, 0.0, g)
    dp = g @ finite(values).transpose(-2, -1)
    inner = dp - (p * dp).sum(-1, keepdim=True)
    if grad_lse is not None:
        inner = inner + (grad_lse if s.dead is None else torch.where(s.dead[..., 0], 0.0, grad_lse))[..., None]
    ds = p * inner * scale
    return ds @ s.k, summed(ds.transpose(-2, -1) @ s.q, heads), summed(p.transpose(-2, -1) @ g, heads)


def backward(a: AttentionGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k and v. From the inputs alone, so that it has the right derivative itself."""
    lse_grad = a.grad_lse if a.return_lse else None
    with no_autocast(a.q.device.type):
        s = scores(a.q, a.k, a.mask, a.scale, a.causal, a.window)
        computed = gradients(a.grad_out, lse_grad, a.v, s, scale_of(a.q, a.scale), a.k.shape[1])
    return tuple(each.to(a.q.dtype) if need else None for each, need in zip(computed, a.needs))


def summed(gradient: Tensor, heads: int) -> Tensor:
    """Return the gradient of keys or values, summed over the query heads of each of ``heads``."""
    b, n, length, width = gradient.shape
    return gradient.reshape(b, heads, n // max(heads, 1), length, width).sum(2)


# ------------------------------------------------------------------------------------------------------- chosen keys


def best_keys(scores: Tensor, hidden: Tensor | None, count: int) -> Tensor:
    """Return the ``count`` keys of the largest scores, (..., count) int32, in rising order, -1 after the last.

    Of equal scores the lowest index is chosen. NaN is larger than any number.

    Args:
        scores: (..., T).
        hidden: True for a key that may not be chosen, broadcastable to the scores, or None.
        count: at least 1.
    """
    keys = scores.shape[-1]
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    if hidden is not None:
        last = hidden.expand(scores.shape).gather(-1, order)
        order = order.gather(-1, torch.sort(last.to(torch.uint8), dim=-1, stable=True).indices)
    chosen = order[..., :count]
    if hidden is not None:
        chosen = torch.where(hidden.expand(scores.shape).gather(-1, chosen), keys, chosen)
    chosen = torch.sort(chosen, dim=-1).values
    chosen = torch.where(chosen == keys, -1, chosen).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, max(count - keys, 0)), value=-1)


def chosen_mask(indices: Tensor, mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """Return the mask of all keys but those that are chosen, (B, 1 or Nq, Sq, Sk), joined with another one.

    Args:
        indices: (B, 1 or Nk, Sq, K); a number that is no key is none.
        mask: broadcastable to (B, Nq, Sq, Sk), or None.
        q: (B, Nq, Sq, D).
        k: (B, Nk, Sk, D).
    """
    size = k.shape[2]
    columns = indices.long()
    columns = torch.where((columns < 0) | (columns >= size), size, columns)
    hidden = columns.new_ones((*columns.shape[:3], size + 1), dtype=torch.bool).scatter(-1, columns, False)[..., :size]
    if hidden.shape[1] > 1:
        hidden = for_each_query_head(hidden, q)
    return hidden if mask is None else hidden | mask.bool()


# ----------------------------------------------------------------------------------------------------- varlen_attention


def heads_first(packed: Tensor) -> Tensor:
    """Return packed rows (T, N, D) as a view of one batch entry, (1, N, T, D)."""
    return packed.transpose(0, 1)[None]


def by_sequence(
    attention: Callable[..., Sequence[Tensor]],
    sequences: Iterable[tuple[slice, slice]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return out (T, Nq, Dv) and lse (T, Nq) of packed sequences, each alone, by views.

    Args:
        attention: a function of a sequence's q, k and v, (1, N, S, D), that returns its out and lse.
        sequences: the rows of the queries and of the keys of each sequence.
        q: (T, Nq, D).
        k: (Tk, Nk, D).
        v: (Tk, Nk, Dv).
    """
    out = q.new_zeros((*q.shape[:2], v.shape[2]))
    lse = q.new_full(q.shape[:2], -math.inf, dtype=compute_dtype(q.dtype))
    for rows, keys in sequences:
        results = attention(heads_first(q[rows]), heads_first(k[keys]), heads_first(v[keys]))
        out[rows], lse[rows] = results[0][0].transpose(0, 1), results[1][0].transpose(0, 1)
    return out, lse


def gradients_by_sequence(
    attention_backward: Callable[..., Sequence[Tensor | None]],
    sequences: Iterable[tuple[slice, slice]],
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and v of packed sequences, each alone, by views; None for one that is not wanted.

    Args:
        attention_backward: a function of a sequence's grad_out, grad_lse, q, k, v, out and lse, as attention has them,
            that returns the gradients of q, k and v.
        sequences: as of ``by_sequence``, and q, k, v too.
        grad_out: the gradient of out.
        grad_lse: the gradient of lse.
        out: of the forward.
        lse: of the forward.
        needs: the gradients to compute.
    """
    gradients = [torch.zeros_like(each, memory_format=torch.contiguous_format) if need else None
                 for each, need in zip((q, k, v), needs)]  # fmt: skip
    for rows, keys in sequences:
        of_lse, of_grad = (each[rows].transpose(0, 1)[None] for each in (lse, grad_lse))
        own = heads_first(q[rows]), heads_first(k[keys]), heads_first(v[keys])
        results = attention_backward(heads_first(grad_out[rows]), of_grad, *own, heads_first(out[rows]), of_lse)
        for whole, part, at in zip(gradients, results, (rows, keys, keys)):
            if whole is not None and part is not None:
                whole[at] = part[0].transpose(0, 1)
    return tuple(gradients)


class PackedIndex(NamedTuple):
    """The sequence of each packed row, and its index in the sequence, int64.

    Attributes:
        sequence: (T,), the sequence of each row, B for a row of none.
        number: (T,), the index of each row in its sequence.
        lengths: (B + 1,), the length of each sequence, 0 for none.
    """

    sequence: Tensor
    number: Tensor
    lengths: Tensor


def packed_index(cu_seqlens: Tensor, rows: int) -> PackedIndex:
    """Return the sequence and the index of each row."""
    bounds = Offsets.within(cu_seqlens, rows)
    row = cu_seqlens.new_ones(rows, dtype=torch.int64).cumsum(0) - 1  # a DTensor where the bounds are one
    after = (row[:, None] >= bounds).sum(-1)  # bounds
    count = bounds.shape[0] - 1
    sequence = torch.where(after > 0, after - 1, count)
    starts, lengths = bounds, torch.cat((bounds[1:] - bounds[:-1], torch.zeros_like(bounds[:1])))
    return PackedIndex(sequence, row - starts[sequence], lengths)


def packed_mask(
    cu_seqlens_q: Tensor,
    queries: int,
    cu_seqlens_k: Tensor | None,
    keys: int,
    causal: str,
    window: tuple[int, int] | None,
) -> Tensor:
    """Return the mask of packed sequences, (T, Tk), True where masked: other sequences, and the band of each."""
    of_q = packed_index(cu_seqlens_q, queries)
    of_k = (
        of_q
        if cu_seqlens_k is None and queries == keys
        else packed_index(cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, keys)
    )
    none = cu_seqlens_q.shape[0] - 1
    masked = (of_q.sequence[:, None] != of_k.sequence) | (of_q.sequence == none)[:, None]
    if causal == "none" and window is None:
        return masked
    distance = of_k.number - of_q.number[:, None]
    if causal != "upper_left":
        distance = distance - (of_k.lengths - of_q.lengths)[of_q.sequence][:, None]
    if window is not None:
        masked = masked | (distance < -window[0])
    right = 0 if causal != "none" else None if window is None else window[1]
    return masked if right is None else masked | (distance > right)
