"""The formulas of experts in plain torch: the order of the routed rows, the projections of one expert.

A *routed row* is a pair of a token and one of its K choices. A choice outside [0, E) is a sentinel: the expert is
elsewhere, and the row counts for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops.dtypes import compute_dtype, no_autocast


def arithmetic(x: Tensor, up: Tensor, down: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: float32, or float64 where x or a weight has it."""
    return compute_dtype(torch.promote_types(torch.promote_types(x.dtype, up.dtype), down.dtype))


def experts_of(index: Tensor, experts: int) -> Tensor:
    """Return the expert of each routed row, (T * K,) int64, and ``experts`` for a sentinel."""
    flat = index.reshape(-1).long()
    return flat.masked_fill((flat < 0) | (flat >= experts), experts)


def order_of(index: Tensor, experts: int) -> Tensor:
    """Return the routed rows sorted by expert, sentinels last, (T * K,): row r is choice r % K of token r // K."""
    return torch.argsort(experts_of(index, experts), stable=True)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return ``rows @ weight.T + bias`` of one expert in the dtype of rows, also under autocast."""
    wide = weight.to(rows.dtype)
    with no_autocast(rows.device.type):
        product = rows @ (wide if transposed else wide.t())
    return product if bias is None else product + bias.to(rows.dtype)


def linear_gradients(grad: Tensor, rows: Tensor, weight: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and of the weight of :func:`linear`."""
    wide = weight.to(rows.dtype)
    with no_autocast(rows.device.type):
        of_rows = grad @ (wide.t() if transposed else wide)
        of_weight = rows.t() @ grad if transposed else grad.t() @ rows
    return of_rows, of_weight
