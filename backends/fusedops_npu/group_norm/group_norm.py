"""group_norm with SiLU on Ascend, forward: the vendor's function always computes SiLU, and has no backward.

Its mean and rstd have the dtype of x, so those of 16 bits are not what a backward may read; they are computed again.
Source: torch_npu.npu_group_norm_silu: float16, bfloat16, float32; weight and bias of one dtype, not narrower than x;
eps above 0.
"""

from __future__ import annotations

from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import DType, Finite, OneOf
from fusedops.ops.group_norm.arguments import SILU, GroupNormArgs
from fusedops.ops.group_norm.group_norm import mean, rstd
from fusedops_npu._row_order import NOT_PROMISED

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INFINITE = Deviation(
    "infinite-silu", "torch_npu does not document the SiLU of -inf: it may be NaN, where the op gives 0"
)


def _affine_cost(x: Any, groups: int, weight: Any, bias: Any, *rest: Any) -> int | None:
    """Return the bytes of weight and bias in float32, None where they are passed as they are."""
    given = [each for each in (weight, bias) if each is not None]
    return None if _are_alike(x, given) else sum(4 * prod(each.shape) for each in given)


def _are_alike(x: Any, given: list[Any]) -> bool:
    """Return True where weight and bias have one dtype, that of x or float32."""
    return len({each.dtype for each in given}) <= 1 and all(each.dtype in (x.dtype, torch.float32) for each in given)


@kernel(
    ops.group_norm,
    DType("x", *_DTYPES),
    DType("weight", *_DTYPES),
    DType("bias", *_DTYPES),
    Finite("eps", at_least=torch.finfo(torch.float32).tiny),
    OneOf("activation", SILU),
    source="torch_npu.npu_group_norm_silu",
    adapts=(Adaptation("affine", "weight and bias are passed in float32", _affine_cost),),
    deviations=(_INFINITE, Deviation("no-backward", "the gradients are those of eager")),
    rows_independent=NOT_PROMISED,
)
def group_norm(a: GroupNormArgs, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the op, and for a backward mean and rstd in float32."""
    if a.x.numel() == 0:
        y, *saved = ops.OPS["group_norm"].reference_with_saved(*a, save)
        return y, saved[0], saved[1]
    given = [each for each in (a.weight, a.bias) if each is not None]
    alike = _are_alike(a.x, given)
    weight, bias = (each if each is None or alike else each.float() for each in (a.weight, a.bias))
    y, vendors_mean, vendors_rstd = _vendor(a.x.contiguous(), weight, bias, a.groups, a.eps)
    if not save:
        return y, None, None
    if a.x.dtype is torch.float32:
        return y, vendors_mean, vendors_rstd
    return y, mean(a.x, a.groups), rstd(a.x, a.groups, a.eps)


def _vendor(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    import torch_npu  # pyright: ignore[reportMissingImports]

    results = torch_npu.npu_group_norm_silu(x, weight, bias, groups, eps)  # pyright: ignore
    return cast("tuple[Tensor, Tensor, Tensor]", results)
