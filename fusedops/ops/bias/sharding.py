"""The dropout ops on DTensors: each rank takes its part of the random numbers of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.values import Shard, Sharding
from fusedops.dtypes import promoted, upcast
from fusedops.ops.bias import formulas
from fusedops.philox import philox, threshold


def drops(arguments: Mapping[str, Any]) -> bool:
    """Return True where a call drops elements."""
    return arguments["seed"] is not None and arguments["training"] and arguments["p"] > 0


def forward_of_shard(arguments: Mapping[str, Any], shard: Shard) -> Tensor:
    """Compute a rank's part of the output by the random numbers of the whole, in plain torch."""
    x, bias, residual, p = arguments["x"], arguments["bias"], arguments.get("residual"), arguments["p"]
    keep = keep_mask_of_shard(arguments["seed"], p, shard)
    scale = 1 / (1 - p) if p < 1 else 0.0
    out = promoted(x, bias) if residual is None else residual.dtype
    kept = torch.where(keep, formulas.summed(x, bias, out), 0)
    if residual is None:
        return (kept * scale).to(out)
    # one rounding, as in the kernels: the product with the scale and the sum are fused
    return torch.add(residual.to(kept.dtype), kept, alpha=scale).to(out)


def backward_of_shard(arguments: Mapping[str, Any], shard: Shard) -> tuple[Tensor | None, Tensor | None]:
    """Compute a rank's part of the gradients of x and of the bias; None where not wanted."""
    grad, bias, p = arguments["grad"], arguments["bias"], arguments["p"]
    needs_x, needs_bias = arguments["needs"]
    keep = keep_mask_of_shard(arguments["seed"], p, shard)
    wide = upcast(grad)
    du = torch.where(keep, wide, 0) * (1 / (1 - p) if p < 1 else 0.0)
    dx = du.to(arguments["x_dtype"]) if needs_x else None
    return dx, du.sum_to_size(bias.shape).to(bias.dtype) if needs_bias and bias is not None else None


def keep_mask_of_shard(seed: Tensor, p: float, shard: Shard) -> Tensor:
    """Return a rank's part of ``keep_mask(seed, p, shard.whole)``: bool.

    Made run by run: from the last dim that is cut on, the elements of a part follow each other in the whole.
    """
    whole, part, start = shard
    cut = max((dim for dim, size in enumerate(part) if size != whole[dim]), default=0)
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    first = torch.full((1,), _linear(start, strides), device=seed.device, dtype=torch.int64)
    for size, stride in zip(part[:cut], strides):
        steps = torch.arange(size, device=seed.device, dtype=torch.int64) * stride
        first = (first[:, None] + steps).flatten()
    run = prod(part[cut:])
    counters = (first // 4)[:, None] + torch.arange((run + 6) // 4, device=seed.device, dtype=torch.int64)
    words = torch.stack(philox(counters, seed), dim=-1).flatten(1)
    words_of_run = (first % 4)[:, None] + torch.arange(run, device=seed.device, dtype=torch.int64)
    return (words >= threshold(p)).gather(1, words_of_run).view(tuple(part))


def _linear(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(index, strides))


SHARDING = Sharding(
    replicated=("seed",),
    forward=forward_of_shard,
    backward=backward_of_shard,
    applies=drops,
    reason="a kernel counts the index of a dropped element from the shard's own start",
)
