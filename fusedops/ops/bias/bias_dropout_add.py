"""Bias + dropout + residual add, the end of each half of a transformer layer. Replaces Megatron's bias_dropout_add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.constraints import Floating, SameDevice, SameShape
from fusedops.ops.bias import arguments, bias_dropout, formulas
from fusedops.philox import keep_mask


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute ``residual + dropout(x + bias)``. No input is written, in evaluation either.

    The keep-mask is a pure function of the seed and of each element's linear index, the same bits on every backend.
    Backward needs the seed alone.

    Args:
        x: (...), float16, bfloat16, float32 or float64.
        bias: broadcastable to ``x``, usually (H,), any of the same dtypes, or None.
        residual: the shape of ``x``, any of the same dtypes. Where ``x`` or ``bias`` differ from it in dtype, they are
            taken in its dtype: a float32 residual stream stays float32.
        p: probability of dropping an element, in [0, 1]. Kept values are multiplied by 1 / (1 - p); p = 1 gives the
            residual exactly.
        training: False drops nothing, and draws no random number; so does p = 0.
        seed: a 64-bit number, or an int64 tensor of one element on the device of ``x``. None: drawn from torch's
            generator of that device.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (...), contiguous, the dtype of ``residual``. Computed in float32 (float64 for float64).

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Megatron-LM, ``megatron/core/fusions/fused_bias_dropout.py``; Salmon et al. 2011 (Philox).

    >>> import torch, fusedops
    >>> fusedops.bias_dropout_add(torch.ones(4), None, torch.full((4,), 10.0), p=0.5, seed=7)
    tensor([12., 12., 10., 10.])
    """
    if seed is not None:
        seed = arguments.seed_tensor("bias_dropout_add", seed, x)
    return call(OP, (x, bias, residual, p, training, seed), backend)


def reference(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, training: bool, seed: Tensor | None
) -> Tensor:
    """Compute the op in plain torch."""
    out = residual.dtype
    u, scale = formulas.summed(x, bias, out), 1.0
    if seed is not None and training and p > 0:
        u, scale = torch.where(keep_mask(seed, p, u.shape), u, 0), 1 / (1 - p) if p < 1 else 0.0
    # one rounding, as in the kernels: the product with the scale and the sum are fused
    return torch.add(residual.to(u.dtype), u, alpha=scale).to(out)


def _output_dtype(x: Tensor, bias: Tensor | None, residual: Tensor, *rest: Any) -> torch.dtype:
    return residual.dtype


OP = Op(
    bias_dropout_add,
    constraints=[
        *bias_dropout.OP.constraints,
        Floating("residual"),
        SameDevice("residual", "x"),
        SameShape("residual", "x"),
    ],
    reference=reference,
    backward=bias_dropout.backward,  # the residual's gradient is the output's itself
    differentiable=("x", "bias"),
    passed_through="residual",
    identity=bias_dropout.identity,
    output_dtype=_output_dtype,
    sharding="fusedops.ops.bias.sharding:SHARDING",
    prepare_args=arguments.prepare_args,
    evidence="fusedops.ops.bias.evidence:BIAS_DROPOUT_ADD",
)
