"""grouped_matmul in plain torch, without constraints. The computation is in ``_grouped.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_eager._row_order import PRODUCTS
from fusedops_eager.experts import _grouped


@kernel(
    ops.grouped_matmul,
    source="torch.mm, torch.nn.functional.grouped_mm, fusedops_eager/experts/_grouped.py",
    rows_independent=PRODUCTS,
)
def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Compute each group on its own rows."""
    return _grouped.forward(x, weight, offsets, bias, transposed)


@kernel(
    ops.grouped_matmul,
    direction="backward",
    source="fusedops_eager/experts/_grouped.py",
    rows_independent=PRODUCTS,
)
def grouped_matmul_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of each group from its own rows."""
    return _grouped.backward(grad, x, weight, offsets, bias, transposed, needs)
