"""The formulas of scaled_masked_softmax: the causal mask, and the arguments of a padded call.

Padding: keys beyond Sk are masked out; queries beyond Sq are computed, and cropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.tensor_spec import TensorSpec


def causal_mask(x: Tensor, first_query: int = 0) -> Tensor:
    """Return what causal masks where the first query of ``x`` is ``first_query`` of the whole: (Sq, Sk), bool."""
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1 + first_query)


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
