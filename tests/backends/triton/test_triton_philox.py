"""The bits of dropout in the triton kernels, run by Triton's interpreter, against the reference's Philox."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
import triton
import triton.language as tl
from triton_cases import seed_of

from fusedops import philox as _philox
from fusedops.ops.bias import bias_dropout
from fusedops_triton.bias._bias_dropout import _kept, dropout_backward, dropout_forward
from fusedops_triton.bias._bias_dropout import philox as philox_of_triton

SEEDS = (7, -3, 2**62 + 12345)


@triton.jit
def _words(out_ptr, seed_ptr, counter_ptr, RANDINT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    counter, seed = tl.load(counter_ptr + at), tl.load(seed_ptr)
    if RANDINT:
        w0, w1, w2, w3 = tl.randint4x(seed, counter)
    else:
        w0, w1, w2, w3 = philox_of_triton(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), None, False)
    tl.store(out_ptr + at, w0.to(tl.uint32).to(tl.int64))
    tl.store(out_ptr + SIZE + at, w1.to(tl.uint32).to(tl.int64))
    tl.store(out_ptr + 2 * SIZE + at, w2.to(tl.uint32).to(tl.int64))
    tl.store(out_ptr + 3 * SIZE + at, w3.to(tl.uint32).to(tl.int64))


@triton.jit(do_not_specialize=["last"])
def _keep(out_ptr, seed_ptr, first_ptr, last, SIZE: tl.constexpr, CALLS: tl.constexpr):
    first = tl.load(first_ptr)
    low, high = first.to(tl.uint32), (first >> 32).to(tl.uint32)
    keep = _kept(tl.load(seed_ptr), low, high, last, SIZE, CALLS, True, False)
    tl.store(out_ptr + tl.arange(0, SIZE), keep.to(tl.uint8))


COUNTERS = (0, 1, 2**32 - 1, 2**32, 2**32 + 5, 2**40 + 3, 2**61 - 1, 12345)


@pytest.mark.parametrize("seed", [0, *SEEDS, -(2**63)])
def test_philox_has_the_words_of_the_reference_and_of_triton(seed: int) -> None:
    counters = torch.tensor(COUNTERS)
    ours, theirs = torch.empty(2, 4, len(COUNTERS), dtype=torch.int64)
    _words[(1,)](ours, seed_of(seed), counters, False, len(COUNTERS))
    _words[(1,)](theirs, seed_of(seed), counters, True, len(COUNTERS))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, torch.stack(_philox.philox(counters, seed_of(seed))))


def test_philox_known_answer() -> None:
    # Random123, tests/kat_vectors: philox 4x32 10, counter and key 0
    out = torch.empty(4, 1, dtype=torch.int64)
    _words[(1,)](out, seed_of(0), torch.tensor([0]), False, 1)
    assert out.flatten().tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 2**30 - 8, 2**32 - 8, 2**45])  # the third passes index 2**34
def test_keep_bits_far_from_the_beginning(first: int, seed: int, calls: int) -> None:
    out = torch.empty(64, dtype=torch.uint8)
    _keep[(1,)](out, seed_of(seed), torch.tensor([first]), _philox.threshold(0.3) - 1, 64, calls)
    words = torch.stack(_philox.philox(torch.arange(first, first + 16), seed_of(seed)), dim=-1).flatten()
    assert torch.equal(out.bool(), words >= _philox.threshold(0.3))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 3, 4, 1027, 2050])
def test_keep_bits_forward_and_backward(size: int, dtype: torch.dtype, seed: int) -> None:
    p = 0.6
    keep = _philox.keep_mask(seed_of(seed), p, (size,))
    y = dropout_forward(torch.ones(size, dtype=dtype), None, None, p, True, seed_of(seed))
    assert torch.equal(y != 0, keep)
    dx, _ = dropout_backward(torch.ones(size, dtype=dtype), seed_of(seed), None, p, True, dtype, (True, False))
    assert dx is not None
    assert torch.equal(dx != 0, keep)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rows", "size"), [(17, 4), (9, 100), (3, 1028), (5, 18)])  # the last tears groups of four
@pytest.mark.usefixtures("parts")
def test_keep_bits_where_columns_are_summed(rows: int, size: int, seed: int) -> None:
    keep = _philox.keep_mask(seed_of(seed), 0.25, (rows, size))
    grad, bias = torch.full((rows, size), 0.75), torch.zeros(size)
    dx, dbias = dropout_backward(grad, seed_of(seed), bias, 0.25, True, torch.float32, (True, True))
    assert torch.equal(dx, keep.float())
    assert torch.equal(dbias, keep.sum(0).float())


@pytest.mark.parametrize("p", [1e-12, 2**-33, 1e-9, 0.5, 1 - 1e-9, 1 - 2**-34, 1.0])
def test_thresholds(p: float) -> None:
    x = torch.ones(50)
    torch.testing.assert_close(
        dropout_forward(x, None, None, p, True, seed_of(1)),
        bias_dropout.OP.reference(x, None, p, True, seed_of(1)), rtol=1e-7, atol=0.0,
    )  # fmt: skip
