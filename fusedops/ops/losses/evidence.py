"""Evidence of the losses: cases, tolerances, error bounds, bytes, the unfused forms."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Case, Evidence, Rows, Tolerance, rows_of_two_widths, tolerances
from fusedops.dtypes import compute_dtype, upcast
from fusedops.ops.losses import error_bounds, formulas
from fusedops.ops.losses.arguments import CrossEntropyArgs, LinearCrossEntropyArgs, LinearLogProbsArgs
from fusedops.ops.losses.formulas import LossOptions


def cross_entropy_unfused(a: CrossEntropyArgs) -> Tensor:
    """Compute the op as models do without fused ops."""
    wide = upcast(a.logits)
    if a.softcap is not None:
        wide = torch.tanh(wide / a.softcap) * a.softcap
    rows, classes = wide.reshape(-1, wide.shape[-1]), a.target.reshape(-1)
    kind = "sum" if a.denominator is not None else a.reduction
    loss = torch.nn.functional.cross_entropy(rows, classes, None, None, a.ignore_index, None, kind, a.label_smoothing)
    if a.z_loss != 0:
        options = LossOptions(a.ignore_index, a.label_smoothing, a.z_loss, a.softcap, kind, None)
        extra = a.z_loss * torch.logsumexp(rows, -1).square() * (classes != a.ignore_index)
        loss = loss + formulas.reduced(extra, classes, options)
    if a.denominator is not None:
        loss = loss / a.denominator.reshape(())
    return loss.view(a.target.shape) if a.reduction == "none" else loss


def cross_entropy_min_bytes(logits: Any, target: Any, *rest: Any) -> Mapping[Any, int]:
    """Read logits and target, write the loss; read logits, lse, target, write the gradient."""
    size, rows = prod(logits.shape) * logits.dtype.itemsize, prod(target.shape)
    wide = compute_dtype(logits.dtype).itemsize
    losses = rows if rest[-2] == "none" else 1
    return {"forward": size + 8 * rows + wide * losses, "backward": 2 * size + (8 + wide) * rows + wide * losses}


def _sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    return {
        "logits": (batch, length, 6),
        "target": (batch, length),
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "softcap": 3.0,
        "reduction": "none",  # each row for itself, as the tests of shards expect of every op
    }


def _tokens(rows: int, classes: int, **options: Any) -> dict[str, Any]:
    """Return the call of rows of logits."""
    return {"logits": (rows, classes), "target": (rows,), **options}


_CASES = [
    Case("vit", _tokens(256, 1000, label_smoothing=0.1), "ViT and ResNet, ImageNet's 1000 classes"),
    Case("tags", {"logits": (8, 64, 9), "target": (8, 64), "ignore_index": 0, "reduction": "none"}, "CoNLL's tags"),
    Case("tags_mean", {"logits": (8, 64, 9), "target": (8, 64), "ignore_index": 0}, "CoNLL's tags, one for padding"),
    Case("gpt2", _tokens(1024, 50257), "GPT-2, one sequence"),
    Case("llama_3_8b", _tokens(2048, 128256), "Llama 3 8B, one sequence"),
    Case("olmo_2", _tokens(1024, 100352, z_loss=1e-5, reduction="sum"), "OLMo 2, with its z-loss"),
    Case("gemma_2", _tokens(512, 256000, softcap=30.0), "Gemma 2, with its softcap"),
    Case("accumulated", _tokens(64, 2000, denominator=(1,)), "a part of a step, divided by the targets of the step"),
    Case("ragged", {"logits": (3, 5, 1001), "target": (3, 5), "z_loss": 0.1, "softcap": 2.0}, "odd sizes"),
]

_LARGE = [Case("training", _tokens(4096, 32768)), Case("smoothing", _tokens(4096, 32768, label_smoothing=0.1))]

_PEERS = """
| peer | loss's dtype | all rows ignored | target out of range | smoothing, z-loss, softcap | writes the logits |
|---|---|---|---|---|---|
| torch, `cross_entropy` | the logits' | NaN | IndexError on a CPU, an assertion on CUDA | smoothing | no |
| Liger, `LigerCrossEntropyLoss` | float32, per row the logits' | 0 | an assertion that waits for the device | all | \
the gradient over them |
| quack, `cross_entropy` | float32 | 0 / 0 | not checked | none | on request |
| Megatron-LM, both paths | float32 | no ignore_index | a finite number | smoothing, of other classes | float32 logits |
| torch_npu, `npu_cross_entropy_loss` | the logits' | 0 / 0 | undefined | smoothing, without a gradient | no |
| fusedops | float32 | 0 | InvalidInputError on a CPU, NaN elsewhere | all | no |
"""


_ROWS = ("logits", "target", "loss")


def _rows(options: Mapping[str, Any], count: int, width: int) -> Mapping[str, Any]:
    return {"logits": (count, width), "target": (count,), "reduction": "none", **options}


CROSS_ENTROPY = Evidence(
    formula="logsumexp(logits) - logits[target], smoothed, with z-loss, capped",
    cases=_CASES,
    # of a loss, which is float32: logits of 16 bits are not rounded
    tolerance={dtype: Tolerance(1e-6, 2e-6) for dtype in (torch.float16, torch.bfloat16, torch.float32)}
    | {torch.float64: Tolerance(1e-14, 1e-12)},
    gradient_tolerance=tolerances((2e-6, 4e-6), (1e-14, 1e-12)),
    error_bound=error_bounds.cross_entropy_error_bound,
    gradient_error_bound=error_bounds.cross_entropy_gradient_error_bound,
    min_bytes=cross_entropy_min_bytes,
    unfused=cross_entropy_unfused,
    sample=_sample,
    large=_LARGE,
    sweep=_tokens,
    rows=[
        *rows_of_two_widths(partial(_rows, {}), *_ROWS),
        *rows_of_two_widths(
            partial(_rows, {"softcap": 9.0, "label_smoothing": 0.1, "z_loss": 0.01}), *_ROWS, more=", options"
        ),
    ],
    peers=_PEERS,
    sharded=(
        "any dim of `logits`, the classes too",
        "`target` as the rows; `denominator` replicated, or plain",
        "as `logits`",
    ),
)


# ------------------------------------------------------------------------------------------------ linear_cross_entropy

_LINEAR_SMALL: Mapping[str, Any] = {"x": (70, 96), "weight": (13, 96), "target": (70,), "chunk": 32}
_LINEAR_CASES = [
    Case("every_option", {**_LINEAR_SMALL, "bias": (13,), "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 20.0}),
    Case("each_row", {**_LINEAR_SMALL, "reduction": "none"}, "the loss of each row"),
    Case("shared_denominator", {**_LINEAR_SMALL, "denominator": (1,)}, "gradient accumulation over several calls"),
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

_LINEAR_PEERS = """
| peer | the gradient of weight is summed in | all ignored | `reduction="none"` |
|---|---|---|---|
| torch, `linear` and `cross_entropy` | float32 | NaN | right; keeps all logits |
| Liger, `LigerFusedLinearCrossEntropyLoss` | the dtype of weight, unless `accum_dtype` | 0 | wrong gradient of weight |
| quack, `linear_cross_entropy` | float32 | NaN | none |
| fusedops | float32 | 0 | right |
"""


def linear_cross_entropy_unfused(a: LinearCrossEntropyArgs) -> Tensor:
    """Compute the op as models do without fused ops."""
    logits = torch.nn.functional.linear(a.x, a.weight, a.bias).flatten(0, -2)
    if a.softcap is not None:
        logits = a.softcap * torch.tanh(logits / a.softcap)
    how = "sum" if a.denominator is not None and a.reduction == "mean" else a.reduction
    given: dict[str, Any] = {"ignore_index": a.ignore_index, "label_smoothing": a.label_smoothing, "reduction": how}
    loss = torch.nn.functional.cross_entropy(logits.float(), a.target.flatten(), **given)
    if a.denominator is not None and a.reduction == "mean":
        loss = loss / a.denominator.view(())
    if a.z_loss:
        squares = torch.logsumexp(logits.float(), -1).square().masked_fill(a.target.flatten() == a.ignore_index, 0.0)
        loss = loss + a.z_loss * formulas.reduced(squares.view(a.target.shape), a.target, a.options)
    return loss.view(a.target.shape) if a.reduction == "none" else loss


def linear_cross_entropy_min_bytes(x: Any, weight: Any, target: Any, bias: Any, *options: Any) -> Mapping[Any, int]:
    """Read x, weight, bias and target; read and write the gradients, which are saved."""
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    tensors = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in given)
    return {"forward": tensors + prod(target.shape) * target.dtype.itemsize, "backward": 2 * tensors}


LINEAR_CROSS_ENTROPY = Evidence(
    formula="cross_entropy(x @ weight.T + bias, target)",
    cases=_LINEAR_CASES,
    tolerance=error_bounds.LINEAR_TOLERANCE,
    gradient_tolerance=error_bounds.LINEAR_GRADIENT_TOLERANCE,
    error_bound=error_bounds.linear_cross_entropy_error_bound,
    gradient_error_bound=error_bounds.linear_cross_entropy_gradient_error_bound,
    min_bytes=linear_cross_entropy_min_bytes,
    unfused=linear_cross_entropy_unfused,
    sample=lambda batch, length: {"x": (batch, length, 6), "weight": (11, 6), "target": (batch, length), "bias": (11,)},
    large=[Case("small_vocabulary", {"x": (4096, 512), "weight": (32000, 512), "target": (4096,)})],
    sweep=lambda rows, width: {"x": (rows, width), "weight": (32000, width), "target": (rows,)},
    rows=[
        Rows(
            "tokens",
            lambda count: {"x": (count, 33), "weight": (67, 33), "target": (count,), "reduction": "none"},
            {"x": 0, "target": 0, "loss": 0},
        )
    ],
    peers=_LINEAR_PEERS,
    sharded=(
        "any dim of `x` except the last; or the classes, the first dim of `weight`",
        "rows: `target` as `x`, `weight` and `bias` replicated; classes: `bias` as `weight`, `x` and `target` "
        "replicated",
        "of x: as x, `Partial` with sharded classes; of weight and bias: `Partial` with sharded rows, as they are with "
        "classes",
    ),
)


# ---------------------------------------------------------------------------------------------------- linear_log_probs

_LOG_PROB_CASES = [
    Case(
        "every_option",
        {
            "x": (70, 96),
            "weight": (13, 96),
            "target": (70,),
            "bias": (13,),
            "temperature": 0.7,
            "softcap": 20.0,
            "return_entropy": True,
        },
    ),
    Case("log_probabilities", {"x": (5, 14, 96), "weight": (13, 96), "target": (5, 14)}, "as DPO needs them"),
    Case("many_classes", {"x": (33, 8), "weight": (4099, 8), "target": (33,), "return_entropy": True}),
    Case(
        "qwen_3_0_6b",
        {
            "x": (2, 1024, 1024),
            "weight": (151936, 1024),
            "target": (2, 1024),
            "temperature": 0.9,
            "return_entropy": True,
        },
        "Qwen3 0.6B, a step of GRPO that reports the entropy",
    ),
]


def linear_log_probs_unfused(a: LinearLogProbsArgs) -> tuple[Tensor, Tensor]:
    """Compute the op as models do without fused ops."""
    logits = torch.nn.functional.linear(a.x, a.weight, a.bias)
    if a.softcap is not None:
        logits = a.softcap * torch.tanh(logits / a.softcap)
    log_probs = torch.log_softmax(logits.float() / a.temperature, -1)
    ignored = a.target == a.ignore_index
    logp = log_probs.gather(-1, a.target.masked_fill(ignored, 0)[..., None])[..., 0].masked_fill(ignored, 0.0)
    if not a.return_entropy:
        return logp, torch.zeros_like(logp)
    return logp, -(log_probs.exp() * log_probs).sum(-1).masked_fill(ignored, 0.0)


def linear_log_probs_min_bytes(x: Any, weight: Any, target: Any, bias: Any, *options: Any) -> Mapping[Any, int]:
    """Read x, weight, bias and target, write three numbers of a row; read these, write the gradients."""
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    tensors = sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in given)
    rows = prod(target.shape) * (target.dtype.itemsize + 3 * compute_dtype(x.dtype).itemsize)
    return {"forward": tensors + rows, "backward": 2 * tensors + rows}


LINEAR_LOG_PROBS = Evidence(
    formula="log_softmax(x @ weight.T + bias)[target], with its entropy",
    cases=_LOG_PROB_CASES,
    tolerance=error_bounds.LINEAR_TOLERANCE,
    gradient_tolerance=error_bounds.LINEAR_GRADIENT_TOLERANCE,
    error_bound=error_bounds.linear_log_probs_error_bound,
    gradient_error_bound=error_bounds.linear_log_probs_gradient_error_bound,
    min_bytes=linear_log_probs_min_bytes,
    unfused=linear_log_probs_unfused,
    sample=lambda batch, length: {
        "x": (batch, length, 6),
        "weight": (11, 6),
        "target": (batch, length),
        "bias": (11,),
        "temperature": 0.7,
        "return_entropy": True,
    },
    large=[Case("small_vocabulary", {"x": (4096, 512), "weight": (32000, 512), "target": (4096,)})],
    sweep=lambda rows, width: {"x": (rows, width), "weight": (32000, width), "target": (rows,)},
    rows=[
        Rows(
            "tokens",
            lambda count: {"x": (count, 33), "weight": (67, 33), "target": (count,), "return_entropy": True},
            {"x": 0, "target": 0, "logp": 0, "entropy": 0},
        )
    ],
    sharded=(
        "any dim of `x` except the last; or the classes, the first dim of `weight`",
        "rows: `target` as `x`, `weight` and `bias` replicated; classes: `bias` as `weight`, `x` and `target` "
        "replicated",
        "of x: as x, `Partial` with sharded classes; of weight and bias: `Partial` with sharded rows, as they are with "
        "classes",
    ),
)
