"""Attention masks as Megatron makes and names them."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError


class AttnMaskType(enum.Enum):
    """Megatron's kinds of attention mask. Everywhere here a member of Megatron's or apex's own enum does as well."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


def is_causal(attn_mask_type: object) -> bool:
    """Whether the mask type is ``causal``, told by its name: an enum of another library has other members.

    Raises:
        InvalidInputError: a name that no mask type has.
    """
    name = getattr(attn_mask_type, "name", attn_mask_type)
    if isinstance(name, str) and name not in AttnMaskType.__members__:
        raise InvalidInputError(
            f"attn_mask_type is {name!r}; needs one of {', '.join(AttnMaskType.__members__)}; see AttnMaskType"
        )
    return name == AttnMaskType.causal.name


def get_default_causal_mask(sq: int, device: torch.device | str | None = None) -> Tensor:
    """The causal mask for ``sq`` queries and keys.

    Args:
        sq: number of queries, and of keys.
        device: where the mask is made. None: the machine's accelerator if it has one, else the CPU.

    Returns:
        (sq, sq), bool, True where masked out: above the diagonal.

    Source: Megatron-LM, ``megatron/core/transformer/utils.py``, which makes it on CUDA alone.
    """
    return torch.ones(sq, sq, dtype=torch.bool, device=_device(device)).triu_(1)


def get_sliding_window_causal_mask(
    sq: int, skv: int, window_size: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """The mask of a sliding window, whose last query stands at the last key.

    Args:
        sq: number of queries.
        skv: number of keys.
        window_size: (left, right): how many keys before and after its own a query sees. -1 means all of them.
        device: where the mask is made. None: the machine's accelerator if it has one, else the CPU.

    Returns:
        (sq, skv), bool, True where masked out.

    Source: Megatron-LM, ``megatron/core/transformer/utils.py``; -1 is as its TransformerConfig describes it, which
    that function does not carry out.
    """
    left, right = window_size
    device = _device(device)
    query = torch.arange(skv - sq, skv, device=device)[:, None]
    key = torch.arange(skv, device=device)
    masked = torch.zeros(sq, skv, dtype=torch.bool, device=device)
    if left >= 0:
        masked |= key < query - left
    if right >= 0:
        masked |= key > query + right
    return masked


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Fills masked scores with -10000, in place, as Megatron's function of this name does.

    FusedScaleMaskSoftmax knows it by its name and does not call it: it masks exactly.

    Args:
        attention_scores: (..., Sq, Sk), any floating dtype. Written.
        attention_mask: bool, broadcastable to the scores, True where masked out.

    Returns:
        ``attention_scores``.
    """
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator
