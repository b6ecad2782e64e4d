"""rms_norm on Triton: the kernels with their constraints. ``_norm.py`` and ``_norm_backward.py`` launch."""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops_triton._constraints import supported


@kernel(
    ops.rms_norm,
    *supported("x"),
    source="fusedops_triton/norms/_norm.py",
    rows_independent=True,
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op for any rank, row length, strides and dtypes."""
    from fusedops_triton.norms._norm import norm_forward  # imports triton, so not at module level

    y, _, _, rstd = norm_forward(x, None, weight, None, eps, offset, False, save)
    return y, rstd


@kernel(
    ops.rms_norm,
    *supported("x"),
    direction="backward",
    source="fusedops_triton/norms/_norm_backward.py",
    rows_independent=True,
)
def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x and weight in one pass, up to the row length that fits."""
    from fusedops_triton.norms._norm_backward import norm_backward

    dtypes, vectors = (x.dtype if needs[0] else None,), (weight if needs[1] else None, None)
    return norm_backward(grad, None, x, None, rstd, weight, offset, dtypes, vectors)[:2]
