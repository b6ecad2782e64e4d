"""top_k_routing on Ascend: torch_npu's choice of experts, corrected to the op's weights. Its gradient is plain torch.

- The vendor's function divides the weights by their sum for "sigmoid", and does not for "softmax". Where the op wants
  the other, the weights are computed again from those of the chosen, (..., k).
- Logits and bias are passed in float32, as the op computes: the vendor's weights have the dtype of its logits.
- Ties: the code in numpy on the vendor's page sorts stably, and Ascend C's Sort, which the vendor's kernel calls, puts
  the first of equal elements first. So the lowest index wins, as in the op.
- NaN is in no page. Rows whose scores are NaN are not passed on: they get the experts 0 to k - 1, and weights of NaN.
  For "softmax", whose scores are then all NaN, this is the op's result.
- Experts outside the selected groups are -inf to the vendor: a bias of -inf, which would be as low, is made finite.

The vendor's backward function is absent from 7 of the 13 releases of docs/ascend.md, and needs the scores of
all experts, which the op does not keep. So the gradient is computed by the op's own formula, on the device. Nothing
waits for it.

Source: torch_npu.npu_moe_gating_top_k, from the page of op-plugin and of CANN's aclnnMoeGatingTopK for Atlas A2 and A3:
float16, bfloat16, float32; 2048 experts; renorm 0 alone; "softmax" and "sigmoid"; sizes of groups by ``GroupsFit``.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops import Adaptation, Deviation, kernel, ops
from fusedops.constraints import Dim, DType, OneOf, Present
from fusedops.ops.routing import formulas
from fusedops.ops.routing.arguments import TopKRoutingArgs, TopKRoutingGradArgs
from fusedops.ops.routing.top_k_routing import empty
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.routing._routing_limits import MOST, GroupsFit, selects_groups

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _rows_cost(logits: Any, *rest: Any) -> int:
    """Return the bytes of the logits in float32."""
    return 4 * prod(logits.shape)


_ROWS = Adaptation("rows", "logits are float32, without the rows whose scores are NaN", _rows_cost)
_NAN = Deviation(
    "nan-choice",
    "by sigmoid, a row with NaN among its logits gets the experts 0 to k - 1, all of weight NaN, where the op chooses "
    "those of NaN first: torch_npu does not document how it compares NaN",
)


@kernel(
    ops.top_k_routing,
    DType("logits", *_DTYPES),
    Dim("logits", (-1,), at_least=3, at_most=MOST),
    OneOf("score", "softmax", "sigmoid"),
    GroupsFit("groups"),
    Present("index", False, fix="use another backend for given experts, where nothing is chosen"),
    source="torch_npu.npu_moe_gating_top_k",
    deviations=(_NAN,),
    adapts=(_ROWS,),
    rows_independent=NOT_PROMISED,
)
def top_k_routing(a: TopKRoutingArgs) -> tuple[Tensor, Tensor]:
    """Choose experts by the vendor's function, and correct its weights where the op has others."""
    groups = a.groups
    top_groups = a.top_groups
    if a.logits.numel() == 0:
        return empty(a.logits, a.k)
    z = a.logits.reshape(-1, a.logits.shape[-1]).float()
    sigmoid = a.score == "sigmoid"
    best = z.amax(-1, keepdim=True)  # NaN where there is one
    wrong = best.isnan() if sigmoid else ~best.isfinite()
    if not selects_groups(groups, top_groups):
        groups = top_groups = 1
    weights, chosen = _vendor(
        z.masked_fill(wrong, 0.0),
        a.k,
        _finite(a.bias),
        top_groups,
        groups,
        int(a.group_score == "top2"),
        int(sigmoid),
        a.scale if a.normalize == sigmoid else 1.0,
        a.eps,
    )
    if a.normalize and not sigmoid:
        weights = weights / (weights.sum(-1, keepdim=True) + a.eps) * a.scale
    elif sigmoid and not a.normalize:
        weights = formulas.sigmoid(z.gather(-1, chosen)) * a.scale
    shape = (*a.logits.shape[:-1], a.k)
    first = torch.arange(a.k, device=z.device)
    return weights.masked_fill(wrong, float("nan")).view(shape), torch.where(wrong, first, chosen).view(shape)


@kernel(
    ops.top_k_routing,
    DType("logits", *_DTYPES),
    direction="backward",
    source="torch, by the formula of the op",
    rows_independent=NOT_PROMISED,
)
def top_k_routing_backward(a: TopKRoutingGradArgs) -> Tensor:
    """Compute the gradient of the logits from the chosen experts."""
    gradient = formulas.logits_gradient(a.grad_weights, a.logits, a.chosen, a.score, a.normalize, a.eps, a.scale)
    return gradient.to(a.logits.dtype).contiguous()


def _finite(bias: Tensor | None) -> Tensor | None:
    """Return the bias in float32: -inf as the lowest finite number, NaN, the largest number to the op, as inf."""
    if bias is None:
        return None
    lowest = torch.finfo(torch.float32).min
    return bias.float().nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=lowest)


def _vendor(
    logits: Tensor,
    k: int,
    bias: Tensor | None,
    top_groups: int,
    groups: int,
    by_two: int,
    sigmoid: int,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the vendor's weights and index, (rows, k), float32 and int64."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    weights, chosen, _ = vendor.npu_moe_gating_top_k(
        logits,
        k,
        bias=bias,
        k_group=top_groups,
        group_count=groups,
        group_select_mode=by_two,
        norm_type=sigmoid,
        routed_scaling_factor=scale,
        eps=eps,
    )
    return weights, chosen.long()
