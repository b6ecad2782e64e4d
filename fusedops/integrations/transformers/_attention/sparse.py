"""The keys that a model chooses for each query: as indices for :func:`fusedops.attention`, or as a mask.

Models with an indexer (DeepSeek-V3.2, MiniMax-M3) put the choice into the mask for transformers' "eager" and "sdpa"
alone. Any other implementation gets it as an argument: ``indices`` of keys, (B, Sq, K), or ``block_indices`` of blocks
of keys, (B, a divisor of N, Sq, K), in which -1 stands for no block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops.errors import InvalidInputError

#: As many keys, at least, as are chosen. With 4, gathered keys take 0.5 to 0.9 of the time of a mask and all scores, of
#: 1 to 1,024 queries of 1,024 to 4,096 keys; with gradients 0.7, and 1.1 to 1.2 where each head has keys of its own.
#: With 3, 0.7 to 1.1, and 1.0 to 1.6. float32, 2 threads at load 7, medians of paired turns of processor time.
_FEW = 4


def chosen_keys(module: Any, query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the indices of the keys that a call chooses, (B, 1 or Nk, Sq, K), where the call is faster by these.

    None where it is faster with a mask: where few keys are left out, or where blocks are chosen for each query head.
    And on another device than a CPU, on which it was not measured from how many keys on it is.

    Args:
        module: the attention module; of blocks, ``indexer.block_size`` is their size.
        query: (B, N, Sq, D).
        key: (B, Nk, Sk, D).
        kwargs: of the call.

    >>> q, keys = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 64, 4)
    >>> chosen_keys(None, q, keys, {"indices": torch.tensor([[[5, 2]]])})
    tensor([[[[5, 2]]]])
    """
    keys: Any = kwargs.get("indices")
    blocks: Any = kwargs.get("block_indices")
    if not query.is_cpu or (keys is None and blocks is None):
        return None
    size = key.shape[2]
    if keys is not None:
        _check("indices", keys, (query.shape[0], query.shape[2]), "(B, Sq, K)")
        return None if keys.shape[-1] * _FEW > size else keys[:, None]
    width = _width(module)
    _check("block_indices", blocks, (query.shape[0], None, query.shape[2]), "(B, a divisor of N, Sq, K)")
    if blocks.shape[-1] * width * _FEW > size or blocks.shape[1] not in (1, key.shape[1]):
        return None
    indices = blocks[..., None] * width + torch.arange(width, device=blocks.device)
    return torch.where((blocks[..., None] < 0) | (indices >= size), -1, indices).flatten(-2)


def with_chosen_keys(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the mask of a call, without the keys that the call does not choose; the mask as it is where all are seen.

    Args:
        module: the attention module; of blocks, ``indexer.block_size`` is their size.
        query: (B, N, Sq, D).
        key: (B, Nk, Sk, D).
        mask: True where a key is seen, or added to the scores, or None.
        causal: without a mask, each query sees the keys up to its own.
        kwargs: of the call.

    >>> q = torch.zeros(1, 1, 2, 4)
    >>> with_chosen_keys(None, q, q, None, False, {"indices": torch.tensor([[[0], [1]]])})
    tensor([[[[ True, False],
              [False,  True]]]])
    """
    keys: Any = kwargs.get("indices")
    blocks: Any = kwargs.get("block_indices")
    if keys is None and blocks is None:
        return mask
    size, name = key.shape[2], "block_indices" if keys is None else "indices"
    if keys is not None:
        _check(name, keys, (query.shape[0], query.shape[2]), "(B, Sq, K)")
        chosen = _chosen(keys, size)[:, None]
    else:
        width = _width(module)
        _check(name, blocks, (query.shape[0], None, query.shape[2]), "(B, a divisor of N, Sq, K)")
        chosen = _chosen(blocks, -(-size // width)).repeat_interleave(width, -1)[..., :size]
        chosen = chosen.repeat_interleave(query.shape[1] // chosen.shape[1], 1)
    if mask is None:
        return chosen.tril() if causal else chosen
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _width(module: Any) -> int:
    width = getattr(getattr(module, "indexer", None), "block_size", None)
    if width is None:
        raise _error("block_indices", "a module without indexer.block_size for", "a module that has it")
    return width


def _chosen(indices: Tensor, size: int) -> Tensor:
    """Return True for each index; those below 0 go to a column that is left out."""
    columns = indices.new_zeros((*indices.shape[:-1], size + 1), dtype=torch.bool)
    return columns.scatter(-1, indices.long().masked_fill(indices < 0, size), True)[..., :size]


def _check(name: str, indices: Tensor, sizes: tuple[int | None, ...], expected: str) -> None:
    shape = tuple(indices.shape)
    if len(shape) != len(sizes) + 1 or any(size not in (None, given) for size, given in zip(sizes, shape)):
        raise _error(name, f"the shape {shape} of", expected)


def _error(name: str, got: str, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"attention implementation 'fusedops': got {got} the indices of a sparse attention ({name}), expected "
        f'{expected}; to fix: set_attn_implementation("sdpa")'
    )
