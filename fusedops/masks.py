"""Masks for :func:`fusedops.attention`: converters from the forms of other libraries, and the band of an alignment.

Here True means masked out. torch's scaled_dot_product_attention has the opposite polarity for bool masks, and models
add 0 and -inf to the scores; packed batches have lengths or cu_seqlens.

>>> import torch, fusedops
>>> fusedops.masks.from_lengths(torch.tensor([1, 3]), 3)[:, 0, 0]
tensor([[False,  True,  True],
        [False, False, False]])
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError

__all__ = ["Band", "band", "from_additive", "from_band", "from_cu_seqlens", "from_lengths", "from_sdpa"]

Band = tuple[int | None, int | None]


def from_sdpa(mask: Tensor) -> Tensor:
    """Return the mask for a mask of torch's scaled_dot_product_attention.

    Args:
        mask: bool, True means seen; or floating, added to the scores: see :func:`from_additive`.

    Returns:
        The same shape, bool, True means masked out.

    Raises:
        InvalidInputError: the mask has another dtype, or an additive mask is no mask.

    Source: torch, ``torch.nn.functional.scaled_dot_product_attention``, ``attn_mask``.

    >>> import torch, fusedops
    >>> fusedops.masks.from_sdpa(torch.tensor([True, False]))
    tensor([False,  True])
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        _refuse(
            "from_sdpa",
            f"a mask of {_name(mask.dtype)}",
            "bool or a floating dtype, as torch accepts",
            "for integers pass mask == 0: True means masked out",
        )
    return ~mask if mask.dtype == torch.bool else from_additive(mask)


def from_additive(mask: Tensor) -> Tensor:
    """Return the mask for one that is added to the scores, where that is the same.

    0 is seen; -inf, and the lowest finite number of the mask's dtype, are masked out. That number leaves a row where
    it is everywhere as if nothing were masked, so such a row is refused. The values are read: on an accelerator the
    program waits for them.

    Args:
        mask: floating, (..., Sk).

    Returns:
        The same shape, bool, True means masked out.

    Raises:
        InvalidInputError: another number is in it, such as a bias; or a row has the lowest number everywhere.

    Source: transformers, ``masking_utils.py``, ``eager_mask``.

    >>> import torch, fusedops
    >>> fusedops.masks.from_additive(torch.tensor([0.0, float("-inf"), 0.0]))
    tensor([False,  True, False])
    """
    name = "from_additive"
    if not mask.is_floating_point():
        _refuse(name, f"a mask of {_name(mask.dtype)}", "a floating dtype", "for a bool mask use from_sdpa")
    masked = (mask == -torch.inf) | (mask == torch.finfo(mask.dtype).min)
    other = ~(masked | (mask == 0))
    if bool(other.any()):
        value = float(mask[other][0])
        _refuse(
            name,
            f"{value:g} in the mask",
            f"0, -inf or {torch.finfo(mask.dtype).min:g}, the lowest of {_name(mask.dtype)}",
            "pass mask < 0 if every such number is meant to mask; a bias has no place in a mask",
        )
    finite_rows = (mask == torch.finfo(mask.dtype).min).all(-1) if mask.dim() and mask.shape[-1] else mask.new_zeros(())
    if bool(finite_rows.any()):
        _refuse(
            name,
            "a row with the lowest finite number everywhere, which added to the scores masks nothing",
            "-inf in a fully masked row",
            "pass mask < 0, by which the row is 0",
        )
    return masked


def from_lengths(lengths: Tensor, size: int, *, padding: str = "right") -> Tensor:
    """Return the mask of the padding of a batch.

    Args:
        lengths: (B,), integers: the number of keys of each sequence.
        size: Sk, with the padding.
        padding: "right": the padding is after the keys; "left": before them.

    Returns:
        (B, 1, 1, Sk), bool, True for padding. Made on the device of ``lengths``, without waiting for it.

    Raises:
        InvalidInputError: an argument is not as above.

    >>> import torch, fusedops
    >>> fusedops.masks.from_lengths(torch.tensor([2]), 3, padding="left").flatten()
    tensor([ True, False, False])
    """
    _check_integers("from_lengths", "lengths", lengths)
    if padding not in ("left", "right"):
        _refuse("from_lengths", f"padding = {padding!r}", "'left' or 'right'", "pass one of these")
    keys = torch.arange(size, device=lengths.device)
    longest = lengths[:, None, None, None]
    return keys >= longest if padding == "right" else keys < size - longest


def from_cu_seqlens(cu_q: Tensor, sq: int, cu_k: Tensor | None = None, sk: int | None = None) -> Tensor:
    """Return the mask of sequences packed one after the other, of which each sees itself alone.

    Args:
        cu_q: (n + 1,), integers from 0: the start of each sequence in the queries, and the end of the last.
        sq: Sq, at least the last of ``cu_q``; what is beyond is padding, and fully masked.
        cu_k: the same for the keys; None: as the queries.
        sk: Sk; None: Sq.

    Returns:
        (Sq, Sk), bool, True where masked. Made on the device of ``cu_q``, without waiting for it. Join a causal mask by
        ``causal=True``: within a sequence, packed at the same place in queries and keys, it is the sequence's own.

    Raises:
        InvalidInputError: an argument is not as above.

    Source: flash-attn, ``flash_attn_varlen_func``, ``cu_seqlens_q``.

    >>> import torch, fusedops
    >>> fusedops.masks.from_cu_seqlens(torch.tensor([0, 1, 3]), 3).int()
    tensor([[0, 1, 1],
            [1, 0, 0],
            [1, 0, 0]], dtype=torch.int32)
    """
    cu_k, sk = cu_q if cu_k is None else cu_k, sq if sk is None else sk
    for name, cu in (("cu_q", cu_q), ("cu_k", cu_k)):
        _check_integers("from_cu_seqlens", name, cu)
    if cu_q.shape != cu_k.shape:
        given = f"cu_q of {cu_q.numel()} and cu_k of {cu_k.numel()} elements"
        _refuse("from_cu_seqlens", given, "one number of sequences", "pass an entry for each, also for an empty one")
    queries, keys = (
        torch.bucketize(torch.arange(size, device=cu.device), cu[1:].contiguous(), right=True)
        for size, cu in ((sq, cu_q), (sk, cu_k))
    )
    # beyond the last sequence nothing is seen
    return (queries[:, None] != keys) | (queries == cu_q.numel() - 1)[:, None]


def band(sq: int, sk: int, causal: str, window: tuple[int, int] | None) -> Band:
    """Return the lowest and the highest visible ``key - query`` of an alignment and a window.

    Args:
        sq: number of queries.
        sk: number of keys.
        causal: "none", "upper_left" or "lower_right". With "none" a window is aligned at the lower right.
        window: keys before and after the diagonal, or None.

    Returns:
        None for a side that is open.

    >>> import fusedops
    >>> fusedops.masks.band(2, 5, "lower_right", (1, 0))
    (2, 3)
    """
    if causal == "none" and window is None:
        return None, None
    diagonal = 0 if causal == "upper_left" else sk - sq
    low = None if window is None else diagonal - window[0]
    if causal != "none":
        return low, diagonal
    return low, None if window is None else diagonal + window[1]


def from_band(
    sq: int, sk: int, band: Band, device: torch.device | str = "cpu", first: int = 0, key: int = 0
) -> Tensor | None:
    """Return the mask of a band, or of a part of its queries and keys.

    Args:
        sq: number of queries of the part.
        sk: number of keys of the part.
        band: from :func:`band`, for the whole.
        device: of the result.
        first: index of the part's first query in the whole.
        key: index of the part's first key in the whole.

    Returns:
        (Sq, Sk), bool, True where masked; None where nothing is.

    >>> import fusedops
    >>> fusedops.masks.from_band(2, 3, (None, 0)).int()
    tensor([[0, 1, 1],
            [0, 0, 1]], dtype=torch.int32)
    """
    low, high = band
    if low is not None and low <= key - (first + sq - 1):
        low = None
    if high is not None and high >= key + sk - 1 - first:
        high = None
    if low is None and high is None:
        return None
    queries = torch.arange(first, first + sq, device=device)[:, None]
    keys = torch.arange(key, key + sk, device=device)
    if low is None or high is None:
        return keys > queries + high if high is not None else keys < queries + (low or 0)
    return (keys < queries + low) | (keys > queries + high)


def _check_integers(function: str, name: str, value: Tensor) -> None:
    if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        given = f"{name} of {_name(value.dtype)} with {value.dim()} dimensions"
        _refuse(function, given, "int32 or int64, one dimension", f"pass {name}.int().flatten()")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(function: str, given: str, needed: str, fix: str) -> NoReturn:
    raise InvalidInputError(f"masks.{function}: got {given}, expected {needed}; to fix: {fix}")
