"""causal_conv1d in plain torch, without constraints. The computation is in ``_causal_conv.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.convolution.arguments import CausalConv1dArgs, CausalConv1dGradArgs
from fusedops_eager._row_order import VECTORS
from fusedops_eager.convolution import _causal_conv


@kernel(
    ops.causal_conv1d,
    source="fusedops_eager/convolution/_causal_conv.py",
    rows_independent=VECTORS,
)
def causal_conv1d(a: CausalConv1dArgs) -> tuple[Tensor, Tensor]:
    """Compute the op on any device, for any strides and dtypes."""
    return _causal_conv.forward(*a)


@kernel(
    ops.causal_conv1d,
    direction="backward",
    source="fusedops_eager/convolution/_causal_conv.py",
    rows_independent=VECTORS,
)
def causal_conv1d_backward(a: CausalConv1dGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, weight, bias and initial_state."""
    of_state = a.grad_state if a.return_state else None
    return _causal_conv.backward(
        a.grad_y, of_state, a.x, a.weight, a.bias, a.initial_state, a.cu_seqlens, a.activation, a.needs
    )
