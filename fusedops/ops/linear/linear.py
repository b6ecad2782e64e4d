"""A linear layer and the activation that follows it. Replaces torch's ``linear``, and the chain linear, activation."""

from __future__ import annotations

from math import prod
from typing import Literal

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.constraints import Floating, OneOf, Rank, SameDevice, SameSize
from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.ops.experts.arguments import PLAIN
from fusedops.ops.experts.formulas import Activation


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu2"] | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute ``activation(x @ weight.T + bias)``.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        weight: (N, K), any of the same dtypes.
        bias: (N,), any of the same dtypes, or None.
        activation: "gelu" (by erf), "gelu_tanh", "silu", "relu", "relu2" (the square of relu), or None.
        backend: a policy for this call alone, such as "cpu" or "npu,eager". None: the policy in effect.

    Returns:
        (..., N), contiguous, the dtype of ``x``. Products are summed, and bias and activation computed, in float32
        (float64 for an ``x`` of float64), and rounded once. So are the gradients,
        for which the sum before an activation is computed again.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch, ``torch.nn.functional.linear``.

    >>> import torch, fusedops
    >>> fusedops.linear(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [1.0, -1.0]]), activation="relu")
    tensor([3., 0.])
    """
    return call(OP, (x, weight, bias, activation), backend)


def act_of(name: str) -> Activation:
    """Return the formulas of an activation."""
    return Activation(name, None, 1.0, 0.0, False)


def sum_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` in float32, or float64 for float64."""
    wide = compute_dtype(x.dtype)
    with no_autocast(x.device.type):
        y = x.to(wide) @ weight.to(wide).t()
    return y if bias is None else y + bias.to(wide)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Compute the op in plain torch."""
    u = sum_of(x, weight, bias)
    return (u if activation is None else act_of(activation)(u)).to(x.dtype)


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias."""
    wide = compute_dtype(x.dtype)
    g = grad.to(wide)
    if activation is not None:
        g = act_of(activation).gradient(g, sum_of(x, weight, bias))
    dx = dweight = dbias = None
    # not the sum over (): of no dim it is the sum over all; nor Size.numel, which fixes a symbolic size
    rows = g.reshape(prod(g.shape[:-1]), g.shape[-1])
    with no_autocast(grad.device.type):
        if needs[0]:
            dx = (g @ weight.to(wide)).to(x.dtype)
        if needs[1]:
            dweight = (rows.t() @ x.reshape(rows.shape[0], x.shape[-1]).to(wide)).to(weight.dtype)
    if needs[2] and bias is not None:
        dbias = rows.sum(0).to(bias.dtype)
    return dx, dweight, dbias


def empty(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return an empty output."""
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


OP = Op(
    linear,
    constraints=[
        Floating("x"),
        Rank("x", at_least=1),
        Floating("weight"),
        Rank("weight", 2),
        SameDevice("weight", "x"),
        SameSize("weight", 1, "x", -1),
        Floating("bias"),
        SameDevice("bias", "x"),
        Rank("bias", 1),
        SameSize("bias", 0, "weight", 0),
        OneOf("activation", *PLAIN, or_none=True),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x", "weight", "bias"),
    empty=empty,
    sharding="fusedops.ops.linear.sharding:SHARDING",
    evidence="fusedops.ops.linear.evidence:LINEAR",
)
