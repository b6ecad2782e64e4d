"""cross_entropy on Ascend: torch_npu's loss of each row, from float32 logits. The rest is computed around it.

The vendor's loss has the dtype of its input, where the op's is float32, so 16-bit logits are widened first. A negative
ignore_index means none to the vendor, which needs every target in range: the targets of rows that do not count are set
to 0, and their results are replaced. Its gradient supports neither label smoothing nor z-loss (op-plugin's page of the
function): such calls, and those with a softcap, are refused.

Source: torch_npu.npu_cross_entropy_loss and npu_cross_entropy_loss_backward: float16, bfloat16, float32, 1 to 200000
rows, int64 targets.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedops import Adaptation, kernel, ops
from fusedops.constraints import DType, Present, Scalar
from fusedops.ops.losses import formulas
from fusedops.ops.losses.arguments import CrossEntropyArgs, CrossEntropyGradArgs
from fusedops_npu._row_order import NOT_PROMISED
from fusedops_npu.losses._rows import Rows


def _forward_cost(logits: Any, *rest: Any) -> int | None:
    """Return the bytes of the float32 copy, None where the logits are that."""
    return None if logits.dtype is torch.float32 else 4 * math.prod(logits.shape)


def _backward_cost(grad: Any, logits: Any, *rest: Any) -> int:
    """Return the bytes of the float32 gradient of 16-bit logits; log_prob is there, but in a compiled graph."""
    return 0 if logits.dtype is torch.float32 else 4 * math.prod(logits.shape)


_FORWARD = Adaptation("float32", "16-bit logits are widened: the vendor's loss has their dtype", _forward_cost)
_BACKWARD = Adaptation(
    "float32",
    "the gradient is float32, then rounded; in a compiled graph log_prob is made again from the logits",
    _backward_cost,
)
_LIMITS = (
    DType("logits", torch.float16, torch.bfloat16, torch.float32),
    Rows("logits", at_most=200000),
    Scalar("label_smoothing", one_of=(0.0,)),
    Scalar("z_loss", one_of=(0.0,)),
    Present("softcap", False),
)


@kernel(
    ops.cross_entropy,
    *_LIMITS,
    source="torch_npu.npu_cross_entropy_loss",
    adapts=(_FORWARD,),
    rows_independent=NOT_PROMISED,
)
def cross_entropy(a: CrossEntropyArgs, save: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the op for any rank."""
    import torch_npu  # pyright: ignore[reportMissingImports]

    classes, ignored, wrong = formulas.classes_of(a.target, a.ignore_index, a.logits.shape[-1])
    lse = log_prob = None
    if a.target.numel() == 0:
        loss = torch.empty(a.target.shape, dtype=torch.float32, device=a.logits.device)
        lse, log_prob = loss.clone(), torch.empty(a.logits.shape, dtype=torch.float32, device=a.logits.device)
    else:
        vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
        rows, places = a.logits.reshape(-1, a.logits.shape[-1]).float().contiguous(), classes.reshape(-1).contiguous()
        results: tuple[Tensor, ...] = vendor.npu_cross_entropy_loss(rows, places, reduction="none")
        loss = results[0].view(a.target.shape).masked_fill(ignored, 0.0).masked_fill(wrong, math.nan)
        log_prob = results[1].contiguous().view(a.logits.shape)
        if save:
            lse = _lse(rows, results[1], places).view(a.target.shape).masked_fill(ignored, 0.0)
    total = formulas.reduced(loss, a.target, a.options)
    return total.contiguous(), lse if save else None, log_prob if save else None


@kernel(
    ops.cross_entropy,
    *_LIMITS,
    direction="backward",
    source="torch_npu.npu_cross_entropy_loss_backward",
    adapts=(_BACKWARD,),
    rows_independent=NOT_PROMISED,
)
def cross_entropy_backward(a: CrossEntropyGradArgs) -> Tensor:
    """Compute the gradient of the logits."""
    log_prob = a.log_prob
    import torch_npu  # pyright: ignore[reportMissingImports]

    if a.logits.numel() == 0:
        return torch.empty_like(a.logits, memory_format=torch.contiguous_format)
    vendor: Any = torch_npu  # pyright: ignore[reportUnknownVariableType]
    size = a.logits.shape[-1]
    classes, ignored, _ = formulas.classes_of(a.target, a.ignore_index, size)
    scale = formulas.row_scales(a.grad, a.target, size, a.options).float()
    if log_prob is None:
        log_prob = a.logits.float() - a.lse.unsqueeze(-1)
    rows, places = log_prob.reshape(-1, size).contiguous(), classes.reshape(-1).contiguous()
    dx: Tensor = vendor.npu_cross_entropy_loss_backward(scale.reshape(-1).contiguous(), rows, places, reduction="none")
    # 0 times NaN is NaN, and an ignored row has gradient 0 whatever its logits
    return dx.view(a.logits.shape).masked_fill(ignored.unsqueeze(-1), 0.0).to(a.logits.dtype).contiguous()


def _lse(rows: Tensor, log_prob: Tensor, places: Tensor) -> Tensor:
    """Return logsumexp of each row: a logit minus its log_prob, the target's or, at -inf, the largest."""
    column = places.unsqueeze(-1)
    lse = (rows.gather(-1, column) - log_prob.gather(-1, column))[:, 0]
    return torch.where(lse.isnan(), rows.amax(-1) - log_prob.amax(-1), lse)
