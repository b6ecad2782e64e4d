"""The npu softmax kernel on the stand-in device: called within the documented limits, never called outside them."""

from __future__ import annotations

import gc
import math
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from right import assert_right
from softmax_calls import OP
from standin import npu_device

import fusedops
from fusedops import FallbackWarning, TensorSpec, tensor_cache, testing

LIMIT = "expected a multiple of 32 in [32, 4096]"


def want(x: torch.Tensor, mask: torch.Tensor | None, scale: float = 1.0, causal: bool = False) -> torch.Tensor:
    wide_mask = None if mask is None else mask.cpu()
    return OP.reference(x.cpu().double(), wide_mask, scale, causal).to(torch.float64)


def check(
    y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None, scale: float = 1.0, causal: bool = False
) -> None:
    testing.assert_within(y, want(x, mask, scale, causal), OP.evidence.tolerance[x.dtype], "npu")


@pytest.mark.parametrize(
    "case", [c for c in OP.evidence.cases if c.name.startswith("ascend")], ids=lambda case: case.name
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_typical_cases_of_the_vendor_are_taken(torch_npu: ModuleType, case: Any, dtype: torch.dtype) -> None:
    spec = TensorSpec(case.args["x"], dtype, "npu:0")
    decision = fusedops.explain(OP.name, spec, TensorSpec(case.args["mask"], torch.bool, "npu:0"))
    assert (decision.backend, decision.backward) == ("npu", "npu")
    assert decision.assumed == ""


# each just outside one constraint: the argument that breaks it, the words of the refusal, the fix
OUTSIDE = [
    pytest.param((2, 2, 64, 31), torch.float32, f"dim -1 of x = 31, {LIMIT}", "from 31 to 32", id="31"),
    pytest.param((2, 2, 33, 64), torch.float32, f"dim -2 of x = 33, {LIMIT}", "from 33 to 64", id="33"),
    pytest.param((2, 2, 32, 48), torch.float32, f"dim -1 of x = 48, {LIMIT}", "from 48 to 64", id="48"),
    pytest.param((1, 1, 32, 4128), torch.float32, f"dim -1 of x = 4128, {LIMIT}", "at most 4096", id="4128"),
    pytest.param((1, 1, 4128, 32), torch.float32, f"dim -2 of x = 4128, {LIMIT}", "at most 4096", id="4128 rows"),
    pytest.param((2, 2, 64, 64), torch.float64, "x of float64, expected float16", "convert x to", id="float64"),
]

PADS = {"31", "33", "48"}  # where padding would do


@pytest.mark.parametrize(("shape", "dtype", "reason", "fix"), OUTSIDE)
def test_just_outside_a_constraint_falls_back_with_the_same_numbers(
    torch_npu: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, reason: str, fix: str
) -> None:
    x = torch.randn(shape, dtype=dtype)
    mask = torch.rand((*shape[:-3], 1, *shape[-2:])) < 0.3
    on_device, device_mask = x.to("npu").requires_grad_(), mask.to("npu")
    with pytest.warns(FallbackWarning) as seen:
        y = fusedops.scaled_masked_softmax(on_device, device_mask, 0.5)
    text = str(seen[0].message)
    assert reason in text
    assert fix in text
    assert ('or allow adapt="pad"' in text) == any(fix.startswith(f"from {size} ") for size in PADS)
    assert "runs on eager, not on npu" in text
    check(y, x, mask, 0.5)
    y.sum().backward()
    assert on_device.grad is not None
    assert not torch_npu.calls
    with (
        fusedops.use(fallback="raise"),
        pytest.raises(fusedops.NoBackendError) as raised,
    ):
        fusedops.scaled_masked_softmax(on_device, device_mask, 0.5)
    assert reason in str(raised.value)
    assert fix in str(raised.value)
    assert not torch_npu.calls


def test_float16_is_taken_only_with_a_scale_that_cannot_overflow(torch_npu: ModuleType) -> None:
    x = torch.full((1, 1, 32, 32), 60000.0, dtype=torch.float16).to("npu")
    with pytest.warns(FallbackWarning, match=r"got scale = 1.5, expected a value in \[-1, 1\]"):
        y = fusedops.scaled_masked_softmax(x, None, 1.5)
    check(y, x, None, 1.5)
    assert not torch_npu.calls
    check(fusedops.scaled_masked_softmax(x, None, 1.0), x, None)
    assert len(torch_npu.calls) == 1


def test_the_declared_deviation_is_real_and_shown(torch_npu: ModuleType) -> None:
    x = torch.zeros(1, 1, 32, 32)
    x[..., 3] = float("inf")
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    mask[..., 3] = True
    y = fusedops.scaled_masked_softmax(x.to("npu"), mask.to("npu"))
    assert y.cpu().isnan().all()
    assert "deviation: nonfinite-under-mask" in str(fusedops.explain(OP.name, x.to("npu"), mask.to("npu")))


def test_the_declared_fill_is_real(torch_npu: ModuleType) -> None:
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.bool)
    mask[..., 3] = True
    for score, share in ((-9800.0, 0.0), (-20000.0, 1.0)):
        y = fusedops.scaled_masked_softmax(torch.full((1, 1, 32, 32), score).to("npu"), mask.to("npu"))
        assert (y.cpu()[..., 3] == share).all()
    assert "deviation: finite-fill" in str(fusedops.explain(OP.name, y, mask.to("npu")))


def test_an_in_place_change_of_a_mask_is_noticed(torch_npu: ModuleType) -> None:
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.bool).to("npu")
    x = torch.randn(1, 1, 32, 32).to("npu")
    check(fusedops.scaled_masked_softmax(x, mask), x, mask)
    mask[..., :3, :] = True
    y = fusedops.scaled_masked_softmax(x, mask)
    check(y, x, mask)
    assert (y.cpu()[..., :3, :] == 0).all()


RANKS: list[Any] = [
    # shapes of x and of a mask that its leading dimensions fold with
    pytest.param((64, 32), (64, 32), id="2-D"),
    pytest.param((64, 32), (32,), id="2-D, a row"),
    pytest.param((3, 64, 32), (3, 1, 32), id="3-D"),
    pytest.param((3, 64, 32), (), id="3-D, a number"),
    pytest.param((2, 3, 2, 32, 64), (2, 1, 1, 32, 64), id="5-D, grouped queries"),
    pytest.param((2, 3, 2, 32, 64), (3, 2, 1, 64), id="5-D, a mask for all batches"),
    pytest.param((2, 3, 2, 32, 64), (2, 3, 1, 1, 64), id="5-D, a mask for both groups"),
    pytest.param((2, 1, 2, 1, 32, 64), (2, 1, 2, 1, 1, 64), id="6-D"),
    pytest.param((2, 3, 2, 32, 64), None, id="5-D, none"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shape", "given"), RANKS)
def test_other_ranks_are_viewed_with_4_dimensions(
    torch_npu: ModuleType, shape: tuple[int, ...], given: tuple[int, ...] | None, causal: bool
) -> None:
    x, mask = torch.randn(shape), None if given is None else torch.rand(given) < 0.3
    with fusedops.use("npu", fallback="raise"):
        (y,) = assert_right(OP.name, x, mask, 0.5, causal=causal, device="npu")
        decision = fusedops.explain(OP.name, y, None if mask is None else mask.to("npu"), 0.5, causal=causal)
    assert [len(call.shapes[0]) for call in torch_npu.calls] == [4, 4]
    views = [(a.name, a.direction, a.bytes) for v in decision.candidates for a in v.adaptations if a.name == "4-d"]
    assert views == [("4-d", "forward", 0), ("4-d", "backward", 0)]
    assert "adapts: 4-d: viewed with 4 dimensions: free" in str(decision)


def test_a_mask_that_skips_between_leading_dimensions_is_refused(torch_npu: ModuleType) -> None:
    x, mask = torch.randn(2, 3, 2, 32, 32), torch.rand(2, 1, 2, 32, 32) < 0.3
    with pytest.warns(FallbackWarning, match=r"to fix: expand mask to \(2, 3, 2, 32, 32\)"):
        y = fusedops.scaled_masked_softmax(x.to("npu"), mask.to("npu"))
    check(y, x, mask)
    assert not torch_npu.calls
    whole = mask.expand(x.shape)
    check(fusedops.scaled_masked_softmax(x.to("npu"), whole.to("npu"), backend="npu"), x, whole)
    assert len(torch_npu.calls) == 1


X = TensorSpec((2, 3, 64, 96), torch.bfloat16, "npu")

PLANE = 64 * 96  # bytes of a bool (Sq, Sk)

NEEDED: list[Any] = [
    # a mask, its dtype, causal; the adaptations of forward with the bytes that they write
    pytest.param((2, 1, 64, 96), torch.bool, False, {}, id="as the vendor takes it"),
    pytest.param((64, 96), torch.bool, False, {}, id="2-D"),
    pytest.param((2, 1, 1, 96), torch.bool, False, {"mask": 2 * PLANE}, id="padding"),
    pytest.param((2, 3, 64, 1), torch.bool, False, {"mask": 6 * PLANE}, id="rows"),
    pytest.param((96,), torch.bool, False, {"mask": PLANE}, id="1-D"),
    pytest.param((64, 96), torch.uint8, False, {"mask": PLANE}, id="uint8"),
    pytest.param((2, 1, 64, 96), torch.bool, True, {"mask": 2 * PLANE, "causal-mask": PLANE}, id="causal too"),
    pytest.param(None, torch.bool, False, {"no-mask": PLANE}, id="none"),
    pytest.param(None, torch.bool, True, {"causal-mask": PLANE}, id="causal alone"),
]


@pytest.mark.parametrize(("given", "dtype", "causal", "needed"), NEEDED)
@tensor_cache.reuse()
def test_explain_states_what_a_call_needs_and_its_bytes(
    torch_npu: ModuleType, given: tuple[int, ...] | None, dtype: torch.dtype, causal: bool, needed: dict[str, int]
) -> None:
    mask = None if given is None else TensorSpec(given, dtype, "npu")
    decision = fusedops.explain(OP.name, X, mask, causal=causal)
    (verdict,) = [v for v in decision.candidates if v.backend == "npu"]
    found = [(a.name, a.direction, a.bytes) for a in verdict.adaptations]
    assert found == [*((name, "forward", size) for name, size in needed.items()), ("no-mask", "backward", PLANE)]
    # and that is what is there after the first call: x, the result, and what is kept for the next
    x = torch.zeros(X.shape, dtype=X.dtype, device="npu")
    real = None if given is None else torch.zeros(given, dtype=dtype, device="npu")
    sys.modules["fusedops_npu.softmax.scaled_masked_softmax"]._no_mask.cache_clear()
    sys.modules["fusedops_npu.softmax.scaled_masked_softmax"]._causal_mask.cache_clear()
    gc.collect()
    before = npu_device.memory_allocated()
    y = fusedops.scaled_masked_softmax(x, real, causal=causal)
    rows = 0 if given is None else math.prod(given[:-2]) * 64  # bytes that tell which rows are fully masked
    assert npu_device.memory_allocated() - before == y.nbytes + sum(needed.values()) + rows


@tensor_cache.reuse()
def test_a_mask_is_freed_with_its_cached_values(torch_npu: ModuleType) -> None:
    x = torch.randn(2, 3, 64, 96).to("npu")
    fusedops.scaled_masked_softmax(x)
    for shape in ((2, 1, 64, 96), (2, 1, 1, 96), (64, 96)):
        gc.collect()
        before = npu_device.live_storages()
        for _ in range(3):
            mask = (torch.rand(shape) < 0.3).to("npu")
            fusedops.scaled_masked_softmax(x, mask)
            fusedops.scaled_masked_softmax(x, mask[:])
        del mask
        gc.collect()
        assert npu_device.live_storages() == before, shape
