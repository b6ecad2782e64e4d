"""The calls of linear_cross_entropy that tests and benchmarks make, its peers, and the chain that it replaces."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Evidence
from fusedops._contract.values import Case
from fusedops.ops.losses import formulas, linear_error_bounds

SMALL: Mapping[str, Any] = {"x": (70, 96), "weight": (13, 96), "target": (70,), "chunk": 32}
CASES = [
    Case("every_option", {**SMALL, "bias": (13,), "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 20.0}),
    Case("each_row", {**SMALL, "reduction": "none"}, "the loss of each row"),
    Case("shared_denominator", {**SMALL, "denominator": (1,)}, "gradient accumulation over several calls"),
    Case("many_classes", {"x": (33, 8), "weight": (4099, 8), "target": (33,), "reduction": "sum"}),
    Case("llama_3_8b", {"x": (2, 1024, 4096), "weight": (128256, 4096), "target": (2, 1024)}, "Llama 3 8B"),
    Case(
        "gemma_2_2b",
        {"x": (1, 1024, 2304), "weight": (256000, 2304), "target": (1, 1024), "softcap": 30.0},
        "Gemma 2 2B, logits capped at 30",
    ),
    Case(
        "gpt_j_6b",
        {"x": (2, 512, 4096), "weight": (50400, 4096), "target": (2, 512), "bias": (50400,)},
        "GPT-J 6B, with a bias",
    ),
]

PEERS = """
| peer | the gradient of weight is summed in | all ignored | `reduction="none"` |
|---|---|---|---|
| torch, `linear` and `cross_entropy` | float32 | NaN | right; keeps all logits |
| Liger, `LigerFusedLinearCrossEntropyLoss` | the dtype of weight, unless `accum_dtype` | 0 | wrong gradient of weight |
| quack, `linear_cross_entropy` | float32 | NaN | none |
| fusedops | float32 | 0 | right |
"""


def unfused(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    chunk: int | None,
) -> Tensor:
    """Compute the op as models do without fused ops."""
    logits = torch.nn.functional.linear(x, weight, bias).flatten(0, -2)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    how = "sum" if denominator is not None and reduction == "mean" else reduction
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": how}
    loss = torch.nn.functional.cross_entropy(logits.float(), target.flatten(), **options)
    if denominator is not None and reduction == "mean":
        loss = loss / denominator.view(())
    if z_loss:
        squares = torch.logsumexp(logits.float(), -1).square().masked_fill(target.flatten() == ignore_index, 0.0)
        loss = loss + z_loss * formulas.reduced(
            squares.view(target.shape), target, ignore_index, reduction, denominator
        )
    return loss.view(target.shape) if reduction == "none" else loss


def min_bytes(x: Any, weight: Any, target: Any, bias: Any, *options: Any) -> Mapping[Any, int]:
    """Read x, weight, bias and target; read and write the gradients, which are saved."""
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    tensors = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in given)
    return {"forward": tensors + prod(target.shape) * target.dtype.itemsize, "backward": 2 * tensors}


LINEAR_CROSS_ENTROPY = Evidence(
    formula="cross_entropy(x @ weight.T + bias, target)",
    cases=CASES,
    tolerance=linear_error_bounds.TOLERANCE,
    gradient_tolerance=linear_error_bounds.GRADIENT_TOLERANCE,
    error=linear_error_bounds.error,
    gradient_error=linear_error_bounds.gradient_error,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=lambda batch, length: {"x": (batch, length, 6), "weight": (11, 6), "target": (batch, length), "bias": (11,)},
    large=[Case("small_vocabulary", {"x": (4096, 512), "weight": (32000, 512), "target": (4096,)})],
    sweep=lambda rows, width: {"x": (rows, width), "weight": (32000, width), "target": (rows,)},
    peers=PEERS,
)
