"""Slabs: a large CPU tensor is worked off in pieces that stay in the cache from one torch call to the next.

A call costs 4-6 us and a barrier, so that pieces must not be small; buffers of a piece's size are used again for every
piece, so that they must not be large. The measurements are from Zen 3, 2 threads, torch 2.13, float32 of 128 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Elements of a slab per thread, 2 MiB of float32. With an eighth of it softmax's forward takes 1.2 times as long, with
# a quarter 1.1 (each call costs 4-6 us and a barrier, and on a machine that has other work the barrier much more);
# bias_gelu's backward with a quarter 1.2, with a half 1.06.
SLAB = 512 * 1024


def limit(elements: int, share: int, threads: int | None = None) -> int:
    """Elements of a slab of a tensor of so many.

    Args:
        elements: of the whole tensor.
        share: so many buffers as large, in that tensor's dtype, are a sixteenth of it at most, or half a SLAB each.
        threads: for how many a slab should be. None: for as many as torch has.
    """
    return max(SLAB // 2, min(elements // (16 * max(1, share)), SLAB * (threads or torch.get_num_threads())))


def pieces(limit: int, lead: Tensor, *others: Tensor | None, rows: bool = False) -> Iterator[tuple[Any, ...]]:
    """Cuts all tensors alike, along the first dimensions of ``lead``, until a piece of it has ``limit`` elements.

    Args:
        limit: elements of a piece.
        lead: (...). Of a contiguous tensor each piece is contiguous too, and they come in order.
        others: of the rank of ``lead``, or None. One that has size 1 in a dimension is repeated, and so is None.
        rows: never cut a row of the last dimension, even where it is longer than the limit.
    """
    if lead.numel() > limit:
        for dim in range(lead.dim() - rows):
            size = lead.size(dim)
            if size > 1:
                step = max(1, limit * size // lead.numel())
                step = -(-size // -(-size // step))  # as even as can be
                for start in range(0, size, step):
                    n = min(step, size - start)
                    cut = [t if t is None or t.size(dim) == 1 else t.narrow(dim, start, n) for t in others]
                    yield from pieces(limit, lead.narrow(dim, start, n), *cut, rows=rows)
                return
    yield (lead, *others)


class Buffers:
    """Memory of a slab's size, by number: made when first asked for, the same for every slab.

    Args:
        size: elements of the largest slab.
        dtype: of all of them.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype = size, dtype
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, number: int, shape: torch.Size) -> Tensor:
        """A contiguous tensor of ``shape``, with what was last left in it."""
        made = self._made.get(number)
        if made is None or made[1].shape != shape:  # nearly all slabs have one shape, and a view takes 5 us
            whole = torch.empty(self.size, dtype=self.dtype, device="cpu") if made is None else made[0]
            made = self._made[number] = whole, whole[: shape.numel()].view(shape)
        return made[1]
