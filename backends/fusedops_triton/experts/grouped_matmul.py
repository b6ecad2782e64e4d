"""grouped_matmul on Triton: the kernels with their constraints. The launchers are in ``_grouped_matmul.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim
from fusedops_triton._constraints import GROUPED, LONGEST_ROW, supported

_CONSTRAINTS = (
    *supported("x", "weight"),
    Dim("x", (0,), at_most=2**30),  # the rows are counted in 32 bits
    Dim("weight", (-2, -1), at_most=LONGEST_ROW),
)
_SOURCE = "torch.nn.functional.grouped_mm, fusedops_triton/experts/_grouped.py"


@kernel(
    ops.grouped_matmul,
    *_CONSTRAINTS,
    source=_SOURCE,
    rows_independent=GROUPED,
)
def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Compute the products of all groups; tensors of any strides."""
    from fusedops_triton.experts._grouped_matmul import products_forward  # imports triton, so not at module level

    return products_forward(x, weight, offsets, bias, transposed)


@kernel(
    ops.grouped_matmul,
    *_CONSTRAINTS,
    direction="backward",
    source=_SOURCE,
    rows_independent=GROUPED,
)
def grouped_matmul_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias."""
    from fusedops_triton.experts._grouped_matmul import products_backward

    return products_backward(grad, x, weight, offsets, bias, transposed, needs)
