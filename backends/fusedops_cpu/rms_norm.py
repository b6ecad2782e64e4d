"""rms_norm in the compiled library: its constraints; the launchers are in ``_norm.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu._norm import norm_backward, norm_forward


@kernel(ops.rms_norm, *any_dtype("x", "weight"), source="fusedops_cpu/src/norm.cpp")
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op; x of any rank and strides, a weight of any dtype of the library."""
    y, _, _, rstd = norm_forward(x, None, weight, None, eps, offset, False, save)
    return y, rstd


@kernel(
    ops.rms_norm,
    *any_dtype("x", "weight"),
    direction="backward",
    source="fusedops_cpu/src/norm.cpp",
)
def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and weight; the sum for the weight does not depend on the number of threads."""
    dx, _, dweight, _ = norm_backward(
        grad, None, x, None, rstd, weight, None, offset, (needs[0], False, needs[1], False)
    )
    return dx, dweight
