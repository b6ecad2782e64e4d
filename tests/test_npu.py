"""The npu backend on the stand-in device: taken within the documented limits, never called outside them."""

from __future__ import annotations

import gc
import math
import shutil
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import ascend, probe_again
from standin import absent, broken, no_device, npu_device

import fusedops
import fusedops_npu
from fusedops import FallbackWarning, TensorSpec, _health, testing
from fusedops.__main__ import main

OP = testing.OPS["scaled_masked_softmax"]
LIMIT = "needs a multiple of 32 in [32, 4096]"


@pytest.fixture
def torch_npu() -> Iterator[ModuleType]:
    with ascend() as module:
        yield module


def want(x: torch.Tensor, mask: torch.Tensor | None, scale: float = 1.0, causal: bool = False) -> torch.Tensor:
    wide_mask = None if mask is None else mask.cpu()
    return OP.call_reference((x.cpu().double(), wide_mask, scale, causal)).to(torch.float64)


def check(
    y: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None, scale: float = 1.0, causal: bool = False
) -> None:
    testing.assert_within(y, want(x, mask, scale, causal), OP.tolerance[x.dtype], "npu")


@pytest.mark.parametrize("case", [c for c in OP.cases if c.name.startswith("ascend")], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_typical_cases_of_the_vendor_are_taken(torch_npu: ModuleType, case: Any, dtype: torch.dtype) -> None:
    spec = TensorSpec(case.args["x"], dtype, "npu:0")
    decision = fusedops.explain(OP.name, spec, TensorSpec(case.args["mask"], torch.bool, "npu:0"))
    assert (decision.backend, decision.backward) == ("npu", "npu")
    assert decision.assumed == ""


# each just outside one limit: the argument that breaks it, the words of the refusal, the fix
OUTSIDE = [
    pytest.param((2, 2, 64, 31), torch.float32, f"dim -1 of x is 31; {LIMIT}", "from 31 to 32", id="31"),
    pytest.param((2, 2, 33, 64), torch.float32, f"dim -2 of x is 33; {LIMIT}", "from 33 to 64", id="33"),
    pytest.param((2, 2, 32, 48), torch.float32, f"dim -1 of x is 48; {LIMIT}", "from 48 to 64", id="48"),
    pytest.param((1, 1, 32, 4128), torch.float32, f"dim -1 of x is 4128; {LIMIT}", "at most 4096", id="4128"),
    pytest.param((1, 1, 4128, 32), torch.float32, f"dim -2 of x is 4128; {LIMIT}", "at most 4096", id="4128 rows"),
    pytest.param((2, 2, 64, 64), torch.float64, "x is float64; needs float16", "convert x to", id="float64"),
]
PADS = {"31", "33", "48"}  # where padding would do


@pytest.mark.parametrize(("shape", "dtype", "says", "fix"), OUTSIDE)
def test_just_outside_a_limit_falls_back_with_the_same_numbers(
    torch_npu: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, says: str, fix: str
) -> None:
    x = torch.randn(shape, dtype=dtype)
    mask = torch.rand((*shape[:-3], 1, *shape[-2:])) < 0.3
    on_device, device_mask = x.to("npu").requires_grad_(), mask.to("npu")
    with pytest.warns(FallbackWarning) as seen:
        y = fusedops.scaled_masked_softmax(on_device, device_mask, 0.5)
    text = str(seen[0].message)
    assert says in text
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
    assert says in str(raised.value)
    assert fix in str(raised.value)
    assert not torch_npu.calls


def test_float16_is_taken_only_with_a_scale_that_cannot_overflow(torch_npu: ModuleType) -> None:
    x = torch.full((1, 1, 32, 32), 60000.0, dtype=torch.float16).to("npu")
    with pytest.warns(FallbackWarning, match=r"scale is 1.5; needs a value in \[-1, 1\]"):
        y = fusedops.scaled_masked_softmax(x, None, 1.5)
    check(y, x, None, 1.5)
    assert not torch_npu.calls
    check(fusedops.scaled_masked_softmax(x, None, 1.0), x, None)
    assert len(torch_npu.calls) == 1


MASKS = {
    "none": None,
    "one for all heads": (2, 1, 64, 96),
    "one for all": (1, 1, 64, 96),
    "per head": (2, 3, 64, 96),
    "padding": (2, 1, 1, 96),
    "2-D": (64, 96),
    "1-D": (96,),
    "rows": (2, 1, 64, 1),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS.keys())
def test_the_contract_holds_on_the_device(
    torch_npu: ModuleType, shape: tuple[int, ...] | None, kind: torch.dtype, causal: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 3, 64, 96), generator=generator).to(dtype)
    mask = None if shape is None else (torch.rand(shape, generator=generator) < 0.4).to(kind)
    if mask is not None and mask.dim() >= 2 and mask.shape[-2] > 1:
        mask[..., 5, :] = 1  # a fully masked row, which the vendor's kernel would make uniform
    args = (x.to("npu"), None if mask is None else mask.to("npu"), 0.125, causal)
    with fusedops.use("npu", fallback="raise"):
        answer = testing.expected(OP, (x, mask, 0.125, causal))
        leaf = args[0].requires_grad_()
        y = fusedops.scaled_masked_softmax(leaf, args[1], 0.125, causal=causal)
        y.backward(answer.grad.to(dtype).to("npu"))
    testing.assert_within(y, answer.y, OP.tolerance[dtype], "y")
    assert leaf.grad is not None
    testing.assert_within(leaf.grad, answer.gradients["x"], OP.gradient_tolerance[dtype], "dx")
    dead = (answer.y == 0).all(-1)
    assert (y.cpu()[dead] == 0).all()
    assert (leaf.grad.cpu()[dead] == 0).all()
    assert [call.name for call in torch_npu.calls] == [
        "npu_scaled_masked_softmax",
        "npu_scaled_masked_softmax_backward",
    ]


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
    pytest.param((2, 1, 2, 1, 32, 64), (2, 1, 2, 1, 1, 64), id="6-D"),
    pytest.param((2, 3, 2, 32, 64), None, id="5-D, none"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shape", "given"), RANKS)
def test_other_ranks_are_viewed_with_4_dimensions(
    torch_npu: ModuleType, shape: tuple[int, ...], given: tuple[int, ...] | None, causal: bool
) -> None:
    x, mask = torch.randn(shape), None if given is None else torch.rand(given) < 0.3
    leaf = x.to("npu").requires_grad_()
    on_device = None if mask is None else mask.to("npu")
    want_y = testing.expected(OP, (x, mask, 0.5, causal))
    with fusedops.use("npu", fallback="raise"):
        y = fusedops.scaled_masked_softmax(leaf, on_device, 0.5, causal=causal)
        y.backward(want_y.grad.float().to("npu"))
        decision = fusedops.explain(OP.name, leaf, on_device, 0.5, causal=causal)
    assert leaf.grad is not None
    assert y.shape == leaf.grad.shape == shape
    testing.assert_within(y, want_y.y, OP.tolerance[torch.float32], "y")
    testing.assert_within(leaf.grad, want_y.gradients["x"], OP.gradient_tolerance[torch.float32], "dx")
    assert [len(call.shapes[0]) for call in torch_npu.calls] == [4, 4]
    views = [(a.name, a.direction, a.bytes) for v in decision.candidates for a in v.adaptations if a.name == "4-d"]
    assert views == [("4-d", "forward", 0), ("4-d", "backward", 0)]
    assert "adapts: 4-d: viewed with 4 dimensions: free" in str(decision)


def test_a_mask_that_skips_between_leading_dimensions_is_refused(torch_npu: ModuleType) -> None:
    x, mask = torch.randn(2, 3, 2, 32, 32), torch.rand(2, 1, 2, 32, 32) < 0.3
    with pytest.warns(FallbackWarning, match=r"To qualify for npu: expand mask to \(2, 3, 2, 32, 32\)"):
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
    sys.modules["fusedops_npu.scaled_masked_softmax"]._no_mask.cache_clear()
    sys.modules["fusedops_npu.scaled_masked_softmax"]._causal_mask.cache_clear()
    gc.collect()
    before = npu_device.memory_allocated()
    y = fusedops.scaled_masked_softmax(x, real, causal=causal)
    rows = 0 if given is None else math.prod(given[:-2]) * 64  # bytes that tell which rows are fully masked
    assert npu_device.memory_allocated() - before == y.nbytes + sum(needed.values()) + rows


def test_a_mask_is_freed_with_what_was_learnt_of_it(torch_npu: ModuleType) -> None:
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


# ---------------------------------------------------------------------------------------------------------- adapt="pad"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("given", [None, (2, 1, 50, 100), (2, 1, 1, 100), (50, 100), (50, 1)], ids=str)
def test_a_length_of_100_is_padded_with_the_numbers_of_eager(
    torch_npu: ModuleType, given: tuple[int, ...] | None, dtype: torch.dtype, causal: bool
) -> None:
    x = torch.randn(2, 3, 50, 100).to(dtype)
    mask = None if given is None else torch.rand(given) < 0.4
    if mask is not None and mask.shape[-2] > 1:
        mask[..., 3, :] = True  # a fully masked row
    args = (x.to("npu").requires_grad_(), None if mask is None else mask.to("npu"), 0.125)
    want_y = testing.expected(OP, (x, mask, 0.125, causal))
    with fusedops.use("npu", fallback="raise", adapt="pad"):
        y = fusedops.scaled_masked_softmax(*args, causal=causal)
        y.backward(want_y.grad.to(dtype).to("npu"))
    testing.assert_within(y, want_y.y, OP.tolerance[dtype], "y")
    assert args[0].grad is not None
    testing.assert_within(args[0].grad, want_y.gradients["x"], OP.gradient_tolerance[dtype], "dx")
    assert [call.shapes[0] for call in torch_npu.calls] == [(2, 3, 64, 128)] * 2
    eager = x.clone().requires_grad_()
    theirs = fusedops.scaled_masked_softmax(eager, mask, 0.125, causal=causal)
    theirs.backward(want_y.grad.to(dtype))
    testing.assert_within(y, theirs.detach(), OP.tolerance[dtype], "y of eager")
    assert eager.grad is not None
    testing.assert_within(args[0].grad, eager.grad, OP.gradient_tolerance[dtype], "dx of eager")


def test_explain_states_the_bytes_of_padding(torch_npu: ModuleType) -> None:
    x, mask = TensorSpec((2, 3, 64, 100), torch.float16, "npu"), TensorSpec((2, 1, 1, 100), torch.bool, "npu")
    with fusedops.use(adapt="pad"):
        decision = fusedops.explain(OP.name, x, mask)
    (npu,) = [v for v in decision.candidates if v.backend == "npu"]
    tensor = 2 * 3 * 64 * 128 * 2
    assert (decision.backend, decision.backward) == ("npu", "npu")
    assert [(a.name, a.direction, a.bytes) for a in npu.adaptations] == [
        ("pad", "forward", 2 * tensor + 2 * 128),
        ("mask", "forward", 2 * 64 * 128),
        ("pad", "backward", 3 * tensor),
        ("no-mask", "backward", 64 * 128),
    ]
    assert f"and the result cropped: {2 * tensor + 256:,} bytes" in str(decision)


def test_a_padded_mask_too_is_inspected_once(torch_npu: ModuleType) -> None:
    mask = (torch.rand(2, 1, 1, 100) < 0.3).to("npu")
    x = torch.randn(2, 3, 64, 100).to("npu")
    npu_device.reset()
    with fusedops.use("npu", fallback="raise", adapt="pad"):
        for _ in range(24):
            fusedops.scaled_masked_softmax(x, mask[:])
    assert npu_device.synchronisations() == 1
    counted = npu_device.kernels()
    assert counted["npu_scaled_masked_softmax"] == 24
    assert counted["all"] == counted["any"] == 1


# -------------------------------------------------------------------------------------------------------- the other ops


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [None, (96,), (5, 1)], ids=str)
def test_bias_gelu_is_the_vendors_in_both_forms(
    torch_npu: ModuleType, approximate: str, dtype: torch.dtype, bias: tuple[int, ...] | None
) -> None:
    op = testing.OPS["bias_gelu"]
    x, added = torch.randn(4, 5, 96).to(dtype), None if bias is None else torch.randn(bias).to(dtype)
    want_y = testing.expected(op, (x, added, approximate))
    leaves = [None if t is None else t.to("npu").requires_grad_() for t in (x, added)]
    with fusedops.use("npu", fallback="raise"):
        y = fusedops.bias_gelu(*leaves, approximate=approximate)
        y.backward(want_y.grad.to(dtype).to("npu"))
    testing.assert_within(y, want_y.y, op.tolerance[dtype], "y")
    for name, leaf in zip(("x", "bias"), leaves):
        if leaf is not None:
            testing.assert_within(leaf.grad, want_y.gradients[name], op.gradient_tolerance[dtype], name)
    told = [(call.name, call.options) for call in torch_npu.calls]
    assert told == [("npu_gelu", {"approximate": approximate}), ("npu_gelu_backward", {"approximate": approximate})]


def test_the_sum_of_bias_gelu_is_stated(torch_npu: ModuleType) -> None:
    def bytes_of(x: torch.dtype, bias: torch.dtype | None) -> list[tuple[str, int]]:
        spec = None if bias is None else TensorSpec((96,), bias, "npu")
        decision = fusedops.explain("bias_gelu", TensorSpec((4, 96), x, "npu"), spec)
        return [(a.direction, a.bytes // (4 * 4 * 96)) for v in decision.candidates for a in v.adaptations]

    assert bytes_of(torch.bfloat16, None) == []
    assert bytes_of(torch.float32, torch.float32) == [("forward", 1), ("backward", 1)]
    assert bytes_of(torch.bfloat16, torch.bfloat16) == [("forward", 3), ("backward", 3)]
    assert bytes_of(torch.bfloat16, torch.float32) == [("forward", 2), ("backward", 2)]


@pytest.mark.parametrize("name", ["bias_dropout", "bias_dropout_add"])
def test_what_the_vendor_lacks_runs_eager_on_the_device(
    torch_npu: ModuleType, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    op = testing.OPS[name]
    args = list(testing.arguments(op, testing.shrunk(op.cases[0], 2**12), torch.float32, "npu"))
    want_y = testing.expected(op, args)
    for parameter in want_y.gradients:
        args[op.parameters.index(parameter)].requires_grad_()
    y = op.positional(getattr(fusedops, name))(*args)  # no warning: nobody named npu for it
    y.backward(want_y.grad.float().to("npu"))
    assert y.device.type == "npu"
    testing.assert_within(y, want_y.y, op.tolerance[torch.float32], "y")
    for parameter, gradient in want_y.gradients.items():
        got = args[op.parameters.index(parameter)].grad
        testing.assert_within(got, gradient, op.gradient_tolerance[torch.float32], parameter)
    assert not torch_npu.calls
    decision = fusedops.explain(name, *args[:2], *args[2:3] if name == "bias_dropout_add" else ())
    assert (decision.backend, decision.backward) == ("eager", "eager")
    assert main(["matrix"]) == 0
    told = capsys.readouterr().out.partition(f"{name}:")[2]
    assert "npu      none     no kernel: another backend serves on npu" in told.partition("\nbias")[0]


HERE = torch.__version__.partition("+")[0]
NO_CANN = "libhccl.so: cannot open shared object file: No such file or directory"
STATES = [
    # what import raises, torch_npu's version, CUDA's version, and of the answer: why, the cure
    pytest.param(None, "", None, "torch_npu is not installed", "pip install", id="absent"),
    pytest.param(
        ImportError(NO_CANN), f"{HERE}.post2", None, "CANN's libhccl.so is not found", "install CANN", id="no CANN"
    ),
    pytest.param(
        RuntimeError("undefined symbol"), HERE, "12.8", "beside a CUDA build of torch", "CPU build of torch", id="CUDA"
    ),
    pytest.param(
        ImportError(NO_CANN), "2.1.0.post17", None, f"2.1.0.post17 is for torch 2.1.0, and this is torch {HERE}",
        "install torch 2.1.0, or the torch_npu for torch", id="another torch",
    ),
    pytest.param(
        RuntimeError("out of luck"), HERE, None, "import torch_npu raised RuntimeError: out of luck", "set_env.sh",
        id="unknown",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("raised", "version", "cuda", "why", "fix"), STATES)
def test_a_broken_installation_is_told_apart(
    raised: Exception | None,
    version: str,
    cuda: str | None,
    why: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fusedops_npu, "_version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "npu-smi" else None)
    with absent() if raised is None else broken(raised):
        probe_again()
        info = next(info for info in fusedops.backends() if info.name == "npu")
        (problem,) = [problem for problem in _health.problems() if "npu" in problem.what]
    probe_again()
    assert info.state == "unavailable"
    assert why in info.why
    assert fix in info.fix
    assert info.why in problem.what
    assert problem.fix == info.fix
    others = [case.values[3] for case in STATES if case.values[3] != why]
    assert not any(other in info.why for other in others)


def test_no_device_is_told_apart(
    torch_npu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "npu-smi" else None)
    with no_device():
        probe_again()
        info = next(info for info in fusedops.backends() if info.name == "npu")
        assert main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert info.state == "unavailable"
    assert "it finds no device" in info.why
    assert "npu-smi info" in info.fix
    assert info.why in said
    assert info.fix in said
