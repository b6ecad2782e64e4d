"""Parts of scaled_masked_softmax: the error model, and other forms of a call: padded to larger sizes, and a rank's part
of a DTensor.

Padding: keys beyond Sk are masked out; queries beyond Sq are computed, and cropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.tensor_spec import TensorSpec
from fusedops._contract.values import Shard


def causal_mask(x: Tensor, first_query: int = 0) -> Tensor:
    """Return what causal masks where the first query of ``x`` is ``first_query`` of the whole: (Sq, Sk), bool."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1 + first_query)


def error(absolute: float, x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Return the largest change of each probability where each score moves by ``absolute`` of its size.

    The largest score of a row is subtracted from the others, so it moves the others, and not itself.
    """
    if not x.numel():
        return torch.zeros(())
    scores = (x if x.dtype == torch.float64 else x.float()) * scale
    overflow = ~scores.isfinite() & x.isfinite()
    if causal or mask is not None:
        masked = torch.zeros((), dtype=torch.bool) if mask is None else mask.bool()
        masked = masked | causal_mask(x) if causal else masked
        scores, overflow = scores.masked_fill(masked, -math.inf), overflow & ~masked
    scores = scores.double()
    top = scores.amax(-1, keepdim=True)
    move = (absolute * (scores.abs() + top.abs())).masked_fill((scores == top) | scores.isinf(), 0.0)
    scores = scores - top
    least, most = torch.exp(scores - move), torch.exp((scores + move).clamp(max=300.0))
    y = torch.softmax(scores, -1)
    up = most / (most + (least.sum(-1, keepdim=True) - least)) - y
    down = y - least / (least + (most.sum(-1, keepdim=True) - most))
    change = torch.maximum(up, down).clamp(min=0.0).nan_to_num(nan=0.0)
    return change.masked_fill(~top.isfinite() & overflow.any(-1, keepdim=True), math.inf)


def gradient_error(absolute: float, grad: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    """Return ``absolute`` times the terms of each gradient, and what y loses where it is below the normal numbers."""
    g, p = (grad, y) if y.dtype == torch.float64 else (grad.float(), y.float())
    finfo = torch.finfo(y.dtype)
    lost = max(finfo.smallest_normal * finfo.eps / 2, torch.finfo(p.dtype).smallest_normal)
    size, total = g.abs(), (g * p).abs().sum(-1, keepdim=True)
    terms = absolute * p * (size + total) + lost * (1 + size + total + p * size.sum(-1, keepdim=True))
    # 0 * inf: NaN by the formula, and 0 by a kernel that skips masked positions
    skipped, undefined = p == 0, ~(g * p).isfinite()
    unknown = (skipped & undefined).any(-1, keepdim=True) | (skipped & undefined.any(-1, keepdim=True))
    return (abs(scale) * terms).masked_fill(unknown, math.inf)


def adjusted_to_shard(arguments: dict[str, Any], shard: Shard) -> dict[str, Any]:
    """Return the arguments of a part, with a causal mask that counts queries from the start of the whole."""
    first_query = shard.start[-2]
    if not arguments["causal"] or not first_query:
        return arguments
    if "x" not in arguments:
        return {**arguments, "causal": False}  # backward: y is 0 there, and the flag only saves work
    mask, later = arguments["mask"], causal_mask(arguments["x"], first_query)
    return {**arguments, "causal": False, "mask": later if mask is None else mask.bool() | later}


def padded(args: Sequence[Any], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the arguments of forward with (Sq, Sk) grown to ``sizes``."""
    x, mask, scale, causal = args
    if mask is not None or sizes[1] > x.shape[-1]:
        mask = _padded_mask(mask, x, sizes)
    return _zero_padded(x, sizes), mask, scale, causal


def padded_backward(args: Sequence[Any], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the arguments of backward with (Sq, Sk) grown to ``sizes``: the added part of y is 0."""
    grad, y, scale, causal = args
    return _zero_padded(grad, sizes), _zero_padded(y, sizes), scale, causal


def _zero_padded(x: Any, sizes: tuple[int, ...]) -> Any:
    sq, sk = x.shape[-2:]
    if isinstance(x, TensorSpec):
        return x.replace(shape=(*x.shape[:-2], *sizes))
    return torch.nn.functional.pad(x, (0, sizes[1] - sk, 0, sizes[0] - sq))


def _padded_mask(mask: Any, x: Any, sizes: tuple[int, ...]) -> Any:
    """Return the mask of the padded call: (..., 1 or Sq, Sk), bool. Made once for each mask."""
    sq, sk = x.shape[-2:]
    rows = 1 if mask is None or mask.dim() < 2 else mask.shape[-2]
    shape = (*(() if mask is None else mask.shape[:-2]), sizes[0] if rows > 1 else 1, sizes[1])
    if isinstance(x, TensorSpec):
        return TensorSpec(shape, torch.bool, x.device)
    if mask is None:
        return _keys_beyond(sk, sizes[1], x.device)

    def make() -> Tensor:
        grown = torch.ones(shape, dtype=torch.bool, device=x.device)
        grown[..., :sk] = False
        grown[..., :rows, :sk] = mask
        return grown

    from fusedops.tensor_cache import cached_for  # not at import: few programs pad

    return cached_for(mask, ("padded", sq, sk, sizes), make)


@lru_cache(maxsize=16)  # a few lengths are in use at a time; each is Sk bytes on the device
def _keys_beyond(sk: int, size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # it outlives the mode, and what is cached for it is kept by its version
        return (torch.arange(size, device=device) >= sk)[None]
