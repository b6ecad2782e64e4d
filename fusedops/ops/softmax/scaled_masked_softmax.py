"""Scaled masked softmax, the attention probabilities. Replaces Megatron's and apex's ScaledMaskedSoftmax family,
torch_npu's npu_scaled_masked_softmax, and the chain scale -> masked_fill -> softmax.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Padding
from fusedops._dispatch.call import call
from fusedops.constraints import Broadcasts, Finite, Flag, Floating, Mask, Rank, SameDevice
from fusedops.dtypes import upcast
from fusedops.ops.softmax.formulas import causal_mask, padded, padded_backward


def scaled_masked_softmax(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, causal: bool = False, backend: str | None = None
) -> Tensor:
    """Compute the softmax over the last dimension of ``scale * x``, with masked positions left out.

    ``y = softmax(where(masked, -inf, scale * x), dim=-1)``: scale first, then mask. A masked position has probability
    exactly 0, whatever ``x`` is there; a row whose positions are all masked is exactly 0, and so is its gradient.

    Args:
        x: (..., Sq, Sk), rank >= 2, float16, bfloat16, float32 or float64. Attention scores.
        mask: bool or uint8, broadcastable to ``x``; True or non-zero means masked out (the opposite of torch's
            scaled_dot_product_attention). None masks nothing.
        scale: a number, finite in float32. Never rounded to the dtype of ``x``.
        causal: also masks key k for query q where k > q, both counted from 0 (the first query sees the first key
            only, also where Sq != Sk). Joined with ``mask`` by "or".
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (..., Sq, Sk), contiguous, the dtype of ``x``. Computed in float32 (float64 for float64).

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Megatron-LM, ``megatron/core/fusions/fused_softmax.py``; torch_npu, ``npu_scaled_masked_softmax``.

    >>> import torch, fusedops
    >>> fusedops.scaled_masked_softmax(torch.zeros(2, 2), causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    return call(OP, (x, mask, scale, causal), backend)


def reference(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Compute the op in plain torch."""
    wide = upcast(x) * scale
    masked = None if mask is None else mask.bool()
    if causal:
        masked = causal_mask(x) if masked is None else masked | causal_mask(x)
    if masked is None:
        return torch.softmax(wide, -1).to(x.dtype)
    # softmax of a fully masked row, -inf alone, is NaN: it is computed over zeros, and set to zero after
    dead = masked.expand(x.shape).all(-1, keepdim=True)
    y = torch.softmax(wide.masked_fill(masked, -math.inf).masked_fill(dead, 0.0), -1)
    return y.masked_fill(masked, 0.0).to(x.dtype)


def backward(grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the gradient of x from the output, which is 0 where masked."""
    wide_grad, wide_y = upcast(grad), upcast(y)
    return (scale * wide_y * (wide_grad - (wide_grad * wide_y).sum(-1, keepdim=True))).to(y.dtype)


OP = Op(
    scaled_masked_softmax,
    constraints=[
        Floating("x"),
        Rank("x", at_least=2),
        Finite("scale"),
        Flag("causal"),
        Mask("mask"),
        SameDevice("mask", "x"),
        Broadcasts("mask", "x"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x",),
    sharding="fusedops.ops.softmax.sharding:SHARDING",
    padding=Padding((-2, -1), padded, padded_backward),
    evidence="fusedops.ops.softmax.evidence:SCALED_MASKED_SOFTMAX",
)
