"""layer_norm in the compiled library: its constraints; the launchers are in ``_norm.py``."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_cpu._constraints import any_dtype
from fusedops_cpu._norm import norm_backward, norm_forward


@kernel(ops.layer_norm, *any_dtype("x", "weight", "bias"), source="fusedops_cpu/src/norm.cpp")
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the op; x of any rank and strides, weight and bias of any dtypes of the library."""
    y, _, mean, rstd = norm_forward(x, None, weight, bias, eps, 0.0, True, save)
    return y, mean, rstd


@kernel(
    ops.layer_norm,
    *any_dtype("x", "weight", "bias"),
    direction="backward",
    source="fusedops_cpu/src/norm.cpp",
)
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias; sums over rows do not depend on the number of threads."""
    wanted = (needs[0], False, needs[1], needs[2])
    dx, _, dweight, dbias = norm_backward(grad, None, x, mean, rstd, weight, bias, 0.0, wanted)
    return dx, dweight, dbias
