"""rms_norm on Ascend: the vendor's kernel computes in float32 and rounds once, as the op does.

It takes rows and gamma of one dtype, or a float32 gamma beside float16 and bfloat16 rows. Its gamma is required.

Source: torch_npu.npu_rms_norm and its backward, documented for torch_npu 2.1 and later; op-plugin's kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import DType
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.norms._rms import BACKWARD_GAMMA, DTYPES, FORWARD_GAMMA, as_rows, gamma_of


def vendor_forward(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return y (..., H) and rstd (...)."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    size = x.shape[-1]
    if x.numel() == 0:  # the vendor documents no rstd for rows without columns
        y, rstd = ops.OPS["rms_norm"].reference_with_saved(x, weight, eps, offset, True)
        return y.contiguous(), rstd.contiguous()
    gamma = gamma_of(weight, offset, x.dtype, size, x.device)
    results: tuple[Tensor, Tensor] = vendor.npu_rms_norm(as_rows(x, size), gamma, epsilon=eps)
    return results[0].contiguous().view(x.shape), results[1].contiguous().view(x.shape[:-1])


def vendor_backward(
    grad: Tensor, rows: Tensor, rstd: Tensor, weight: Tensor | None, offset: float
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of the rows (..., H), in their dtype, and of the weight (H,), in its own."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    size = rows.shape[-1]
    if rows.numel() == 0:
        dx, dweight = ops.OPS["rms_norm"].backward(grad, rows, rstd, weight, offset, (True, True))
        return dx.contiguous(), dweight
    gamma = gamma_of(weight, offset, rows.dtype, size, rows.device)
    dy, x = as_rows(grad.to(rows.dtype), size), as_rows(rows, size)
    gradients: tuple[Tensor, Tensor] = vendor.npu_rms_norm_backward(dy, x, gamma, rstd.view(*x.shape[:-1], 1))
    dweight = None if weight is None else gradients[1].to(weight.dtype).contiguous()
    return gradients[0].contiguous().view(rows.shape), dweight


@kernel(
    ops.rms_norm,
    DType("x", *DTYPES),
    DType("weight", *DTYPES),
    source="torch_npu.npu_rms_norm",
    adapts=(FORWARD_GAMMA,),
    rows_independent=NOT_PROMISED,
)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, save: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the op for any rank."""
    y, rstd = vendor_forward(x, weight, eps, offset)
    return y, rstd if save else None


@kernel(
    ops.rms_norm,
    DType("x", *DTYPES),
    DType("weight", *DTYPES),
    direction="backward",
    source="torch_npu.npu_rms_norm_backward",
    adapts=(BACKWARD_GAMMA,),
    rows_independent=NOT_PROMISED,
)
def rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of x and weight; the vendor sums that of the weight in float32."""
    dx, dweight = vendor_backward(grad, x, rstd, weight, offset)
    return dx if needs[0] else None, dweight if needs[1] else None
