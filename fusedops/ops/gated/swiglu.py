"""SwiGLU (Shazeer 2020, arXiv:2002.05202), the activation of the MLP of Llama and most later models. Replaces
Megatron's bias_swiglu_impl without a bias, Liger's LigerSiLUMulFunction, vLLM's silu_and_mul, torch_npu's npu_swiglu,
gpt-oss's clamped form, and the chain silu -> mul.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.constraints import Finite
from fusedops.dtypes import promoted
from fusedops.ops.gated.arguments import TENSORS
from fusedops.ops.gated.formulas import empty, gradients, output_dtype, wide_pair


def swiglu(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    limit: float | None = None,
    alpha: float = 1.0,
    offset: float = 0.0,
    interleaved: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute ``gate * sigmoid(alpha * gate) * (up + offset)``.

    Args:
        gate: (..., H), float16, bfloat16, float32 or float64. Without ``up``: (..., 2H), gate and up packed in the last
            dim.
        up: the shape of ``gate``, any of the same dtypes, or None.
        limit: at least 0: before the rest, gate is clamped to at most ``limit``, and up to [-limit, limit]. None: no
            clamp. gpt-oss has limit 7, alpha 1.702, offset 1.
        alpha: a number, finite in float32.
        offset: a number, finite in float32.
        interleaved: gate is at the even positions of a packed tensor and up at the odd ones. False: gate is its first
            half. Has no effect where ``up`` is given.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (..., H), contiguous, the dtype of ``gate * up`` by torch's promotion. Computed in float32 (float64 for
        float64), rounded once. A gate of -inf gives 0 where alpha is positive and up is finite. The gradient passes at
        the bounds of the clamp, as torch.clamp's does in torch 2.13.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Megatron-LM, ``megatron/core/fusions/fused_bias_swiglu.py``; transformers, ``modeling_gpt_oss.py``.

    >>> import torch, fusedops
    >>> fusedops.swiglu(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([0.0000, 5.2848])
    """
    return call(OP, (gate, up, limit, alpha, offset, interleaved), backend)


def _clamped(g: Tensor, u: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Clamp, with gradients that pass at the bounds. Those of torch.clamp do in torch 2.13, and are 0 in torch 2.15."""
    if limit is None:
        return g, u
    return g.masked_fill(g > limit, limit), u.masked_fill(u > limit, limit).masked_fill(u < -limit, -limit)


def reference(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> Tensor:
    """Compute the op in plain torch."""
    g, u = _clamped(*wide_pair(gate, up, interleaved), limit)
    s = torch.sigmoid(alpha * g)
    y = g.masked_fill(s == 0, 0.0) * s * (u + offset)  # -inf * 0 would be NaN
    return y.to(promoted(gate, up))


def backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and up from the inputs."""
    g_given, u_given = wide_pair(gate, up, interleaved)
    g, u = _clamped(g_given, u_given, limit)
    s = torch.sigmoid(alpha * g)
    g = g.masked_fill(s == 0, 0.0)
    wide_grad = grad.to(g.dtype)
    dgate = wide_grad * (u + offset) * s * (1 + alpha * (g * (1 - s)))
    dup = wide_grad * g * s
    if limit is not None:
        dgate, dup = dgate.where(g_given <= limit, 0.0), dup.where(u_given.abs() <= limit, 0.0)
    return gradients(dgate, dup, gate, up, interleaved, needs)


OP = Op(
    swiglu,
    constraints=[*TENSORS, Finite("limit", at_least=0.0, optional=True), Finite("alpha"), Finite("offset")],
    reference=reference,
    backward=backward,
    differentiable=("gate", "up"),
    output_dtype=output_dtype,
    empty=empty,
    sharding="fusedops.ops.gated.sharding:SHARDING",
    evidence="fusedops.ops.gated.evidence:SWIGLU",
)
