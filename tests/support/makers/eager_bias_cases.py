"""Inputs, definitions and comparisons shared by the tests of the eager kernels with a bias."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

INF, NAN = float("inf"), float("nan")

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

DTYPES = [F16, BF16, F32, F64]

TOLERANCE = {F16: (1e-3, 1e-3), BF16: (1e-2, 1.6e-2), F32: (2e-6, 1.3e-6), F64: (1e-12, 1e-12)}


def close(got: Tensor, want: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    atol, rtol = TOLERANCE[dtype]
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=times * atol, rtol=times * rtol, equal_nan=True)


def gelu_of(u: Tensor, form: str) -> Tensor:
    if form == "tanh":
        return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    return 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10 as the paper has it, in numpy's uint64: nothing here comes from fusedops."""
    c, (k0, k1) = [word.astype(np.uint64) for word in counter], key
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        one, two = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(two >> half) ^ c[1] ^ np.uint64(k0), two & low, (one >> half) ^ c[3] ^ np.uint64(k1), one & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def words_of(seed: int, first: int, count: int) -> np.ndarray:
    """The words of elements ``first`` to ``first + count``."""
    index = np.arange(first, first + count, dtype=np.uint64)
    unit = np.unique(index // np.uint64(4))
    zero = np.zeros_like(unit)
    counter = [unit & np.uint64(0xFFFFFFFF), unit >> np.uint64(32), zero, zero]
    words = np.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), -1).reshape(-1)
    return words[first % 4 :][:count]
