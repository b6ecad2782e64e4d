"""The choice of experts of the fake torch_npu. Sources as in ``__init__.py``, and

* D10: op-plugin, ``docs/.../torch_npu-npu_moe_gating_top_k.md``, for Atlas A2 and A3: x 2-D, float16, bfloat16 or
  float32, at most 2048 experts; bias of the dtype of x; renorm 0; groups of more than 2 experts, at most 2048 when each
  is filled up to a multiple of 32; its code in numpy, which sorts stably and divides by the sum for sigmoid alone.
* D11: CANN's page of Ascend C's Sort: of equal scores the one that comes first is first.
* R6: ops-transformer, ``moe/moe_gating_top_k/op_host``: the filled-up size is checked where groups are selected alone;
  ``op_kernel``: rows are filled up with -inf before they are sorted.
* R1: x and bias, and the results. No source states what is chosen among NaN: the fake returns numbers of no expert.
"""

from __future__ import annotations

import torch
import torch_npu

_device = torch_npu._device
_library = torch_npu._library
_NAME = "npu_moe_gating_top_k"
_MOST = 2048


def _refuse(sentence: str) -> None:
    torch_npu._refuse(_NAME, sentence)


def _require(x: torch.Tensor, bias: torch.Tensor | None, k: int, k_group: int, group_count: int) -> None:
    if x.dim() != 2 or x.dtype not in torch_npu._FLOATS:
        _refuse(f"x must be 2-D, of float16, bfloat16 or float32; it is {x.dim()}-D, {x.dtype}.")
    if x.numel() == 0:
        _refuse("no source documents empty tensors.")
    experts = x.shape[1]
    if bias is not None:
        torch_npu._require_npu(_NAME, bias=bias)
        if bias.dtype != x.dtype or bias.shape != (experts,):
            _refuse(f"bias must have the dtype of x, and one element for each expert; it is {bias.dtype}.")
    if experts > _MOST:
        _refuse(f"there must be at most {_MOST} experts; there are {experts}.")
    if not 1 <= k_group <= group_count:
        _refuse(f"k_group must be from 1 to group_count; it is {k_group}.")
    if experts % group_count or experts // group_count <= 2:
        _refuse(f"group_count must divide the experts into groups of more than 2; it is {group_count}.")
    width = experts // group_count
    if k_group != group_count and group_count * -(-width // 32) * 32 > _MOST:
        _refuse(f"the groups, filled up to multiples of 32, must have at most {_MOST} experts.")
    if not 1 <= k <= k_group * width:
        _refuse(f"k must be from 1 to {k_group * width}; it is {k}.")


def _gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch_npu._require_npu(_NAME, x=x)
    if input_ids is not None or tid2eid is not None:
        _refuse("the fake supports no hash mode.")
    if renorm != 0 or norm_type not in (0, 1) or group_select_mode not in (0, 1):
        _refuse("renorm must be 0, norm_type and group_select_mode 0 or 1.")
    _require(x, bias, k, k_group, group_count)
    options = {"k_group": k_group, "group_count": group_count, "group_select_mode": group_select_mode}
    given = (x,) if bias is None else (x, bias)
    torch_npu._log(_NAME, *given, k=k, norm_type=norm_type, scale=routed_scaling_factor, **options)
    z = _device.on_cpu(x).float()
    if norm_type == 1:
        scores = 1 / (1 + torch.exp(-z))
    else:
        powers = torch.exp(z - z.amax(-1, keepdim=True))
        scores = powers * (1 / powers.sum(-1, keepdim=True))
    choices = scores if bias is None else scores + _device.on_cpu(bias).float()
    undefined = choices.isnan().any(-1, keepdim=True)
    if group_count > 1:
        choices = _of_best_groups(choices, k_group, group_count, group_select_mode)
    index = torch.argsort(-choices, dim=-1, stable=True)[:, :k]  # D10, D11
    y = scores.gather(-1, index)
    if norm_type == 1:
        y = y / (y.sum(-1, keepdim=True) + eps)
    y = (y * routed_scaling_factor).masked_fill(undefined, float("nan")).to(x.dtype)
    index = torch.where(undefined, x.shape[1], index).to(torch.int32)
    out = scores if out_flag else torch.full_like(scores, float("nan"))
    return tuple(_device.to_device(each.contiguous()) for each in (y, index, out))


def _of_best_groups(choices: torch.Tensor, k_group: int, group_count: int, by_two: int) -> torch.Tensor:
    """D10: the experts of the other groups are -inf."""
    groups = choices.view(choices.shape[0], group_count, -1)
    of_groups = groups.topk(2, -1).values.sum(-1) if by_two else groups.amax(-1)
    best = torch.argsort(-of_groups, dim=-1, stable=True)[:, :k_group]
    other = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(other[..., None], float("-inf")).flatten(1)


_library.define(  # V, as in the wheel of 2.13.0
    "npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, "
    "int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False, "
    "float routed_scaling_factor=1.0, float eps=1e-20) -> (Tensor, Tensor, Tensor)"
)
_library.impl(_NAME, _gating_top_k, "PrivateUse1")

npu_moe_gating_top_k = torch.ops.npu.npu_moe_gating_top_k
