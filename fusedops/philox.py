"""The random numbers of dropout: a keep-mask that is a pure function of a seed and an element's position.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), as in CUDA and in
Triton's ``tl.randint4x``. Key: the low and high 32 bits of the seed. Counter: the low and high 32 bits of
``index // 4``, 0, 0. The element at linear ``index`` takes output word ``index % 4``, and is kept where that word, as
an unsigned number, is at least ``round(p * 2**32)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["dropped", "keep_mask", "philox", "threshold"]

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def threshold(p: float) -> int:
    """Return the smallest word that keeps its element."""
    return round(p * 2**32)


def philox(counter: Tensor, seed: Tensor, position: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four words for each counter.

    Args:
        counter: int64, any shape: ``index // 4``.
        seed: int64, one element or broadcastable to the counter, on its device.
        position: the high half of the counter, int64, as the seed. None: 0.

    Returns:
        Four int64 tensors of the shape of all, each value in [0, 2**32).
    """
    if seed.numel() == 1 and position is None:
        seed = seed.reshape(())
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1 = counter & _LOW, (counter >> 32) & _LOW
    c2 = torch.zeros_like(counter) if position is None else position & _LOW
    c3 = c2 if position is None else (position >> 32) & _LOW
    for _ in range(10):
        # the product of two 32-bit numbers wraps in int64, but its 64 bits are right: mask after each shift
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & _LOW) ^ c1 ^ k0, ((first >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, p: float, shape: Sequence[int]) -> Tensor:
    """Return the elements of a contiguous tensor of ``shape`` that dropout keeps: bool, on the seed's device.

    >>> import torch
    >>> from fusedops.philox import keep_mask
    >>> keep_mask(torch.tensor([7]), 0.5, (4,))
    tensor([ True,  True, False, False])
    """
    count = prod(shape)
    counter = torch.arange((count + 3) // 4, device=seed.device, dtype=torch.int64)
    words = torch.stack(philox(counter, seed), dim=-1).flatten()[:count]
    return (words >= threshold(p)).view(tuple(shape))


def dropped(u: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Return inverted dropout of ``u`` by the keep-mask of ``seed``: kept values times 1 / (1 - p), others exactly 0.

    >>> import torch
    >>> from fusedops.philox import dropped
    >>> dropped(torch.ones(4), 0.5, torch.tensor([7]))
    tensor([2., 2., 0., 0.])
    """
    if seed is None:
        return u
    scale = 1 / (1 - p) if p < 1 else 0.0  # at p = 1 nothing is kept, and inf * 0 must not reach the gradient
    return torch.where(keep_mask(seed, p, u.shape), u * scale, 0)
