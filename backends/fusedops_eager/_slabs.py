"""Slabs: a large CPU tensor is worked off in pieces that stay in the cache from one torch call to the next.

A call costs 4-6 us and a barrier, so that pieces must not be small; buffers of a piece's size are used again for every
piece, so that they must not be large. The measurements are from Zen 3, 2 threads, torch 2.13, float32 of 128 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Elements of a slab per thread: 1 MiB of float32. With half of it softmax's forward takes 1.17 times as long, with four
# times as much 1.03.
SLAB = 256 * 1024


def limit(x: Tensor, share: int) -> int:
    """Elements of a slab. ``share`` buffers of x's dtype and that size stay under a sixteenth of x, or 1 MiB each."""
    return max(SLAB, min(x.numel() // (16 * share), SLAB * torch.get_num_threads()))


def pieces(limit: int, lead: Tensor, *others: Tensor, rows: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """Cuts all tensors alike, along the first dimensions of ``lead``, until a piece of it has ``limit`` elements.

    Args:
        limit: elements of a piece.
        lead: (...). Of a contiguous tensor each piece is contiguous too, and they come in order.
        others: of the rank of ``lead``. One that has size 1 in a dimension is repeated.
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
                    cut = [t if t.size(dim) == 1 else t.narrow(dim, start, n) for t in (lead, *others)]
                    yield from pieces(limit, *cut, rows=rows)
                return
    yield (lead, *others)
