"""merge_attention in plain torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops.dtypes import arithmetic, promoted


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any rank, strides and dtypes."""
    weight_a, weight_b, lse, empty = _weights(out_a, lse_a, out_b, lse_b)
    a, b = _rows(out_a, lse_a, empty, lse.dtype), _rows(out_b, lse_b, empty, lse.dtype)
    results = torch.empty_like(out_a, dtype=promoted(out_a, out_b))
    return results.copy_(torch.addcmul(a * weight_a[..., None], b, weight_b[..., None])), lse


def merge_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the four arguments."""
    weight_a, weight_b, lse, empty = _weights(out_a, lse_a, out_b, lse_b)
    g, g_lse = grad_out.to(lse.dtype), grad_lse.to(lse.dtype)
    gradients: list[Any] = [None] * 4
    for at, weight, own, own_lse in ((0, weight_a, out_a, lse_a), (2, weight_b, out_b, lse_b)):
        if needs[at]:
            rows = torch.empty_like(own)
            gradients[at] = rows.copy_(_where_keys(g * weight[..., None], own_lse, empty))
    if needs[1] or needs[3]:
        a, b = _rows(out_a, lse_a, empty, lse.dtype), _rows(out_b, lse_b, empty, lse.dtype)
        moved = (g * (a - b)).sum(-1)
        if empty:
            moved = moved.masked_fill((lse_a == -math.inf) | (lse_b == -math.inf), 0.0)
        both = weight_a * weight_b * moved
        for at, weight, own_lse, sign in ((1, weight_a, lse_a, 1), (3, weight_b, lse_b, -1)):
            if needs[at]:
                sums = _where_keys((weight * g_lse).add(both, alpha=sign), own_lse, empty)
                gradients[at] = sums.to(own_lse.dtype).contiguous()
    return tuple(gradients)


def _weights(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return both weights and lse, contiguous, and False where it is known that every row of both parts has keys."""
    dtype = arithmetic(out_a, lse_a, out_b, lse_b)
    x, y = lse_a.to(dtype), lse_b.to(dtype)
    none_a, none_b = x == -math.inf, y == -math.inf
    one = none_a | none_b
    # on another device the program would wait for the answer
    if x.is_cpu and not bool(one.any()):
        difference = x - y
        return torch.sigmoid(difference), torch.sigmoid(-difference), torch.logaddexp(x, y).contiguous(), False
    difference = x.masked_fill(one, 0.0) - y.masked_fill(one, 0.0)
    weight_a = torch.sigmoid(difference).masked_fill_(none_b, 1.0).masked_fill_(none_a, 0.0)
    weight_b = torch.sigmoid(-difference).masked_fill_(none_a, 1.0).masked_fill_(none_b, 0.0)
    return weight_a, weight_b, torch.logaddexp(x, y).contiguous(), True


def _rows(out: Tensor, lse: Tensor, empty: bool, dtype: torch.dtype) -> Tensor:
    """Return a part in the dtype of the arithmetic, 0 where it has no key."""
    return _where_keys(out.to(dtype), lse, empty)


def _where_keys(values: Tensor, lse: Tensor, empty: bool) -> Tensor:
    """Return values of rows, or one of each, with 0 where lse is -inf."""
    if not empty:
        return values
    none = lse == -math.inf
    return values.masked_fill(none if none.dim() == values.dim() else none[..., None], 0.0)
