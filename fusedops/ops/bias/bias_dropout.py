"""Bias + dropout. Replaces Slapo's bias_dropout and the chain add -> dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.constraints import Broadcasts, Flag, Floating, OneElement, Probability, SameDevice
from fusedops.dtypes import promoted, upcast
from fusedops.ops.bias import arguments, formulas
from fusedops.philox import dropped


def bias_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: int | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute dropout of ``x + bias``.

    The keep-mask is a pure function of the seed and of each element's linear index, the same bits on every backend.
    Backward needs the seed alone.

    Args:
        x: (...), float16, bfloat16, float32 or float64.
        bias: broadcastable to ``x``, usually (H,), any of the same dtypes, or None.
        p: probability of dropping an element, in [0, 1]. Kept values are multiplied by 1 / (1 - p).
        training: False drops nothing, and draws no random number; so does p = 0.
        seed: a 64-bit number, or an int64 tensor of one element on the device of ``x``. None: drawn from torch's
            generator of that device.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (...), contiguous, the dtype of ``x + bias`` by torch's promotion. Computed in float32 (float64 for float64).

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Srivastava et al. 2014 (dropout); Salmon et al. 2011 (Philox); Slapo, ``slapo.op.fused_bias``.

    >>> import torch, fusedops
    >>> fusedops.bias_dropout(torch.ones(4), p=0.5, seed=7)
    tensor([2., 2., 0., 0.])
    """
    if seed is not None:
        seed = arguments.seed_tensor("bias_dropout", seed, x)
    return call(OP, (x, bias, p, training, seed), backend)


def reference(x: Tensor, bias: Tensor | None, p: float, training: bool, seed: Tensor | None) -> Tensor:
    """Compute the op in plain torch."""
    out = promoted(x, bias)
    return dropped(formulas.summed(x, bias, out), p, seed if training and p > 0 else None).to(out)


def backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and bias by the keep-mask of the seed."""
    du = dropped(upcast(grad), p, seed if training and p > 0 else None)
    dx = du.to(x_dtype, copy=True) if needs[0] else None
    dbias = du.sum_to_size(bias.shape).to(bias.dtype, copy=True) if bias is not None and needs[1] else None
    return dx, dbias


def output_dtype(x: Any, bias: Any, *rest: Any) -> torch.dtype:
    """Return the dtype of ``x + bias``."""
    return promoted(x, bias)


def identity(
    grad: Tensor, seed: Tensor | None, bias: Tensor | None, p: float, training: bool, x_dtype: torch.dtype
) -> bool:
    """Return True where the gradient of x is the output's gradient itself."""
    return (p == 0 or not training) and x_dtype is grad.dtype


OP = Op(
    bias_dropout,
    constraints=[
        Floating("x"),
        Probability("p"),
        Flag("training"),
        OneElement("seed", torch.int64),
        SameDevice("seed", "x"),
        Floating("bias"),
        SameDevice("bias", "x"),
        Broadcasts("bias", "x"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x", "bias"),
    identity=identity,
    output_dtype=output_dtype,
    sharding="fusedops.ops.bias.sharding:SHARDING",
    prepare_args=arguments.prepare_args,
    evidence="fusedops.ops.bias.evidence:BIAS_DROPOUT",
)
