"""The npu backend on the stand-in device: taken within the documented limits, never called outside them."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import ascend, probe_again
from hypothesis import given, settings
from hypothesis import strategies as st
from standin import absent, broken, no_device, npu_device

import fusedops
import fusedops_npu
from fusedops import FallbackWarning, TensorSpec, _health, testing

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
    pytest.param((2, 64, 64), torch.float32, "x has 3 dimensions; needs 4", "view x with 4 dimensions", id="rank 3"),
    pytest.param((1, 2, 2, 64, 64), torch.float32, "x has 5 dimensions; needs 4", "merge leading", id="rank 5"),
    pytest.param((2, 2, 64, 64), torch.float64, "x is float64; needs float16", "convert x to", id="float64"),
]


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


def test_one_mask_is_inspected_once_however_many_layers_use_it(torch_npu: ModuleType) -> None:
    mask = (torch.rand(2, 1, 1, 64) < 0.3).to("npu")
    x = torch.randn(2, 4, 64, 64).to("npu")
    npu_device.reset()
    fusedops.scaled_masked_softmax(x, mask)
    looks = npu_device.calls["_local_scalar_dense"]
    assert looks == 1
    for _ in range(23):
        fusedops.scaled_masked_softmax(x, mask)
    assert npu_device.calls["_local_scalar_dense"] == looks
    assert len(torch_npu.calls) == 24


def test_an_in_place_change_of_a_mask_is_noticed(torch_npu: ModuleType) -> None:
    mask = torch.zeros(1, 1, 32, 32, dtype=torch.bool).to("npu")
    x = torch.randn(1, 1, 32, 32).to("npu")
    check(fusedops.scaled_masked_softmax(x, mask), x, mask)
    mask[..., :3, :] = True
    y = fusedops.scaled_masked_softmax(x, mask)
    check(y, x, mask)
    assert (y.cpu()[..., :3, :] == 0).all()


@settings(max_examples=150, deadline=None)
@given(
    rank=st.integers(2, 5),
    sq=st.sampled_from([1, 31, 32, 33, 64, 95, 96]),
    sk=st.sampled_from([1, 31, 32, 48, 64, 96, 100, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    scale=st.sampled_from([-2.0, -1.0, 0.125, 1.0, 3.0]),
    causal=st.booleans(),
    masked=st.booleans(),
)
def test_the_vendor_serves_what_its_limits_allow_and_nothing_else(
    rank: int, sq: int, sk: int, dtype: torch.dtype, scale: float, causal: bool, masked: bool
) -> None:
    shape = (*(1, 2, 1)[: rank - 2], sq, sk)
    legal = (
        rank == 4
        and all(32 <= n <= 4096 and n % 32 == 0 for n in (sq, sk))
        and dtype != torch.float64
        and (dtype != torch.float16 or abs(scale) <= 1)
    )
    x = torch.randn(shape).to(dtype)
    mask = torch.rand(sq, sk) < 0.3 if masked else None
    with ascend() as torch_npu, warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        y = fusedops.scaled_masked_softmax(x.to("npu"), None if mask is None else mask.to("npu"), scale, causal=causal)
        assert len(torch_npu.calls) == int(legal)
    check(y, x, mask, scale, causal)


def test_a_compiled_call_is_served_by_the_vendor_too(torch_npu: ModuleType) -> None:
    x = torch.randn(1, 2, 32, 64).to("npu")
    compiled = torch.compile(
        lambda t: fusedops.scaled_masked_softmax(t, None, 0.5, causal=True) * 2, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x).cpu() / 2, want(x, None, 0.5, True).float())
    assert [call.name for call in torch_npu.calls] == ["npu_scaled_masked_softmax"]


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


def test_no_device_is_told_apart(torch_npu: ModuleType) -> None:
    with no_device():
        probe_again()
        info = next(info for info in fusedops.backends() if info.name == "npu")
    assert info.state == "unavailable"
    assert "it finds no device" in info.why
    assert "npu-smi info" in info.fix
