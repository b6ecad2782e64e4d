"""experts in plain torch, without constraints. The computation is in ``_experts.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.experts.formulas import Activation
from fusedops_eager import _experts
from fusedops_eager._experts import Experts, functions_of
from fusedops_eager._row_order import PRODUCTS


@kernel(
    ops.experts,
    source="torch.mm, fusedops_eager/_experts.py",
    rows_independent=PRODUCTS,
)
def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    transposed: bool,
    save: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it."""
    functions = functions_of(Activation(activation, limit, alpha, offset, interleaved))
    return _experts.forward(x, index, weights, Experts(up, down, up_bias, down_bias, transposed), functions, save)


@kernel(
    ops.experts,
    direction="backward",
    source="fusedops_eager/_experts.py",
    rows_independent=PRODUCTS,
)
def experts_backward(
    grad: Tensor,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    hidden: Tensor,
    activation: str,
    limit: float | None,
    alpha: float,
    offset: float,
    interleaved: bool,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients from the inputs and the up-projections of forward."""
    functions = functions_of(Activation(activation, limit, alpha, offset, interleaved))
    weights_of = Experts(up, down, up_bias, down_bias, transposed)
    return _experts.backward(grad, x, index, weights, weights_of, hidden, functions, needs)
