"""grouped_matmul on Ascend: torch_npu's product of groups, which has no gradient of its own: it is called for that too.

One function has both forms. Groups of rows: x (M, K) with a weight (E, K, N). Groups of the sum: the transpose of rows
(S, M) with rows (S, N), for (E, M, N); that is the gradient of the weight, and of the bias with a column of ones. The
ends of the groups stay on the device, and nothing waits for it.

- The last end must be the number of rows. Rows past the last end of the op are given to the last group, or, in sums, to
  one group more, whose sum is dropped. So an inf in such a row reaches no other number.
- The sum of an empty group is not documented. It is set to 0, as the rows past the last end are.
- A weight may be the transpose of a contiguous tensor. Which of the two it is, the vendor reads from the strides, also
  of dims of size 1, where torch accepts any stride: ``_dense`` makes them those of the shape.
- The vendor's bias is float32 beside bfloat16, and is not used: the bias is added after the product.

Source: torch_npu.npu_grouped_matmul, for Atlas A2 and A3, from the pages of op-plugin and of CANN's
aclnnGroupedMatmulV4: float16, bfloat16, float32, alike for x and weight; at most 1024 groups; inner sizes below 65536;
the same bits on every run. By the messages in their wheels, torch_npu 2.5.1.post1 and 2.6.0 refuse groups of the sum,
and the other releases of docs/ascend.md take them.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops import Adaptation, kernel, ops
from fusedops.constraints import Dim, DType, SameDType
from fusedops.ops.experts.formulas import valid_ends
from fusedops_npu._row_order import NOT_PROMISED

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LIMITS = (
    DType("x", *_DTYPES),
    SameDType("weight", "x"),
    DType("bias", *_DTYPES),
    Dim("weight", (0,), at_most=1023),  # a gradient has one group more, of the rows past the last end
    Dim("weight", (-2, -1), at_most=65535),
)
_ROWS, _SUM = 0, 2  # the vendor's group_type: the axis that the groups are of


def _bias_cost(x: Any, weight: Any, offsets: Any, bias: Any, transposed: bool) -> int | None:
    """Return the bytes of the bias of each row."""
    return None if bias is None else x.shape[0] * bias.shape[1] * bias.dtype.itemsize


def _group_cost(grad: Any, x: Any, weight: Any, *rest: Any) -> int:
    """Return the bytes of the gradient of one weight."""
    return prod(weight.shape[1:]) * weight.dtype.itemsize


def _wide_cost(grad: Any, x: Any, weight: Any, offsets: Any, bias: Any, *rest: Any) -> int | None:
    """Return the bytes of the float32 gradient, None where the gradient is that, or in the dtype of the bias."""
    if bias is None or bias.dtype == x.dtype or x.dtype == torch.float32:
        return None
    return 4 * x.shape[0] * bias.shape[1]


_BIAS = Adaptation("bias", "the bias of each row is gathered, and added after the product", _bias_cost)
_GROUP = Adaptation("group", "rows past the last end are a group more of the gradient of weight, dropped", _group_cost)
_WIDE = Adaptation("float32", "16-bit gradients are widened for the sums of a bias of another dtype", _wide_cost)


@kernel(
    ops.grouped_matmul,
    *_LIMITS,
    source="torch_npu.npu_grouped_matmul",
    adapts=(_BIAS,),
    rows_independent=NOT_PROMISED,
)
def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Compute the products of all groups, then add the bias."""
    rows, experts = x.shape[0], weight.shape[0]
    if experts == 0:
        return x.new_zeros(rows, weight.shape[2 if transposed else 1])
    ends = valid_ends(offsets, rows)
    y = _products(x, weight if transposed else weight.mT, ends)
    row = torch.arange(rows, device=x.device)
    if bias is not None:  # the sum of two 16-bit numbers is rounded once
        group = torch.searchsorted(ends, row, right=True).clamp(max=experts - 1)
        y = (y + bias[group]).to(x.dtype)
    return y.masked_fill_((row >= ends[-1:])[:, None], 0.0)


@kernel(
    ops.grouped_matmul,
    *_LIMITS,
    direction="backward",
    source="torch_npu.npu_grouped_matmul",
    adapts=(_GROUP, _WIDE),
    rows_independent=NOT_PROMISED,
)
def grouped_matmul_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    transposed: bool,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias, each with one call of the vendor's function."""
    rows = x.shape[0]
    dx = dweight = dbias = None
    if weight.shape[0] == 0:
        dx, dweight, dbias = (
            None if each is None or not need else torch.zeros_like(each, memory_format=torch.contiguous_format)
            for each, need in zip((x, weight, bias), needs)
        )
        return dx, dweight, dbias
    ends = valid_ends(offsets, rows)
    if needs[0]:
        dx = _products(grad, weight.mT if transposed else weight, ends)
        dx.masked_fill_((torch.arange(rows, device=x.device) >= ends[-1:])[:, None], 0.0)
    if needs[1]:
        dweight = group_sums(x, grad, ends) if transposed else group_sums(grad, x, ends)
    if needs[2] and bias is not None:
        wide = grad if grad.dtype == bias.dtype else grad.float()
        dbias = group_sums(wide.new_ones(rows, 1), wide, ends)[:, 0].to(bias.dtype)
    return dx, dweight, dbias


def _products(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the rows (S, K) times the weight (E, K, N) of their group, (S, N); those past the last end are any."""
    if rows.numel() == 0 or weight.numel() == 0:
        return rows.new_zeros(rows.shape[0], weight.shape[2])
    swapped = weight.mT.is_contiguous() and not weight.is_contiguous()
    factor = _dense(weight.mT).mT if swapped else _dense(weight)
    return _vendor(_dense(rows), factor, torch.cat((ends[:-1], ends.new_full((1,), rows.shape[0]))), _ROWS)


def group_sums(first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    """Return ``first.T @ second`` of the rows (S, M) and (S, N) of each group, (E, M, N)."""
    if first.numel() == 0 or second.numel() == 0:
        return first.new_zeros(ends.shape[0], first.shape[1], second.shape[1])
    stops = torch.cat((ends, ends.new_full((1,), first.shape[0])))
    empty = ends == torch.cat((ends.new_zeros(1), ends[:-1]))
    return _vendor(_dense(first).t(), _dense(second), stops, _SUM)[:-1].masked_fill_(empty[:, None, None], 0.0)


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous, with the strides of its shape also where a size is 1."""
    return tensor.contiguous().view(-1).view(tensor.shape)


def _vendor(first: Tensor, second: Tensor, ends: Tensor, group_type: int) -> Tensor:
    """Return the one tensor of the result, which split_item 3 is for; a list type of 0 is of ends, not of sizes."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    results: list[Tensor] = vendor.npu_grouped_matmul(
        [first], [second], group_list=ends, split_item=3, group_type=group_type, group_list_type=0
    )
    return results[0]
