"""geglu in plain torch, without constraints. The computation is in ``_geglu.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import VECTORS
from fusedops_eager.gated._geglu import geglu_backward as compute_backward
from fusedops_eager.gated._geglu import geglu_forward


@kernel(
    ops.geglu,
    source="fusedops_eager/gated/_geglu.py",
    rows_independent=VECTORS,
)
def geglu(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> Tensor:
    """Compute the op on any device, for two tensors and for packed ones."""
    return geglu_forward(gate, up, approximate, interleaved)


@kernel(
    ops.geglu,
    direction="backward",
    source="fusedops_eager/gated/_geglu.py",
    rows_independent=VECTORS,
)
def geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and of up from the inputs."""
    return compute_backward(grad, gate, up, approximate, interleaved, needs)
