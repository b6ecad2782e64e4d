"""GroupNorm with SiLU of the fake torch_npu. Sources as in ``__init__.py``, and

* D8: op-plugin, ``docs/.../torch_npu-npu_group_norm_silu.md``: 2 to 8 dimensions, dim 1 a multiple of group; weight and
  bias (C,), of one dtype, not narrower than input; eps above 0; mean and rstd (N, group) of the dtype of input.
"""

from __future__ import annotations

import torch
import torch_npu

_device = torch_npu._device
_library = torch_npu._library


def _group_norm_silu(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, group: int, eps: float = 1e-05
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    name = "npu_group_norm_silu"
    given = {key: each for key, each in (("weight", weight), ("bias", bias)) if each is not None}
    torch_npu._require_npu(name, input=input, **given)
    if not 2 <= input.dim() <= 8 or input.shape[1] % group or group < 1:
        torch_npu._refuse(name, f"input must have 2 to 8 dimensions, dim 1 a multiple of group; got {input.shape}.")
    for key, each in given.items():
        if each.shape != (input.shape[1],) or each.dtype not in (input.dtype, torch.float32):
            torch_npu._refuse(name, f"{key} must have dim 1 of input, and no narrower dtype; got {each.dtype}.")
    if len({each.dtype for each in given.values()}) > 1 or input.dtype not in torch_npu._FLOATS:
        torch_npu._refuse(name, "weight and bias must have one dtype, and input a documented one.")
    if eps <= 0 or input.numel() == 0:
        torch_npu._refuse(name, f"eps must be above 0, and input not empty; got {eps}.")
    torch_npu._log(name, input, *given.values(), group=group, eps=eps)
    x, *affine = (None if each is None else _device.on_cpu(each).float() for each in (input, weight, bias))
    assert x is not None
    rows = x.reshape(x.shape[0], group, -1)
    mean = rows.mean(-1)
    rstd = torch.rsqrt((rows - mean[..., None]).square().mean(-1) + eps)
    y = torch.nn.functional.silu(torch.nn.functional.group_norm(x, group, *affine, eps))
    results = (y.to(input.dtype).contiguous(), mean.to(input.dtype), rstd.to(input.dtype))
    first, second, third = map(_device.to_device, results)
    return first, second, third


def _meta(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, group: int, eps: float = 1e-05
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (input.shape[0], group)
    return torch.empty_like(input), input.new_empty(shape), input.new_empty(shape)


_library.define(
    "npu_group_norm_silu(Tensor input, Tensor? weight, Tensor? bias, int group, float eps=1e-05)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.impl("npu_group_norm_silu", _group_norm_silu, "PrivateUse1")
_library.impl("npu_group_norm_silu", _meta, "Meta")
npu_group_norm_silu = torch.ops.npu.npu_group_norm_silu
