"""Causal depthwise convolution, the short convolution of linear attention and state space models: Mamba (Gu & Dao
2023, arXiv:2312.00752), Qwen3-Next and Qwen3.5, Kimi Linear, LFM2, Granite 4. Replaces the causal_conv1d_fn and
causal_conv1d_update of the package causal-conv1d, and the chain pad -> conv1d -> silu.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Output
from fusedops._dispatch.call import call
from fusedops.dtypes import arithmetic
from fusedops.ops.convolution import arguments, formulas
from fusedops.ops.convolution.arguments import CausalConv1dArgs, CausalConv1dGradArgs


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
) -> Any:
    """Compute ``act(bias[c] + sum over w of weight[c, w] * x[b, c, s - (W - 1) + w])`` for each channel and position.

    Before the first position are zeros, or the initial state. A new token with the state so far is a call with S = 1.

    Args:
        x: (B, C, S), float16, bfloat16, float32 or float64. Kernels read (B, S, C) that is transposed as it is.
        weight: (C, W), W from 2 to 8, any of the same dtypes.
        bias: (C,), any of the same dtypes, or None.
        activation: None, or "silu".
        initial_state: (B, C, W - 1), the inputs before the first position, of the dtype of ``x``; None for zeros. With
            ``cu_seqlens`` (N, C, W - 1).
        return_state: also return the state after the last position.
        cu_seqlens: (N + 1,), int32 or int64, the bounds of packed sequences, of x with B = 1: sequence n has the
            positions from ``cu_seqlens[n]`` up to ``cu_seqlens[n + 1]``. No position sees another sequence, forward or
            backward. At positions of no sequence y and its gradient are 0. A bound that falls or passes S is an
            InvalidInputError on a CPU. On another device, which is not waited for, such a bound counts as the nearest
            position that is not before the bound before it.
        backend: a policy for this call alone, such as "triton" or "cpu,eager". None: the policy in effect.

    Returns:
        y (B, C, S), the dtype of ``x``, its dims in memory in any order, without gaps: that of ``x`` where the kernel
        allows it. With ``return_state`` the pair (y, state): the last W - 1 inputs, (B, C, W - 1) or (N, C, W - 1),
        contiguous, the dtype of ``x``, differentiable; those of the initial state too where S < W - 1. Computed in
        float32 (float64 if x, weight or bias has it) and rounded once. silu of -inf is 0. The gradients of ``weight``
        and ``bias`` are summed in float32, in the same order on every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: causal-conv1d, ``causal_conv1d_ref``; transformers, ``modeling_qwen3_next.py``.

    >>> import torch, fusedops
    >>> x, weight = torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[10.0, 1.0]])
    >>> fusedops.causal_conv1d(x, weight)
    tensor([[[ 1., 12., 23.]]])
    >>> y, state = fusedops.causal_conv1d(x, weight, return_state=True)
    >>> fusedops.causal_conv1d(torch.tensor([[[4.0]]]), weight, initial_state=state)
    tensor([[[34.]]])
    """
    activation = formulas.NONE if activation is None else activation
    args = x, weight, bias, activation, initial_state, return_state, cu_seqlens
    return arguments.wanted(call(OP, args, backend), return_state)


def reference(a: CausalConv1dArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    wide = arithmetic(a.x, a.weight, a.bias)
    packed = None if a.cu_seqlens is None else formulas.packed_of(a.cu_seqlens, a.x.shape[-1])
    offset, before = (None if each is None else each.to(wide) for each in (a.bias, a.initial_state))
    y = formulas.forward(a.x.to(wide), a.weight.to(wide), offset, a.activation, before, packed).to(a.x.dtype)
    if not a.return_state:
        return y, a.x.new_empty(0)
    return y, formulas.final_state(a.x, a.weight.shape[1], a.initial_state, packed)


def backward(a: CausalConv1dGradArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight, bias and initial_state."""
    wide = arithmetic(a.x, a.weight, a.bias)
    packed = None if a.cu_seqlens is None else formulas.packed_of(a.cu_seqlens, a.x.shape[-1])
    of_state = a.grad_state.to(wide) if a.return_state else None
    offset, before = (None if each is None else each.to(wide) for each in (a.bias, a.initial_state))
    found = formulas.gradients(
        a.grad_y.to(wide), of_state, a.x.to(wide), a.weight.to(wide), offset, before, packed, a.activation
    )
    return (
        found.x.to(a.x.dtype) if a.needs[0] else None,
        found.weight.to(a.weight.dtype) if a.needs[1] else None,
        found.bias.to(a.bias.dtype) if a.needs[2] and a.bias is not None else None,
        found.initial_state.to(a.initial_state.dtype) if a.needs[3] and a.initial_state is not None else None,
    )


OP = Op(
    causal_conv1d,
    constraints=arguments.CONSTRAINTS,
    reference=reference,
    backward=backward,
    differentiable=("x", "weight", "bias", "initial_state"),
    outputs=(Output("y", permuted=True), "state"),
    empty=arguments.empty,
    prepare_args=arguments.prepare_args,
    sharding="fusedops.ops.convolution.sharding:SHARDING",
    evidence="fusedops.ops.convolution.evidence:CAUSAL_CONV1D",
)
