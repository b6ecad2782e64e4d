"""10,000 random calls on the stand-in: the vendor's kernel serves all that the documents allow, and no other."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import ascend
from hypothesis import given, settings
from hypothesis import strategies as st
from right import assert_right

import fusedops
from fusedops import TensorSpec, testing

OP = testing.OPS["scaled_masked_softmax"]
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CALLS = 1_000
RUN = 2**14  # elements: larger calls are chosen for, and not run

SIZES: tuple[Callable[[random.Random], int], ...] = (  # what is run, what is at the edges of the limits, long ones, any
    lambda r: r.choice([32, 64, 96, 128]),
    lambda r: r.choice([1, 31, 32, 33, 48, 63, 64, 100]),
    lambda r: r.choice([4064, 4095, 4096, 4097, 4128]),
    lambda r: r.randint(1, 4200),
)


def call_of(seed: int) -> dict[str, Any]:
    """A call. One number is drawn by hypothesis, whose own draws of all parts take longer than the calls."""
    r = random.Random(seed)
    lead = [r.choice([1, 2, 3]) for _ in range(r.randint(0, 4))]
    shape = (*lead, *(r.choices(SIZES, weights=[6, 3, 1, 1])[0](r) for _ in range(2)))
    mask = tuple(r.choice([1, size]) for size in shape[r.randint(0, len(shape)) :])
    return {
        "shape": shape,
        "mask": r.choice([None, mask, mask, mask]),
        "mask_dtype": r.choice([torch.bool, torch.uint8]),
        "dtype": r.choice(FLOATS),
        "scale": r.choice([-2.0, -1.0, 0.0, 0.125, 1.0, 1.001, 3.0]),
        "causal": r.random() < 0.5,
    }


def allowed(call: dict[str, Any]) -> bool:
    """Return whether the vendor documents the call, viewed with 4 dimensions. Written without the backend's limits."""
    *lead, sq, sk = call["shape"]
    if sq not in range(32, 4097, 32) or sk not in range(32, 4097, 32) or call["dtype"] == torch.float64:
        return False
    if call["dtype"] == torch.float16 and not -1 <= call["scale"] <= 1:
        return False
    if call["mask"] is None or len(lead) <= 2:
        return True
    given = ((1,) * 6 + call["mask"])[-len(call["shape"]) : -2]
    kinds = [mine == size for mine, size in zip(given, lead) if size > 1]  # a size of 1 is either kind
    return sum(a != b for a, b in itertools.pairwise(kinds)) <= 1


@pytest.fixture(scope="module")
def torch_npu() -> Iterator[ModuleType]:
    with ascend() as module:
        yield module


def test_the_vendor_serves_what_its_documents_allow_and_nothing_else(torch_npu: ModuleType) -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=CALLS)
    @given(st.integers(0, 2**48))
    def check_calls(seed: int) -> None:
        check_call(seed, torch_npu, counts)

    check_calls()
    assert counts["selected"] >= CALLS
    assert counts["served"] >= CALLS // 10
    assert counts["refused"] >= CALLS // 10


def check_call(seed: int, torch_npu: ModuleType, counts: Counter[str]) -> None:
    """Check one random call, and count it."""
    call = call_of(seed)
    legal = allowed(call)
    shape, dtype, scale, causal = call["shape"], call["dtype"], call["scale"], call["causal"]
    x = TensorSpec(shape, dtype, "npu")
    mask = None if call["mask"] is None else TensorSpec(call["mask"], call["mask_dtype"], "npu")
    decision = fusedops.explain(OP.name, x, mask, scale, causal=causal)
    assert decision.backend == decision.backward == ("npu" if legal else "eager")
    counts["selected"] += 1
    if math.prod(shape) > RUN:
        return
    generator = torch.Generator().manual_seed(seed)
    values, masked = torch.randn(shape, generator=generator).to(dtype), None
    if mask is not None:
        masked = (torch.rand(mask.shape, generator=generator) < 0.4).to(mask.dtype)
    torch_npu.calls.clear()
    with fusedops.use(fallback="silent"):
        assert_right(OP.name, values, masked, scale, causal=causal, device="npu")
    # the stand-in raises on any call outside the documents
    both = ["npu_scaled_masked_softmax", "npu_scaled_masked_softmax_backward"]
    assert [made.name for made in torch_npu.calls] == (both if legal else [])
    counts["served" if legal else "refused"] += 1
