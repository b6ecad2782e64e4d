"""merge_attention on Triton in the interpreter: dtypes of the four arguments, strides, rows that are too long."""

from __future__ import annotations

import math

import pytest
import torch
from pairwise import pairwise
from right import assert_right

pytest.importorskip("triton", reason="triton is not installed")

import fusedops

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("shape", "dtypes", "swapped"),
    pairwise(
        [(2, 3, 5, 16), (3, 2, 100), (7, 33), (5,), (2, 1, 2, 3, 8), (1, 2, 9, 1)],
        [(F32,) * 4, (BF16, F32, BF16, F32), (F32, F32, BF16, F32), (F16, F32, F32, F32)],
        [False, True],
    ),
    ids=str,
)
def test_any_call(shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], swapped: bool) -> None:
    numbers = torch.Generator().manual_seed(0)
    made = [
        torch.randn(each, generator=numbers).to(dtype)
        for each, dtype in zip((shape, shape[:-1], shape, shape[:-1]), dtypes)
    ]
    if swapped and len(shape) > 2:  # (B, S, N, D) in memory
        made = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in made]
    if shape[:-1]:
        made[1][::2], made[3][::3] = -math.inf, -math.inf
    with fusedops.use("triton", fallback="raise"):
        assert_right("merge_attention", **dict(zip(("out_a", "lse_a", "out_b", "lse_b"), made)))


def test_expanded_rows_beside_others_and_numbers_of_parts_without_keys() -> None:
    """One gradient alone is wanted: the strides of the other one's are none."""
    numbers = torch.Generator().manual_seed(0)
    out_a, out_b = torch.randn(1, 1, 1, 16, generator=numbers).expand(2, 3, 5, 16), torch.randn(2, 3, 5, 16)
    lse_a, lse_b = torch.randn(2, 3, 5, generator=numbers), torch.randn(2, 3, 5, generator=numbers)
    lse_b[0, 0], lse_a[0, 1] = -math.inf, -math.inf
    out_b[0, 0], out_b[0, 1, 2] = math.nan, 7.0
    grads = torch.randn(2, 3, 5, 16, generator=numbers), torch.randn(2, 3, 5, generator=numbers)
    results = []
    for backend in ("triton", "eager"):
        given = [each.detach().requires_grad_() for each in (lse_a, out_b, lse_b)]
        merged = fusedops.merge_attention(out_a, *given, backend=backend)
        torch.autograd.backward(merged, grads)
        results.append([*merged, *(each.grad for each in given)])
    for got, want in zip(*results):
        torch.testing.assert_close(got, want)


def test_a_row_that_is_too_long_goes_to_the_next_backend() -> None:
    out, lse = torch.randn(2, 4097), torch.randn(2)
    with fusedops.use("triton,eager", fallback="silent"):
        decision = fusedops.explain("merge_attention", out, lse, out, lse)
    assert decision.backend == "eager"
    assert "dim -1 of out_a = 4097, expected a size of at most 4096" in str(decision)
