"""experts in plain torch, without constraints. The computation is in ``_experts.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.ops.experts.arguments import ExpertsArgs, ExpertsGradArgs
from fusedops.ops.experts.formulas import Activation
from fusedops_eager._row_order import PRODUCTS
from fusedops_eager.experts import _experts
from fusedops_eager.experts._experts import Experts, functions_of


@kernel(
    ops.experts,
    source="torch.mm, fusedops_eager/experts/_experts.py",
    rows_independent=PRODUCTS,
)
def experts(a: ExpertsArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it."""
    functions = functions_of(Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved))
    return _experts.forward(
        a.x, a.index, a.weights, Experts(a.up, a.down, a.up_bias, a.down_bias, a.transposed), functions, save
    )


@kernel(
    ops.experts,
    direction="backward",
    source="fusedops_eager/experts/_experts.py",
    rows_independent=PRODUCTS,
)
def experts_backward(a: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients from the inputs and the up-projections of forward."""
    functions = functions_of(Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved))
    weights_of = Experts(a.up, a.down, a.up_bias, a.down_bias, a.transposed)
    return _experts.backward(a.grad, a.x, a.index, a.weights, weights_of, a.hidden, functions, a.needs)
