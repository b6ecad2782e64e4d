"""The parts of rotary_embedding: the rotation of pairs of elements, the unfused chain, bytes, shards and errors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.values import Tolerance

#: Of the outputs and the gradients.
TOLERANCE = {
    # absolute, in units of |x1 * cos| + |x2 * sin|: two products and a sum in float32. It does not cover a cos that was
    # rounded to 16 bits. relative: one rounding of the result
    torch.float16: Tolerance(5e-7, 1e-3),
    torch.bfloat16: Tolerance(5e-7, 1e-2),
    torch.float32: Tolerance(5e-7, 3e-7),
    torch.float64: Tolerance(1e-15, 1e-15),
}


def pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second elements of the pairs in the last dim."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """Return a tensor whose pairs have these elements."""
    if not interleaved:
        return torch.cat((first, second), -1)
    # not flatten, for which is_grads_batched=True has no rule
    return torch.stack((first, second), -1).reshape(*first.shape[:-1], 2 * first.shape[-1])


def wide_dtype(x: Tensor, cos: Tensor, sin: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: float32, or float64 where a tensor has it."""
    return torch.promote_types(torch.promote_types(x.dtype, torch.float32), torch.promote_types(cos.dtype, sin.dtype))


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    """Compute the rotation of one tensor."""
    wide, width = wide_dtype(x, cos, sin), 2 * cos.shape[-1]
    heads = -3 if seq_dim == -2 else -2
    c, s = cos.to(wide).unsqueeze(heads), sin.to(wide).unsqueeze(heads)
    # all in the wide dtype, also what does not rotate: under autocast cat and stack take no float16 beside bfloat16
    whole = x.to(wide)
    x1, x2 = pairs(whole[..., :width], interleaved)
    y = joined(x1 * c - x2 * s, x2 * c + x1 * s, interleaved)
    return torch.cat((y, whole[..., width:]), -1).to(x.dtype)


def empty(q: Tensor, k: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    like = torch.empty_like(q, memory_format=torch.contiguous_format)
    return like, q.new_empty(0) if k is None else torch.empty_like(k, memory_format=torch.contiguous_format)


def unfused(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor | None]:
    """Compute the op as models do without fused ops: cos and sin doubled, in the dtype of q, and each step rounded."""
    heads = -3 if seq_dim == -2 else -2
    wide_cos, wide_sin = (joined(angle, angle, interleaved).to(q.dtype).unsqueeze(heads) for angle in (cos, sin))
    chains = [None if x is None else _chain(x, wide_cos, wide_sin, interleaved) for x in (q, k)]
    return chains[0], chains[1]  # pyright: ignore[reportReturnType]


def _chain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    x1, x2 = pairs(turning, interleaved)
    y = turning * cos + joined(-x2, x1, interleaved) * sin
    return torch.cat((y, rest), -1) if rest.shape[-1] else y


def min_bytes(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool, seq_dim: int) -> Mapping[Any, int]:
    """Read q, k, cos and sin, write q and k; backward the same with the gradients."""
    moved = sum(2 * math.prod(x.shape) * x.dtype.itemsize for x in (q, k) if x is not None)
    moved += sum(math.prod(x.shape) * x.dtype.itemsize for x in (cos, sin))
    return {"forward": moved, "backward": moved}


def dims_of_angles(given: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return the dims of q that those of cos and sin go with."""
    seq_dim, rank = given["seq_dim"], given["cos"].dim()
    dims = (*range(-rank - 1, -3), seq_dim, -1)
    return {"cos": dims, "sin": dims}


def error(
    absolute: float, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int
) -> tuple[Tensor, Tensor | None]:
    """Return the largest errors of q and k, rotated: ``absolute`` of the sizes of both products.

    inf where a product may overflow. 0 where an element passes through.
    """
    errors = [None if x is None else _error(absolute, x, cos, sin, interleaved, seq_dim) for x in (q, k)]
    return errors[0], errors[1]  # pyright: ignore[reportReturnType]


def backward_error(
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
    most = torch.finfo(wide_dtype(x, cos, sin)).max
    heads, width = (-3 if seq_dim == -2 else -2), 2 * cos.shape[-1]
    # an infinity or NaN gives the same infinity or NaN in any arithmetic
    sizes = [t.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs() for t in (x[..., :width], cos, sin)]
    c, s = (size.unsqueeze(heads) for size in sizes[1:])
    x1, x2 = pairs(sizes[0], interleaved)
    moved = joined(x1 * c + x2 * s, x2 * c + x1 * s, interleaved)
    moved = (absolute * moved).masked_fill(moved >= most, math.inf)
    return torch.cat((moved, torch.zeros_like(x[..., width:], dtype=torch.float64)), -1)
