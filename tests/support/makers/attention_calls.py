"""Calls of attention: random ones, of grouped heads, odd lengths, masks of every shape, unseen NaN; packed ones."""

from __future__ import annotations

import random
from typing import Any

import torch
from right import assert_right
from torch import Tensor

import fusedops

LENGTHS = (1, 2, 3, 7, 16, 17, 33, 64, 65, 100)
# of packed sequences: without keys, without queries, of more queries than keys and of more keys; rows of no sequence
SAME = torch.tensor([0, 5, 5, 6, 14])
QUERIES, KEYS = torch.tensor([2, 7, 9, 9, 16, 19, 20]), torch.tensor([1, 4, 4, 10, 21, 25, 25])
NAMES = ("q", "k", "v", "mask", "scale", "causal", "window", "return_lse")


def explicit(call: dict[str, Any]) -> Tensor:
    """Return what a call masks, (B, Nq, Sq, Sk), each position by its definition."""
    q, k = call["q"], call["k"]
    b, n, sq, sk = (*q.shape[:3], k.shape[2])
    masked = torch.zeros(b, n, sq, sk, dtype=torch.bool)
    if call["mask"] is not None:
        masked |= call["mask"].cpu() != 0
    for i in range(sq):
        diagonal = i if call["causal"] == "upper_left" else i + sk - sq
        for j in range(sk):
            outside = call["causal"] != "none" and j > diagonal
            if call["window"] is not None:
                outside |= j < diagonal - call["window"][0] or j > diagonal + call["window"][1]
            if outside:
                masked[:, :, i, j] = True
    return masked


def random_call(seed: int, dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """Return a valid call by parameter, on the CPU; tensors have NaN and inf where no row sees them, now and then.

    Args:
        seed: the same call for the same seed.
        dtypes: of q, k and v.
    """
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = dice.choice(dtypes)
    b, nk, group = dice.choice((1, 1, 2, 3)), dice.choice((1, 2, 3)), dice.choice((1, 1, 2, 4))
    sq, sk = dice.choice(LENGTHS), dice.choice(LENGTHS)
    sq = sk if dice.random() < 0.4 else 0 if dice.random() < 0.02 else sq
    sk = 0 if dice.random() < 0.02 and sq != sk else sk
    d = dice.choice((8, 16, 32, 40, 64))
    dv = d if dice.random() < 0.8 else dice.choice((8, 24))

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, k, v = tensor(b, nk * group, sq, d), tensor(b, nk, sk, d), tensor(b, nk, sk, dv)
    if dice.random() < 0.3:  # the layout of models: (B, S, N, D) transposed
        q, k, v = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v))
    causal = dice.choice(("none", "upper_left", "lower_right"))
    window = (dice.choice((0, 1, 5, 40)), dice.choice((0, 3, 50))) if dice.random() < 0.3 else None
    mask = None
    if dice.random() < 0.6:
        shapes = ((b, nk * group, sq, sk), (b, 1, sq, sk), (b, 1, 1, sk), (1, nk * group, sq, 1), (sq, sk), (sk,))
        mask = torch.rand(dice.choice(shapes), generator=generator) < dice.choice((0.1, 0.4, 0.9))
        mask = mask if dice.random() < 0.7 else mask.to(torch.uint8) * 3
    scale = dice.choice((None, None, 0.3, 1, -0.2))
    values = (q, k, v, mask, scale, causal, window, dice.random() < 0.5)
    call = dict(zip(NAMES, values))
    if dice.random() < 0.4 and sq and sk:
        unseen = explicit(call).all(2).view(b, nk, group, sk).all(2)  # keys that no row sees
        for name in ("k", "v"):
            fill = dice.choice((float("nan"), float("inf"), -float("inf")))
            call[name] = call[name].masked_fill(unseen[..., None], fill)
    return call


def packed(queries: int, keys: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Return q of 4 heads, and k and v of 2."""
    numbers = torch.Generator().manual_seed(queries + keys)
    return [torch.randn(rows, n, 16, generator=numbers).to(dtype) for rows, n in ((queries, 4), (keys, 2), (keys, 2))]


def served_calls(backend: str, seeds: int, dtypes: tuple[torch.dtype, ...]) -> int:
    """Compare random calls with float64; return how many of them the backend takes."""
    taken = 0
    for seed in range(seeds):
        call = random_call(seed, dtypes)
        if not all(bool(call[name].isfinite().all()) for name in "qkv"):  # deviation nonfinite-under-mask
            continue
        if fusedops.explain("attention", **call).backend == backend:
            taken += 1
            with fusedops.use(f"{backend},eager", fallback="silent"):  # eager has the gradient of lse
                assert_right("attention", **call)
    return taken
