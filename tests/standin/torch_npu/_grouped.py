"""The product of groups of the fake torch_npu. Sources as in ``__init__.py``, and

* D8: op-plugin, ``docs/.../torch_npu-npu_grouped_matmul.md``, for Atlas A2 and A3: float16, bfloat16, float32, alike;
  group_list int64 of one dimension; ends do not fall, the last is the size of the axis; at most 1024 groups; the last
  size of x and weight, as they are stored, below 65536; x is not transposed with groups of rows, weight may be.
* D9: CANN's page aclnnGroupedMatmulV4: with groups of the sum x must be transposed, weight must not, and a bias is not
  taken.
* R5: ops-transformer, ``gmm/grouped_matmul/op_host/op_api``: strides show what is transposed, also where a size is 1;
  of a tensor with one element, the weight of sums and the x of rows are not.
* R1: with split_item 0 and 1 the group_list is read on the host; the fake refuses them. No autograd formula.
"""

from __future__ import annotations

from typing import Any

import torch
import torch_npu

_device = torch_npu._device
_library = torch_npu._library
_NAME = "npu_grouped_matmul"
_INNER = 65536


def _refuse(sentence: str) -> None:
    torch_npu._refuse(_NAME, sentence)


def _is_transposed(tensor: torch.Tensor) -> bool:
    """R5: by the strides of the last two dimensions, and of a batch of such matrices."""
    *batch, rows, columns = tensor.shape
    wanted = (*(rows * columns for _ in batch), 1, rows)
    return tensor.stride() == wanted


def _require(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor, group_type: int) -> None:
    if first.dtype not in torch_npu._FLOATS or second.dtype != first.dtype:
        _refuse(f"x and weight must be alike, of float16, bfloat16 or float32; got {first.dtype}, {second.dtype}.")
    if first.dim() != 2 or second.dim() != (3 if group_type == 0 else 2):
        _refuse(f"x must be 2-D, and weight 3-D for groups of rows, 2-D for groups of the sum; got {second.dim()}-D.")
    if first.numel() == 0 or second.numel() == 0:
        _refuse("no source documents empty tensors.")
    if first.shape[1] != second.shape[-2]:
        _refuse(f"the sizes of the sum must be equal; they are {first.shape[1]} and {second.shape[-2]}.")
    if ends.dtype != torch.int64 or ends.dim() != 1 or not ends.is_contiguous():
        _refuse("group_list must be int64 and 1-D.")
    if not 1 <= ends.shape[0] <= 1024 or (group_type == 0 and ends.shape[0] != second.shape[0]):
        _refuse(f"group_list must have one element for each group, at most 1024; it has {ends.shape[0]}.")
    values = _device.on_cpu(ends).tolist()
    if values != sorted(values) or values[0] < 0 or values[-1] != first.shape[0 if group_type == 0 else 1]:
        _refuse(f"the ends must not fall, and the last must be the size of their axis; they are {values}.")
    _require_layout(first, second, group_type)


def _require_layout(first: torch.Tensor, second: torch.Tensor, group_type: int) -> None:
    one = _is_transposed(first) and (group_type == 2 or first.numel() != 1)
    other = _is_transposed(second) and (group_type == 0 or second.numel() != 1)
    if one != (group_type == 2):
        _refuse("x must be transposed for groups of the sum, and must not be for groups of rows.")
    if other and group_type == 2:
        _refuse("weight must not be transposed for groups of the sum.")
    for name, tensor, swapped in (("x", first, one), ("weight", second, other)):
        if not (tensor.mT if swapped else tensor).is_contiguous():
            _refuse(f"{name} must be contiguous, or the transpose of such a tensor.")
        if tensor.shape[-2 if swapped else -1] >= _INNER:
            _refuse(f"the last size of {name} as stored must be below {_INNER}.")


def _grouped_matmul(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    *,
    group_list: torch.Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **others: Any,
) -> list[torch.Tensor]:
    if len(x) != 1 or len(weight) != 1 or split_item not in (2, 3):
        _refuse("the fake supports one x, one weight and one result alone: split_item 2 or 3.")
    if group_type not in (0, 2) or group_list_type != 0 or act_type != 0:
        _refuse("the fake supports group_type 0 and 2, ends as group_list, and no activation.")
    if any(value is not None for value in others.values()):
        _refuse("the fake supports the default of the other arguments alone.")
    first, second = x[0], weight[0]
    torch_npu._require_npu(_NAME, x=first, weight=second, group_list=group_list)
    _require(first, second, group_list, group_type)
    torch_npu._log(_NAME, first, second, group_list, split_item=split_item, group_type=group_type)
    one, other, start = _device.on_cpu(first).float(), _device.on_cpu(second).float(), 0
    parts: list[torch.Tensor] = []
    for e, end in enumerate(_device.on_cpu(group_list).tolist()):
        part = one[start:end] @ other[e] if group_type == 0 else one[:, start:end] @ other[start:end]
        if group_type == 2 and start == end:  # no source states the result
            part.fill_(float("nan"))
        parts.append(part)
        start = end
    y = torch.cat(parts) if group_type == 0 else torch.stack(parts)
    return [_device.to_device(y.to(first.dtype).contiguous())]


_library.define(  # V, as in the wheel of 2.13.0
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]"
)
_library.impl(_NAME, _grouped_matmul, "PrivateUse1")

npu_grouped_matmul = torch.ops.npu.npu_grouped_matmul
