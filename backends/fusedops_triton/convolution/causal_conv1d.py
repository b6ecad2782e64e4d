"""causal_conv1d on Triton: the kernels with their constraints. ``_causal_conv.py`` launches."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.convolution.arguments import CausalConv1dArgs, CausalConv1dGradArgs
from fusedops_triton._constraints import supported

_CONSTRAINTS = supported("x", "weight", "bias")


@kernel(
    ops.causal_conv1d,
    *_CONSTRAINTS,
    source="fusedops_triton/convolution/_causal_conv.py",
    rows_independent=True,
)
def causal_conv1d(a: CausalConv1dArgs) -> tuple[Tensor, Tensor]:
    """Compute the op for any strides and dtypes. The state is copied by torch."""
    from fusedops_triton.convolution._causal_conv import conv_forward  # imports triton, so not at module level

    return conv_forward(*a)


@kernel(
    ops.causal_conv1d,
    *_CONSTRAINTS,
    direction="backward",
    source="fusedops_triton/convolution/_causal_conv_backward.py",
    rows_independent=True,
)
def causal_conv1d_backward(a: CausalConv1dGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and the sums in one pass; those of the initial state by a kernel of their own."""
    from fusedops_triton.convolution._causal_conv_backward import conv_backward

    of_state = a.grad_state if a.return_state else None
    return conv_backward(
        a.grad_y, of_state, a.x, a.weight, a.bias, a.initial_state, a.cu_seqlens, a.activation, a.needs
    )
