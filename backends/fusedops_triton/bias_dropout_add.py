"""bias_dropout_add on Triton: its limits, and the way to the launchers in ``_bias_dropout.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Capability


# Triton itself supports NVIDIA GPUs from compute capability 8.0 (Ampere) on
@kernel(ops.bias_dropout_add, Capability("x", (8, 0)), source="fusedops_triton/_bias_dropout.py")
def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    p: float = 0.5,
    *,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """Any shape, stride and shape of bias, any mix of dtypes."""
    from fusedops_triton._bias_dropout import dropout_forward  # triton is imported by the first call, not before

    return dropout_forward(x, bias, residual, p, training, seed)


@kernel(
    ops.bias_dropout_add, Capability("grad", (8, 0)), direction="backward", source="fusedops_triton/_bias_dropout.py"
)
def bias_dropout_add_backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """As bias_dropout's: the residual's gradient is grad itself, and not a kernel's business."""
    from fusedops_triton._bias_dropout import dropout_backward

    return dropout_backward(grad, seed, bias, p, training, x_dtype, needs)
