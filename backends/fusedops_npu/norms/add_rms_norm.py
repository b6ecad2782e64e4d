"""add_rms_norm on Ascend: the sum, then the vendor's RMSNorm.

The vendor's own kernel with a residual is not used: in bfloat16 it normalizes, by the shape of the call, the rounded or
the unrounded sum, it rounds before it multiplies by gamma, and it has no backward (Ascend/ops-nn, norm/add_rms_norm).
"""

from __future__ import annotations

from torch import Tensor

from fusedops import kernel, ops
from fusedops.constraints import DType
from fusedops.ops.norms.arguments import AddRmsNormArgs, AddRmsNormGradArgs
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.norms._rms import DTYPES, FORWARD_GAMMA, SUM, SUM_GAMMA
from fusedops_npu.norms.rms_norm import vendor_backward, vendor_forward


@kernel(
    ops.add_rms_norm,
    DType("x", *DTYPES),
    DType("residual", *DTYPES),
    DType("weight", *DTYPES),
    source="torch_npu.npu_rms_norm",
    adapts=(FORWARD_GAMMA,),
    rows_independent=NOT_PROMISED,
)
def add_rms_norm(a: AddRmsNormArgs, save: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the op for any rank."""
    s = (a.x + a.residual).contiguous()
    y, rstd = vendor_forward(s, a.weight, a.eps, a.offset)
    return y.to(a.x.dtype), s, rstd if save else None


@kernel(
    ops.add_rms_norm,
    DType("s", *DTYPES),
    DType("weight", *DTYPES),
    direction="backward",
    source="torch_npu.npu_rms_norm_backward",
    adapts=(SUM_GAMMA, SUM),
    rows_independent=NOT_PROMISED,
)
def add_rms_norm_backward(a: AddRmsNormGradArgs) -> tuple[Tensor | None, ...]:
    """Compute the gradients of x, residual and weight, in float32: they are rounded once, after grad_s is added."""
    rows, dweight = vendor_backward(a.grad_y.float(), a.s.float(), a.rstd, a.weight, a.offset)
    ds = rows + a.grad_s.float()
    dx = ds.to(a.grad_y.dtype, copy=True).contiguous() if a.needs[0] else None
    dresidual = ds.to(a.residual_dtype).contiguous() if a.needs[1] else None
    return dx, dresidual, dweight if a.needs[2] else None
