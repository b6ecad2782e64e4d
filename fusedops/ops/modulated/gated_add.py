"""A residual add with a gate, the end of each half of a block of a diffusion transformer. Replaces mul -> add."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._dispatch.call import call
from fusedops.ops.modulated import arguments, formulas
from fusedops.ops.modulated.arguments import named, per_sample


def gated_add(
    residual: Tensor, y: Tensor, gate: Tensor, *, activation: str | None = None, backend: str | None = None
) -> Tensor:
    """Compute ``residual + y * act(gate)``. No input is written.

    Args:
        residual: (B, S, H), float16, bfloat16, float32 or float64.
        y: the shape of ``residual``, any of the same dtypes.
        gate: (H,), (B, H), (B, 1, H), (B, S, H) or (B, S, 1), where 1 may stand for B and S, of any strides: a view of
            a longer row is not copied. Any of the same dtypes.
        activation: act: None for the gate itself, or "tanh", as in Lumina and Z-Image.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (B, S, H), contiguous, the dtype of ``residual``. Computed in float32 (float64 if an argument has it) and
        rounded once. The gradient of ``gate`` is summed in float32, over what it repeats for, in the same order on
        every run.

    Raises:
        InvalidInputError: an argument is not as above.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: diffusers, ``FluxTransformerBlock`` and ``LuminaNextDiTBlock``.

    >>> import torch, fusedops
    >>> fusedops.gated_add(torch.ones(1, 2, 2), torch.ones(1, 2, 2), torch.tensor([[0.5, 2.0]]))
    tensor([[[1.5000, 3.0000],
             [1.5000, 3.0000]]])
    """
    return call(OP, (residual, y, per_sample(gate), named(activation)), backend)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with a gate of one row for each sample as (B, 1, H), and the activation as a text."""
    return arguments.prepared(args, (2,), 3)


def reference(residual: Tensor, y: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Compute the op in plain torch."""
    return formulas.gated_add(residual, y, gate, activation)


def backward(
    grad: Tensor, y: Tensor, gate: Tensor, activation: str, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of y and gate; the residual's is the output's itself."""
    return formulas.gated_add_gradients(grad, y, gate, activation, needs)


OP = Op(
    gated_add,
    constraints=[*arguments.rows_of("residual"), *arguments.gated("residual")],
    reference=reference,
    backward=backward,
    differentiable=("y", "gate"),
    outputs=("s",),
    passed_through="residual",
    prepare_args=prepare_args,
    evidence="fusedops.ops.modulated.evidence:GATED_ADD",
)
