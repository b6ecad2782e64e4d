"""Slabs: pieces of a large CPU tensor that stay in the cache between consecutive torch calls.

A torch call costs 4-6 us and a barrier, so a slab must not be small. Buffers have the size of a slab and are reused for
every slab, so a slab must not be large. Measured on Zen 3, 2 threads, torch 2.13, float32 of 128 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Elements of a slab per thread: 2 MiB of float32. softmax's forward takes 1.2 times as long with an eighth of it and
# 1.1 times with a quarter (a torch call costs 4-6 us and a barrier; on a busy machine the barrier costs much more).
# bias_gelu's backward takes 1.2 times as long with a quarter and 1.06 times with a half.
SLAB = 512 * 1024


def max_slab_elements(elements: int, buffers: int, threads: int | None = None) -> int:
    """Return the largest number of elements that a slab of a tensor may have.

    Args:
        elements: number of elements of the whole tensor.
        buffers: number of buffers of a slab's size, in the dtype of the tensor. Together they take at most a sixteenth
            of the tensor's memory, or half a SLAB each.
        threads: number of threads that work on a slab. None: the number that torch uses.
    """
    return max(SLAB // 2, min(elements // (16 * max(1, buffers)), SLAB * (threads or torch.get_num_threads())))


def pieces(max_elements: int, lead: Tensor, *others: Tensor | None, rows: bool = False) -> Iterator[tuple[Any, ...]]:
    """Cut all tensors in the same way, along the first dimensions of ``lead``, into pieces of ``max_elements``.

    Args:
        max_elements: largest number of elements of a piece of ``lead``.
        lead: (...). If it is contiguous, each piece is contiguous and the pieces come in memory order.
        others: tensors with the rank of ``lead``, or None. A tensor is not cut along a dimension in which it has size
            1. None is yielded with every piece.
        rows: never cut a row of the last dimension, even a row of more than ``max_elements``.

    Yields:
        A piece of ``lead`` and the matching piece of each of ``others``.
    """
    if lead.numel() > max_elements:
        for dim in range(lead.dim() - rows):
            size = lead.size(dim)
            if size > 1:
                step = max(1, max_elements * size // lead.numel())
                step = -(-size // -(-size // step))  # the same number of pieces, of sizes as equal as possible
                for start in range(0, size, step):
                    n = min(step, size - start)
                    cut = [t if t is None or t.size(dim) == 1 else t.narrow(dim, start, n) for t in others]
                    yield from pieces(max_elements, lead.narrow(dim, start, n), *cut, rows=rows)
                return
    # copy_ from float16 to float32 ignores the negative bit of its source (torch 2.13)
    yield tuple(t if t is None or not t.is_neg() else t.resolve_neg() for t in (lead, *others))


class Buffers:
    """Numbered buffers of a slab's size. Each is allocated at its first use and reused for every slab.

    Args:
        size: number of elements of the largest slab.
        dtype: dtype of all buffers.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self._memory_and_view: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, number: int, shape: torch.Size) -> Tensor:
        """Return buffer ``number`` as a contiguous tensor of ``shape``. It holds the values of its last use."""
        pair = self._memory_and_view.get(number)
        if pair is None or pair[1].shape != shape:  # nearly all slabs have the same shape, and a new view takes 5 us
            memory = torch.empty(self.size, dtype=self.dtype, device="cpu") if pair is None else pair[0]
            pair = self._memory_and_view[number] = memory, memory[: shape.numel()].view(shape)
        return pair[1]
