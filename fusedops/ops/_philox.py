"""The random numbers of dropout: a keep-mask that is a pure function of a seed and an element's position.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), as in CUDA and in
Triton's ``tl.randint4x``. Key: the low and high 32 bits of the seed. Counter: the low and high 32 bits of
``index // 4``, 0, 0. The element at linear ``index`` takes output word ``index % 4``, and is kept where that word, as
an unsigned number, is at least ``round(p * 2**32)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from sys import modules
from typing import Any

import torch
from torch import Tensor

from fusedops._spec import TensorSpec
from fusedops.ops._checks import is_probability, is_seed

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def threshold(p: float) -> int:
    """The smallest word that keeps its element."""
    return round(p * 2**32)


def philox(counter: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words for each counter.

    Args:
        counter: int64, any shape: ``index // 4``.
        seed: int64, one element, on the counter's device.

    Returns:
        Four int64 tensors of the counter's shape, each value in [0, 2**32).
    """
    seed = seed.reshape(())
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    c0, c1 = counter & _LOW, (counter >> 32) & _LOW
    c2 = c3 = torch.zeros_like(counter)
    for _ in range(10):
        # the product of two 32-bit numbers wraps in int64, but its 64 bits are right: mask after each shift
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((second >> 32) & _LOW) ^ c1 ^ k0, ((first >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, p: float, shape: Sequence[int]) -> Tensor:
    """Which elements of a contiguous tensor of ``shape`` dropout keeps: bool, on the seed's device."""
    count = prod(shape)
    counter = torch.arange((count + 3) // 4, device=seed.device, dtype=torch.int64)
    words = torch.stack(philox(counter, seed), dim=-1).flatten()[:count]
    return (words >= threshold(p)).view(tuple(shape))


def new_seed(device: torch.device) -> Tensor:
    """A seed drawn from torch's generator of ``device``, so that manual_seed, fork_rng and CUDA graphs govern it."""
    return torch.randint(2**63 - 1, (1,), device=device, dtype=torch.int64)


def as_seed(seed: int | Tensor | None, p: float, training: bool, x: Tensor) -> Tensor | None:
    """The seed that a call with ``x`` hands to its kernel: None where it drops nothing, drawn where none was given."""
    if not training or p == 0:
        return None
    if seed is None:
        drawn = new_seed(x.device)
        if type(x) is Tensor or "torch.distributed.tensor" not in modules:
            return drawn
        from fusedops._sharding import shared_seed

        return shared_seed(drawn, x)
    if isinstance(seed, Tensor):
        return seed
    # a 64-bit seed may be given as unsigned
    return torch.tensor([seed - 2**64 if seed >= 2**63 else seed], device=x.device, dtype=torch.int64)


def with_seed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A dropout's arguments, which end with p, training and seed, with the seed that the call would have."""
    *others, p, training, seed = args
    if isinstance(seed, (Tensor, TensorSpec)) or not is_probability(p) or not is_seed(seed):
        return args
    if isinstance(args[0], TensorSpec):
        drops = training and p > 0
        return (*others, p, training, TensorSpec((1,), torch.int64, args[0].device) if drops else None)
    return (*others, p, training, as_seed(seed, p, training, args[0]))


def dropped(u: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """Inverted dropout of ``u`` by the mask of ``seed``: kept values times 1 / (1 - p), others exactly 0."""
    if seed is None:
        return u
    scale = 1 / (1 - p) if p < 1 else 0.0  # nothing is kept at p = 1, and inf * 0 must not come in through the gradient
    return torch.where(keep_mask(seed, p, u.shape), u * scale, 0)
