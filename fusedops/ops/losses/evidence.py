"""Calls of cross entropy: named cases, the chain that models run without fused ops, bytes, and what peers accept."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.evidence import Evidence
from fusedops._contract.values import Case, Tolerance
from fusedops.ops.losses import formulas
from fusedops.ops.losses.error_bounds import backward_error, forward_error


def unfused(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
) -> Tensor:
    """Compute the op as models do without fused ops."""
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    if softcap is not None:
        wide = torch.tanh(wide / softcap) * softcap
    rows, classes = wide.reshape(-1, wide.shape[-1]), target.reshape(-1)
    kind = "sum" if denominator is not None else reduction
    loss = torch.nn.functional.cross_entropy(rows, classes, None, None, ignore_index, None, kind, label_smoothing)
    if z_loss != 0:
        extra = z_loss * torch.logsumexp(rows, -1).square() * (classes != ignore_index)
        loss = loss + formulas.reduced(extra, classes, ignore_index, kind, None)
    if denominator is not None:
        loss = loss / denominator.reshape(())
    return loss.view(target.shape) if reduction == "none" else loss


def min_bytes(logits: Any, target: Any, *rest: Any) -> Mapping[Any, int]:
    """Read logits and target, write the loss; read logits, lse, target, write the gradient."""
    size, rows = prod(logits.shape) * logits.dtype.itemsize, prod(target.shape)
    wide = formulas.wide_dtype(logits.dtype).itemsize
    losses = rows if rest[-2] == "none" else 1
    return {"forward": size + 8 * rows + wide * losses, "backward": 2 * size + (8 + wide) * rows + wide * losses}


def sample(batch: int, length: int) -> Mapping[str, Any]:
    """Return a small call for tests."""
    return {
        "logits": (batch, length, 6),
        "target": (batch, length),
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "softcap": 3.0,
        "reduction": "none",  # each row for itself, as the tests of shards expect of every op
    }


def tokens(rows: int, classes: int, **options: Any) -> dict[str, Any]:
    """Return the call of rows of logits."""
    return {"logits": (rows, classes), "target": (rows,), **options}


CASES = [
    Case("vit", tokens(256, 1000, label_smoothing=0.1), "ViT and ResNet, ImageNet's 1000 classes"),
    Case("tags", {"logits": (8, 64, 9), "target": (8, 64), "ignore_index": 0, "reduction": "none"}, "CoNLL's tags"),
    Case("tags_mean", {"logits": (8, 64, 9), "target": (8, 64), "ignore_index": 0}, "CoNLL's tags, one for padding"),
    Case("gpt2", tokens(1024, 50257), "GPT-2, one sequence"),
    Case("llama_3_8b", tokens(2048, 128256), "Llama 3 8B, one sequence"),
    Case("olmo_2", tokens(1024, 100352, z_loss=1e-5, reduction="sum"), "OLMo 2, with its z-loss"),
    Case("gemma_2", tokens(512, 256000, softcap=30.0), "Gemma 2, with its softcap"),
    Case("accumulated", tokens(64, 2000, denominator=(1,)), "a part of a step, divided by the targets of the step"),
    Case("ragged", {"logits": (3, 5, 1001), "target": (3, 5), "z_loss": 0.1, "softcap": 2.0}, "odd sizes"),
]

LARGE = [Case("training", tokens(4096, 32768)), Case("smoothing", tokens(4096, 32768, label_smoothing=0.1))]

PEERS = """
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


CROSS_ENTROPY = Evidence(
    formula="logsumexp(logits) - logits[target], smoothed, with z-loss, capped",
    cases=CASES,
    # of a loss, which is float32: logits of 16 bits are not rounded
    tolerance={dtype: Tolerance(1e-6, 2e-6) for dtype in (torch.float16, torch.bfloat16, torch.float32)}
    | {torch.float64: Tolerance(1e-14, 1e-12)},
    gradient_tolerance={
        torch.float16: Tolerance(2e-6, 1e-3),  # one rounding to an 11-bit mantissa
        torch.bfloat16: Tolerance(2e-6, 8e-3),  # one rounding to an 8-bit mantissa
        torch.float32: Tolerance(2e-6, 4e-6),
        torch.float64: Tolerance(1e-14, 1e-12),
    },
    error=forward_error,
    gradient_error=backward_error,
    min_bytes=min_bytes,
    unfused=unfused,
    sample=sample,
    large=LARGE,
    sweep=tokens,
    peers=PEERS,
)
