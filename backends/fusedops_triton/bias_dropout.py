"""bias_dropout on Triton: its limits, and the way to the launchers in ``_bias_dropout.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Capability


# Triton itself supports NVIDIA GPUs from compute capability 8.0 (Ampere) on
@kernel(ops.bias_dropout, Capability("x", (8, 0)), source="fusedops_triton/_bias_dropout.py")
def bias_dropout(
    x: Tensor, bias: Tensor | None = None, p: float = 0.5, *, training: bool = True, seed: Tensor | None = None
) -> Tensor:
    """Any shape, stride and shape of bias."""
    from fusedops_triton._bias_dropout import dropout_forward  # triton is imported by the first call, not before

    return dropout_forward(x, bias, None, p, training, seed)


@kernel(ops.bias_dropout, Capability("grad", (8, 0)), direction="backward", source="fusedops_triton/_bias_dropout.py")
def bias_dropout_backward(
    grad: Tensor,
    seed: Tensor | None,
    bias: Tensor | None,
    p: float,
    training: bool,
    x_dtype: torch.dtype,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and bias, by the mask made again from the seed; that of a bias (H,) in the same pass."""
    from fusedops_triton._bias_dropout import dropout_backward

    return dropout_backward(grad, seed, bias, p, training, x_dtype, needs)
