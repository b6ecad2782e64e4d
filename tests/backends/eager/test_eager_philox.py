"""The bits of dropout on eager, against an independent Philox."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fusedops_eager._philox import KeepMask
from fusedops_eager.bias._dropout import dropout_forward

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, answer
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEEDS = [0, 1234567890123456789, -(2**63) + 5]


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


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_independent_philox_knows_the_published_answers(counter: str, key: str, answer: str) -> None:
    words = [np.array([int(word, 16)]) for word in counter.split()]
    k0, k1 = (int(word, 16) for word in key.split())
    assert [int(word[0]) for word in philox(words, (k0, k1))] == [int(word, 16) for word in answer.split()]


def test_the_kernel_knows_the_published_answer() -> None:
    words = KeepMask(0, 0.5, 4).words(0, 1)
    assert [int(word) + 2**31 for word in words] == [int(word, 16) for word in KNOWN[0][2].split()]


@pytest.mark.parametrize("seed", SEEDS)
def test_first_million_bits(seed: int) -> None:
    for p in (0.1, 0.75):
        y = dropout_forward(torch.ones(1000, 1000), None, None, p, True, torch.tensor([seed]))
        wanted = torch.from_numpy(words_of(seed, 0, 10**6) >= round(p * 2**32))
        assert torch.equal(y.view(-1) != 0, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 1001, 2**31, 2**32 - 3, 2**33 + 1, 2**34 - 9, 2**34 - 203, 2**50 + 6])
def test_any_stretch(first: int, seed: int) -> None:
    """2**34 elements are 2**32 counters: there the counter's second word steps."""
    for count in (1, 2, 5, 8, 203):
        kept = KeepMask(seed, 0.3, 203)(first, count)
        assert kept.dtype is torch.int32
        assert torch.equal(kept.bool(), torch.from_numpy(words_of(seed, first, count) >= round(0.3 * 2**32)))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1 / 3])
def test_keep_rate(p: float) -> None:
    n = 2**21
    y = dropout_forward(torch.ones(n), None, None, p, True, torch.tensor([11]))
    assert abs(int((y != 0).sum()) - n * (1 - p)) < 4 * math.sqrt(n * p * (1 - p))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}


@pytest.mark.usefixtures("slabs")
def test_the_mask_is_of_the_linear_index() -> None:
    """Whatever the shape, the strides and the slabs are."""
    x, seed = torch.ones(2, 3, 70, 5), torch.tensor([99])
    mask = dropout_forward(x.view(-1), None, None, 0.4, True, seed)
    assert torch.equal(mask != 0, torch.from_numpy(words_of(99, 0, x.numel()) >= round(0.4 * 2**32)))
    for shape in ((2100,), (30, 70), (2, 1050), (7, 5, 60), (2, 3, 70, 5), (1, 2100, 1)):
        for dtype in DTYPES:
            for ones in (torch.ones(shape), torch.ones(shape[::-1]).permute(*reversed(range(len(shape))))):
                y = dropout_forward(ones.to(dtype), None, None, 0.4, True, seed)
                assert torch.equal(y.view(-1) != 0, mask != 0)
    odd = torch.randn(70, 30).T
    for residual in (None, torch.randn(30, 70), torch.randn(70, 30).T):
        again = dropout_forward(odd.contiguous(), None, residual, 0.4, True, seed)
        assert torch.equal(dropout_forward(odd, None, residual, 0.4, True, seed), again)
