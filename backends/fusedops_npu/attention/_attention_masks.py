"""Masks of the vendor's attention: a mask as large as the scores, or a triangle of 2048 x 2048 and a mode.

The modes, by the page of npu_fusion_attention: 0 with a mask [B, N, Sq, Sk], [B, 1, Sq, Sk] or [1, 1, Sq, Sk]; 2 causal
from the upper left; 3 causal from the lower right; 4 a band, whose sides are counted from the lower right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops import masks
from fusedops.tensor_cache import cached_for

TRIANGLE = 2048
_OPEN = 2**31 - 1  # the vendor's number for a side without a limit


class VendorMask(NamedTuple):
    """The vendor's arguments for a mask, an alignment and a window.

    Attributes:
        mask: bool, as the mode requires; None where nothing is masked.
        mode: ``sparse_mode``.
        before: ``pre_tockens``.
        after: ``next_tockens``.
        dead: bool, broadcastable to (B, Nq, Sq, 1), True for a fully masked row; None where no row can be.
    """

    mask: Tensor | None
    mode: int = 0
    before: int = _OPEN
    after: int = _OPEN
    dead: Tensor | None = None


def vendor_mask(q: Tensor, k: Tensor, mask: Tensor | None, causal: str, window: tuple[int, int] | None) -> VendorMask:
    """Return the vendor's arguments. Sq and Sk are not 0."""
    sq, sk = q.shape[2], k.shape[2]
    low, high = band_of(sq, sk, causal, window)
    if mask is not None:
        full = mask[(None,) * (4 - mask.dim())]
        lead = _lead(full.shape, q.shape)
        key = (tuple(full.shape), lead, sq, sk, low, high)
        prepared = cached_for(mask, key, lambda: _prepared(full, lead, sq, sk, (low, high)))
        return VendorMask(full if prepared.mask is None else prepared.mask, dead=prepared.dead)
    if low is None and high is None:
        return VendorMask(None)
    dead, triangle = _dead_rows(sq, sk, low, high, q.device), _triangle(q.device)
    if low is None and high in (0, sk - sq):
        return VendorMask(triangle, 2 if high == 0 else 3, dead=dead)
    before = _OPEN if low is None else sk - sq - low
    return VendorMask(triangle, 4, before, _OPEN if high is None else high - (sk - sq), dead)


def packed_mask(device: torch.device, causal: str, window: tuple[int, int] | None) -> VendorMask:
    """Return the vendor's arguments for packed sequences, none of whose rows is fully masked."""
    if window is not None:
        before, after = (min(size, _OPEN) for size in window)
        return VendorMask(_triangle(device), 4, before, after if causal == "none" else 0)
    if causal == "none":
        return VendorMask(None)
    return VendorMask(_triangle(device), 2 if causal == "upper_left" else 3)


def band_of(sq: int, sk: int, causal: str, window: tuple[int, int] | None) -> masks.Band:
    """Return the lowest and highest visible ``key - query``; None for a side that masks nothing."""
    low, high = masks.band(sq, sk, causal, window)
    low = None if low is None or low <= 1 - sq else low
    return low, None if high is None or high >= sk - 1 else high


def expanded_bytes(q: Any, k: Any, mask: Any, causal: str, window: Any) -> int | None:
    """Return the bytes of the mask that is made from ``mask``; None where it is passed as it is."""
    sq, sk = q.shape[2], k.shape[2]
    full = (*(1,) * (4 - len(mask.shape)), *mask.shape)
    shape = (*_lead(full, q.shape), sq, sk)
    unchanged = mask.dtype == torch.bool and full == shape and band_of(sq, sk, causal, window) == (None, None)
    return None if unchanged else prod(shape)


def _lead(mask: Sequence[int], q: Sequence[int]) -> tuple[int, int]:
    """Return the first two sizes that the vendor takes for a mask of 4 dimensions: (B, Nq), (B, 1) or (1, 1)."""
    if mask[1] != 1:
        return q[0], q[1]
    return (q[0] if mask[0] != 1 else 1), 1


class _Prepared(NamedTuple):
    """A mask of the vendor's size, None where the given one is that; and its fully masked rows."""

    mask: Tensor | None
    dead: Tensor


def _prepared(full: Tensor, lead: tuple[int, int], sq: int, sk: int, band: masks.Band) -> _Prepared:
    masked = full if full.dtype == torch.bool else full != 0
    outside = masks.from_band(sq, sk, band, full.device)
    if outside is not None:
        masked = masked | outside
    # neither the mask nor a view of it: a cached value must not keep the tensor alive
    unchanged = masked is full and tuple(full.shape) == (*lead, sq, sk)
    expanded = None if unchanged else masked.expand(*lead, sq, sk).contiguous()
    return _Prepared(expanded, masked.all(-1, keepdim=True))


@lru_cache(maxsize=16)
def _triangle(device: torch.device) -> Tensor:
    """Return the mask of the modes 2, 3 and 4, made once for each device: 4 MiB."""
    return torch.ones((TRIANGLE, TRIANGLE), dtype=torch.bool, device=device).triu(1)


@lru_cache(maxsize=16)  # programs use a few lengths at a time
def _dead_rows(sq: int, sk: int, low: int | None, high: int | None, device: torch.device) -> Tensor | None:
    """Return True for the rows of a band that see no key, (Sq, 1); None where each sees one."""
    first, end = max(0, -(high or 0)), sq if low is None else min(sq, sk - low)
    if (first, end) == (0, sq):
        return None
    rows = torch.arange(sq, device=device)[:, None]
    return (rows < first) | (rows >= end)
