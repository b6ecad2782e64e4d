"""Inputs, definitions and comparisons shared by the tests of the eager kernels with a bias."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

INF, NAN = float("inf"), float("nan")

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

DTYPES = [F16, BF16, F32, F64]

MIXED = [*((dtype, dtype) for dtype in DTYPES), (BF16, F32), (F32, BF16), (F16, BF16), (F32, F64), (F64, F16)]

TOLERANCE = {F16: (1e-3, 1e-3), BF16: (1e-2, 1.6e-2), F32: (2e-6, 1.3e-6), F64: (1e-12, 1e-12)}

SHAPES: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    ((6, 50), None),
    ((6, 50), (50,)),
    ((6, 50), (1, 50)),
    ((6, 50), (6, 1)),
    ((6, 50), (6, 50)),
    ((6, 50), ()),
    ((2, 3, 5, 11), (11,)),
    ((2, 3, 5, 11), (3, 1, 11)),
    ((2, 3, 5, 11), (2, 1, 5, 1)),
    ((2, 3, 5, 11), (1, 1, 1, 1)),
    ((300,), (300,)),
    ((300,), (1,)),
    ((), ()),
    ((1, 1), (1,)),
]


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """A contiguous tensor, one with strides, a transposed and an expanded one, all of one shape."""
    yield (2 * torch.randn(shape)).to(dtype)
    if shape:
        yield (2 * torch.randn([2 * size for size in shape])).to(dtype)[tuple(slice(None, None, 2) for _ in shape)]
        yield (2 * torch.randn(shape[::-1])).to(dtype).permute(*reversed(range(len(shape))))
        yield (2 * torch.randn(shape[-1])).to(dtype).expand(shape)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    atol, rtol = TOLERANCE[dtype]
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=times * atol, rtol=times * rtol, equal_nan=True)


def fresh(made: Tensor, *inputs: Tensor | None) -> None:
    assert made.is_contiguous()
    assert not made._is_view()
    owners = {t.untyped_storage().data_ptr() for t in inputs if t is not None and t.numel()}
    assert made.untyped_storage().data_ptr() not in owners


class Unchanged:
    """Asserts that the tensors are as they were, bit for bit."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self.tensors = [t for t in tensors if t is not None]
        self.before = [self._bits(t) for t in self.tensors]

    def check(self) -> None:
        for now, then in zip(self.tensors, self.before):
            assert torch.equal(self._bits(now), then)

    @staticmethod
    def _bits(t: Tensor) -> Tensor:
        flat = torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1))
        return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


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
