"""causal_conv1d in plain torch, without constraints. The computation is in ``_causal_conv.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager import _causal_conv
from fusedops_eager._row_order import VECTORS


@kernel(
    ops.causal_conv1d,
    source="fusedops_eager/_causal_conv.py",
    rows_independent=VECTORS,
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
    """Compute the op on any device, for any strides and dtypes."""
    return _causal_conv.forward(x, weight, bias, activation, initial_state, return_state, cu_seqlens)


@kernel(
    ops.causal_conv1d,
    direction="backward",
    source="fusedops_eager/_causal_conv.py",
    rows_independent=VECTORS,
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
    """Compute the gradients of x, weight, bias and initial_state."""
    of_state = grad_state if return_state else None
    return _causal_conv.backward(grad_y, of_state, x, weight, bias, initial_state, cu_seqlens, activation, needs)
