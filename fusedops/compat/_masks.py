"""Megatron's attention masks."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError


class AttnMaskType(enum.Enum):
    """Megatron's types of attention mask. Members of Megatron's and apex's own enums are supported too.

    >>> AttnMaskType.causal.name
    'causal'
    """

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


def is_causal(attn_mask_type: object) -> bool:
    """Return True if the mask type is ``causal``. Types are compared by name, so enums of other libraries work.

    Raises:
        InvalidInputError: no mask type has this name.

    >>> is_causal(AttnMaskType.causal), is_causal("padding")
    (True, False)
    """
    name = getattr(attn_mask_type, "name", attn_mask_type)
    if isinstance(name, str) and name not in AttnMaskType.__members__:
        raise InvalidInputError(
            f"attn_mask_type: got {name!r}, expected one of {', '.join(AttnMaskType.__members__)}; to fix: use a "
            f"member of AttnMaskType"
        )
    return name == AttnMaskType.causal.name


def get_default_causal_mask(sq: int, device: torch.device | str | None = None) -> Tensor:
    """Create the causal mask for ``sq`` queries and keys.

    Args:
        sq: number of queries and of keys.
        device: device of the mask. None: the machine's accelerator if it has one, otherwise the CPU.

    Returns:
        (sq, sq), bool, True where masked out: above the diagonal.

    Source: Megatron-LM, ``megatron/core/transformer/utils.py``, which supports only CUDA.

    >>> get_default_causal_mask(3, "cpu").int()
    tensor([[0, 1, 1],
            [0, 0, 1],
            [0, 0, 0]], dtype=torch.int32)
    """
    return torch.ones(sq, sq, dtype=torch.bool, device=_device(device)).triu_(1)


def get_sliding_window_causal_mask(
    sq: int, skv: int, window_size: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """Create the mask of a sliding window. The last query is at the position of the last key.

    Args:
        sq: number of queries.
        skv: number of keys.
        window_size: (left, right): the number of keys before and after its own position that a query attends to. -1
            means all keys.
        device: device of the mask. None: the machine's accelerator if it has one, otherwise the CPU.

    Returns:
        (sq, skv), bool, True where masked out.

    Source: Megatron-LM, ``megatron/core/transformer/utils.py``. -1 has the meaning that its TransformerConfig
    documents; the original function does not implement it.

    >>> get_sliding_window_causal_mask(2, 4, (1, 0), "cpu").int()
    tensor([[1, 0, 0, 1],
            [1, 1, 0, 0]], dtype=torch.int32)
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
    """Fill masked scores with -10000, in place, as Megatron's function of this name.

    FusedScaleMaskSoftmax recognises this function by its name and does not call it: it masks exactly.

    Args:
        attention_scores: (..., Sq, Sk), any floating dtype. Modified in place.
        attention_mask: bool, broadcastable to the scores, True where masked out.

    Returns:
        ``attention_scores``.

    >>> attention_mask_func(torch.tensor([[1.0, 2.0]]), torch.tensor([[False, True]]))
    tensor([[ 1.0000e+00, -1.0000e+04]])
    """
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def _device(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if accelerator is None else accelerator
