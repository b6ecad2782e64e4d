"""Sizes near 2**31 in kernels that count in 32 bits. No tensor here takes memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

import fusedops
from fusedops import TensorSpec
from fusedops_triton.softmax import _softmax_rows

_place = _softmax_rows.place


@triton.jit
def places(out_ptr, row_ptr, size_h, size_q, N: tl.constexpr, HEADS_INNER: tl.constexpr):
    at = tl.arange(0, N)
    b, h, q = _place(tl.load(row_ptr + at), size_h, size_q, HEADS_INNER)
    tl.store(out_ptr + at, b)
    tl.store(out_ptr + N + at, h)
    tl.store(out_ptr + 2 * N + at, q)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of an overflow
@pytest.mark.parametrize("heads_inner", [False, True])
@pytest.mark.parametrize(("size_h", "size_q"), [(65536, 49152), (65536, 65536), (2**20, 2**20), (3, 7)])
def test_a_row_is_placed_where_the_sizes_multiply_to_more_than_32_bits(
    size_h: int, size_q: int, heads_inner: bool
) -> None:
    n = size_h * size_q
    rows = torch.tensor([0, 1, size_q - 1, size_q, n // 3, n - 1, n, 2 * n + size_q + 1])
    out = torch.empty(3, 8, dtype=torch.int64)
    places[(1,)](out, rows, size_h, size_q, N=8, HEADS_INNER=heads_inner)
    per_head, heads = rows // size_q, rows // size_h
    want = (
        (heads // size_q, rows % size_h, heads % size_q)
        if heads_inner
        else (per_head // size_h, per_head % size_h, rows % size_q)
    )
    assert torch.equal(out, torch.stack(want))


def _calls(columns: int) -> dict[str, tuple[Any, ...]]:
    x, target = TensorSpec((2, columns), torch.bfloat16), TensorSpec((2,), torch.int64)
    weight = TensorSpec((columns, 1), torch.bfloat16)
    return {
        "scaled_masked_softmax": (x,),
        "cross_entropy": (x, target),
        "linear_cross_entropy": (TensorSpec((2, 1), torch.bfloat16), weight, target),
    }


@pytest.mark.parametrize("name", list(_calls(1)))
@pytest.mark.parametrize("columns", [2**31 - 2**16, 2**31 - 2**16 + 1, 2**31 - 1, 2**31, 2**32 + 8])
def test_rows_whose_blocks_end_past_32_bits_are_refused(name: str, columns: int) -> None:
    decision = fusedops.explain(name, *_calls(columns)[name], backend="triton")
    fits = columns <= 2**31 - 2**16
    assert (decision.backend == "triton") == fits
    (triton_candidate,) = (one for one in decision.candidates if one.backend == "triton")
    if not fits:
        (reason,) = triton_candidate.reasons
        assert reason.given.endswith(f"= {columns}")
        assert reason.needed == "a size of at most 2147418112"
    assert decision.backward == decision.backend
