"""The error bounds of rotary_embedding: ``absolute`` of the sizes of the two products of an element."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops._contract.evidence import tolerances
from fusedops.ops.rotary.formulas import joined, pairs, rotation_dtype

#: Of the outputs and the gradients.
TOLERANCE = tolerances((5e-7, 3e-7), (1e-15, 1e-15))


def error_bound(
    absolute: float, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor | None]:
    """Return the largest errors of q and k, rotated: ``absolute`` of the sizes of both products.

    inf where a product may overflow. 0 where an element passes through.
    """
    errors = [None if x is None else _error(absolute, x, cos, sin, interleaved, seq_dim) for x in (q, k)]
    return errors[0], errors[1]  # pyright: ignore[reportReturnType]


def gradient_error_bound(
    absolute: float,
    grad_rotated_q: Tensor,
    grad_rotated_k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    seq_dim: int,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the same for the gradients of q and k."""
    grads = [grad if need else None for grad, need in zip((grad_rotated_q, grad_rotated_k), needs)]
    errors = [None if x is None else _error(absolute, x, cos, sin, interleaved, seq_dim) for x in grads]
    return errors[0], errors[1]


def _error(absolute: float, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    most = torch.finfo(rotation_dtype(x, cos, sin)).max
    heads, width = (-3 if seq_dim == -2 else -2), 2 * cos.shape[-1]
    # an infinity or NaN gives the same infinity or NaN in any arithmetic
    sizes = [t.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs() for t in (x[..., :width], cos, sin)]
    c, s = (size.unsqueeze(heads) for size in sizes[1:])
    x1, x2 = pairs(sizes[0], interleaved)
    moved = joined(x1 * c + x2 * s, x2 * c + x1 * s, interleaved)
    moved = (absolute * moved).masked_fill(moved >= most, math.inf)
    return torch.cat((moved, torch.zeros_like(x[..., width:], dtype=torch.float64)), -1)
