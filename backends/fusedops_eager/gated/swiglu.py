"""swiglu in plain torch, without constraints. The computation is in ``_swiglu.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import VECTORS
from fusedops_eager.gated._swiglu import swiglu_backward as compute_backward
from fusedops_eager.gated._swiglu import swiglu_forward


@kernel(
    ops.swiglu,
    source="fusedops_eager/gated/_swiglu.py",
    rows_independent=VECTORS,
)
def swiglu(
    gate: Tensor, up: Tensor | None, limit: float | None, alpha: float, offset: float, interleaved: bool
) -> Tensor:
    """Compute the op on any device, for two tensors and for packed ones."""
    return swiglu_forward(gate, up, limit, alpha, offset, interleaved)


@kernel(
    ops.swiglu,
    direction="backward",
    source="fusedops_eager/gated/_swiglu.py",
    rows_independent=VECTORS,
)
def swiglu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and of up from the inputs."""
    return compute_backward(grad, gate, up, limit, alpha, offset, interleaved, needs)
