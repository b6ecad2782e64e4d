"""experts on Triton: the kernels with their constraints. The launchers are in ``_experts.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import Dim
from fusedops.ops.experts.arguments import ExpertsArgs, ExpertsGradArgs
from fusedops.ops.experts.formulas import Activation
from fusedops_triton._constraints import GROUPED, LONGEST_ROW, supported

_CONSTRAINTS = (
    *supported("x", "up", "down"),
    Dim("index", (0,), at_most=2**24),  # the routed rows are counted in 32 bits
    Dim("index", (1,), at_most=2**6),
    Dim("up", (-2, -1), at_most=LONGEST_ROW),
)


@kernel(
    ops.experts,
    *_CONSTRAINTS,
    source="torch.nn.functional.grouped_mm, fusedops_triton/experts/_experts.py",
    rows_independent=GROUPED,
)
def experts(a: ExpertsArgs, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute each expert on the rows that chose it; tensors of any strides."""
    from fusedops_triton.experts._experts import experts_forward  # imports triton, so not at module level

    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    return experts_forward(a.x, a.index, a.weights, a.up, a.down, a.up_bias, a.down_bias, act, a.transposed, save)


@kernel(
    ops.experts,
    *_CONSTRAINTS,
    direction="backward",
    source="torch.nn.functional.grouped_mm, fusedops_triton/experts/_experts.py",
    rows_independent=GROUPED,
)
def experts_backward(a: ExpertsGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients from the inputs and the up-projections of forward."""
    from fusedops_triton.experts._experts import experts_backward as backward

    act = Activation(a.activation, a.limit, a.alpha, a.offset, a.interleaved)
    return backward(
        a.grad, a.x, a.index, a.weights, a.up, a.down, a.up_bias, a.down_bias, a.hidden, act, a.transposed, a.needs
    )
