"""Two parts of one attention, over other keys, made one (Milakov & Gimelshein 2018, arXiv:1805.02867). Ring attention
(Liu et al. 2023, arXiv:2310.01889) and attention over a cached prefix are made of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Output
from fusedops._dispatch.call import call
from fusedops._named_tuple import NamedTuple
from fusedops.constraints import Floating, LeadingDims, LogSums, Rank, SameDevice, SameShape
from fusedops.dtypes import arithmetic, promoted


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention over all keys from its results over two parts of the keys, which have no key in common.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``. A part
    whose lse is -inf, as of a row without a key, adds nothing, whatever its out is; where both are, out is 0 and lse
    is -inf, and all gradients of the row are 0.

    Args:
        out_a: (..., D), float16, bfloat16, float32 or float64: the result of :func:`fusedops.attention`,
            (B, N, S, D), or of :func:`fusedops.varlen_attention`, (T, N, D).
        lse_a: (...), float32 or float64: the lse of the same call, a natural logarithm.
        out_b: the shape of ``out_a``, any of its dtypes: the result for the same queries and other keys.
        lse_b: (...), float32 or float64.
        backend: a policy for this call alone, such as "triton" or "cpu,eager". None: the policy in effect.

    Returns:
        (out, lse). out: the shape of ``out_a``, its dims in memory in the order of those of ``out_a``; the dtype of
        ``out_a``, or of both if they differ, as torch promotes them: pass an accumulator in float32 to round once.
        lse: the shape of ``lse_a``, contiguous, float32, or float64 where an argument is float64. Computed in that
        dtype, out rounded once. Differentiable in all four.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch, ``torch.distributed.tensor.experimental._context_parallel``, ``_SDPAMerger``; vLLM,
    ``merge_attn_states``.

    >>> import torch, fusedops
    >>> lse = torch.zeros(1)
    >>> fusedops.merge_attention(torch.tensor([[1.0, 2.0]]), lse, torch.tensor([[3.0, 6.0]]), lse)
    (tensor([[2., 4.]]), tensor([0.6931]))
    """
    return call(OP, (out_a, lse_a, out_b, lse_b), backend)


class MergeInputs(NamedTuple):
    """The two parts of a call in the dtype of the arithmetic.

    Attributes:
        a: (..., D), out_a, 0 in rows without a key.
        b: (..., D), out_b likewise.
        none_a: (...), True where lse_a is -inf.
        none_b: (...), True where lse_b is -inf.
        weight_a: (...), exp(lse_a - lse), 0 in rows without a key.
        weight_b: (...), exp(lse_b - lse) likewise.
        lse: (...).
    """

    a: Tensor
    b: Tensor
    none_a: Tensor
    none_b: Tensor
    weight_a: Tensor
    weight_b: Tensor
    lse: Tensor


def merge_inputs(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> MergeInputs:
    """Compute the weights of the parts, and lse, in plain differentiable torch.

    The weights are logistic functions of the difference of both lse, which is exact where they are close: a large lse
    has a large rounding, which ``exp(lse_a - lse)`` would have as a factor. The smaller one is computed first, as the
    derivative of torch's sigmoid has the factor ``1 - weight``, which is rounded away where the weight is nearly 1.
    """
    dtype = arithmetic(out_a, lse_a, out_b, lse_b)
    x, y = lse_a.to(dtype), lse_b.to(dtype)
    none_a, none_b = x == -math.inf, y == -math.inf
    one = none_a | none_b  # at most one part has keys: nothing is computed of -inf, whose derivatives are NaN
    both_x, both_y = x.masked_fill(one, 0.0), y.masked_fill(one, 0.0)
    difference = both_x - both_y
    first = difference > 0
    smaller = torch.sigmoid(torch.where(first, -difference, difference))
    weight_a = torch.where(first, 1 - smaller, smaller).masked_fill(none_b, 1.0).masked_fill(none_a, 0.0)
    weight_b = torch.where(first, smaller, 1 - smaller).masked_fill(none_a, 1.0).masked_fill(none_b, 0.0)
    # a constant where there is no key at all: it has no gradient
    one_part = torch.where(none_a, y.masked_fill(none_b, -math.inf), x.masked_fill(none_a, -math.inf))
    lse = torch.where(one, one_part, torch.logaddexp(both_x, both_y))
    a = out_a.to(dtype).masked_fill(none_a[..., None], 0.0)
    b = out_b.to(dtype).masked_fill(none_b[..., None], 0.0)
    return MergeInputs(a, b, none_a, none_b, weight_a, weight_b, lse)


def reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    p = merge_inputs(out_a, lse_a, out_b, lse_b)
    out = p.weight_a[..., None] * p.a + p.weight_b[..., None] * p.b
    return out.to(promoted(out_a, out_b)), p.lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the four arguments, from these alone."""
    p = merge_inputs(out_a, lse_a, out_b, lse_b)
    g, g_lse = grad_out.to(p.lse.dtype), grad_lse.to(p.lse.dtype)
    of_out_a = (p.weight_a[..., None] * g).masked_fill(p.none_a[..., None], 0.0) if needs[0] else None
    of_out_b = (p.weight_b[..., None] * g).masked_fill(p.none_b[..., None], 0.0) if needs[2] else None
    of_lse_a, of_lse_b = None, None
    if needs[1] or needs[3]:
        # of the weight of one part that grows at the cost of the other one
        moved = (g * (p.a - p.b)).sum(-1).masked_fill(p.none_a | p.none_b, 0.0)
        of_lse_a = (p.weight_a * (g_lse + p.weight_b * moved)).masked_fill(p.none_a, 0.0)
        of_lse_b = (p.weight_b * (g_lse - p.weight_a * moved)).masked_fill(p.none_b, 0.0)
    each = zip((of_out_a, of_lse_a, of_out_b, of_lse_b), (out_a, lse_a, out_b, lse_b), needs)
    return tuple(gradient.to(to.dtype) if need and gradient is not None else None for gradient, to, need in each)


def empty(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return empty outputs: the dims of out in memory in the order of those of out_a."""
    lse = torch.empty(lse_a.shape, dtype=arithmetic(out_a, lse_a, out_b, lse_b), device=lse_a.device)
    return torch.empty_like(out_a, dtype=promoted(out_a, out_b)), lse


def output_dtype(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> torch.dtype:
    """Return the dtype of out."""
    return promoted(out_a, out_b)


OP = Op(
    merge_attention,
    constraints=[
        Floating("out_a"),
        Rank("out_a", at_least=1),
        LogSums("lse_a"),
        SameDevice("lse_a", "out_a"),
        LeadingDims("lse_a", "out_a"),
        Floating("out_b"),
        SameDevice("out_b", "out_a"),
        SameShape("out_b", "out_a"),
        LogSums("lse_b"),
        SameDevice("lse_b", "out_a"),
        LeadingDims("lse_b", "out_a"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("out_a", "lse_a", "out_b", "lse_b"),
    outputs=(Output("out", permuted=True), "lse"),
    output_dtype=output_dtype,
    empty=empty,
    sharding="fusedops.ops.attention.sharding:MERGE",
    evidence="fusedops.ops.attention.evidence:MERGE",
)
