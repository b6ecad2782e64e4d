"""geglu on Triton: the kernels with their constraints. The launchers are in ``_gated.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import supported

_CONSTRAINTS = supported("gate", "up")


@kernel(
    ops.geglu,
    *_CONSTRAINTS,
    source="fusedops_triton/gated/_gated.py",
    rows_independent=True,
)
def geglu(gate: Tensor, up: Tensor | None, approximate: str, interleaved: bool) -> Tensor:
    """Compute the op for two tensors and for packed ones, of any shape and strides."""
    from fusedops_triton.gated._gated import Gelu, gated_forward  # imports triton, so not at module level

    return gated_forward(gate, up, Gelu("tanh" if approximate == "tanh" else "erf"), interleaved)


@kernel(
    ops.geglu,
    *_CONSTRAINTS,
    direction="backward",
    source="fusedops_triton/gated/_gated.py",
    rows_independent=True,
)
def geglu_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor | None,
    approximate: str,
    interleaved: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of gate and of up in one pass."""
    from fusedops_triton.gated._gated import Gelu, gated_backward

    return gated_backward(grad, gate, up, Gelu("tanh" if approximate == "tanh" else "erf"), interleaved, needs)
