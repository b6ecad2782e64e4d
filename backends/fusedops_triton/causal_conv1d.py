"""causal_conv1d on Triton: the kernels with their constraints. ``_causal_conv.py`` launches."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import supported

_CONSTRAINTS = supported("x", "weight", "bias")


@kernel(
    ops.causal_conv1d,
    *_CONSTRAINTS,
    source="fusedops_triton/_causal_conv.py",
    rows_independent=True,
)
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    initial_state: Tensor | None,
    return_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the op for any strides and dtypes. The state is copied by torch."""
    from fusedops_triton._causal_conv import conv_forward  # imports triton, so not at module level

    return conv_forward(x, weight, bias, activation, initial_state, return_state, cu_seqlens)


@kernel(
    ops.causal_conv1d,
    *_CONSTRAINTS,
    direction="backward",
    source="fusedops_triton/_causal_conv_backward.py",
    rows_independent=True,
)
def causal_conv1d_backward(
    grad_y: Tensor,
    grad_state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    return_state: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and the sums in one pass; those of the initial state by a kernel of their own."""
    from fusedops_triton._causal_conv_backward import conv_backward

    of_state = grad_state if return_state else None
    return conv_backward(grad_y, of_state, x, weight, bias, initial_state, cu_seqlens, activation, needs)
