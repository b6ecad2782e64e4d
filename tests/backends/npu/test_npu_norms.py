"""The npu kernels of RMSNorm on the stand-in device: what the vendor gets, and what it does not take."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import candidate
from pairwise import pairwise
from right import assert_right

import fusedops
from fusedops import TensorSpec, testing

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("name", "shape", "dtypes"),
    pairwise(
        ["rms_norm", "add_rms_norm"],
        [(5,), (3, 40), (2, 3, 4, 40), (1,) * 8 + (3, 16)],
        # x, weight, offset, what the vendor gets
        [
            (BF16, BF16, 0.0, BF16),
            (BF16, BF16, 1.0, F32),
            (F16, F32, 0.0, F32),
            (F32, BF16, 0.0, F32),
            (F16, None, 0.0, F32),
        ],
    ),
    ids=str,
)
def test_any_rank_weight_and_offset_is_the_vendors(
    torch_npu: ModuleType, name: str, shape: tuple[int, ...], dtypes: tuple[Any, ...]
) -> None:
    dtype, weight, offset, gamma = dtypes
    call: dict[str, Any] = {"x": torch.randn(shape).to(dtype), "eps": 1e-5, "offset": offset}
    if name == "add_rms_norm":
        call["residual"] = torch.randn(shape).to(dtype)
    if weight is not None:
        call["weight"] = torch.randn(shape[-1]).to(weight)
    with fusedops.use("npu", fallback="raise"):
        assert_right(name, **call, device="npu")
    forward, backward = torch_npu.calls
    assert (forward.name, forward.options) == ("npu_rms_norm", {"epsilon": 1e-5})
    assert backward.name == "npu_rms_norm_backward"
    assert forward.dtypes[1] == gamma
    assert backward.dtypes[2] == (F32 if name == "add_rms_norm" else gamma)


@pytest.mark.usefixtures("torch_npu")
def test_the_gradient_of_a_sum_is_rounded_once() -> None:
    """grad_s is the opposite of the rounded gradient of the rows: what is left is its rounding, not 0."""
    op = testing.OPS["add_rms_norm"]
    x, residual, grad = (torch.randn(4, 96).to(BF16) for _ in range(3))
    s = x + residual
    rstd = s.float().square().mean(-1).add(1e-6).rsqrt()
    rows = op.backward(grad.float(), torch.zeros(4, 96), s.float(), rstd, None, 0.0, F32, (True, True, False))[0]
    leaves = [each.to("npu").requires_grad_() for each in (x, residual)]
    ys = fusedops.add_rms_norm(*leaves, backend="npu")
    got = torch.autograd.grad(ys, leaves, [grad.to("npu"), -rows.to(BF16).to("npu")])[0].cpu().float()
    want = rows - rows.to(BF16).float()
    assert want.abs().max() > 1e-4
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-6)


@pytest.mark.usefixtures("torch_npu")
def test_what_the_vendor_does_not_take_is_refused() -> None:
    refused = candidate("rms_norm", TensorSpec((2, 8), torch.float64, "npu"), TensorSpec((8,), F32, "npu"))
    assert "got x of float64" in str(refused.reasons[0])


def test_the_cost_of_gamma_is_stated(torch_npu: ModuleType) -> None:
    def costs(name: str, weight: Any, offset: float = 0.0) -> list[tuple[str, int]]:
        x = TensorSpec((4, 96), BF16, "npu")
        others = [x] if name == "add_rms_norm" else []
        vector = None if weight is None else TensorSpec((96,), weight, "npu")
        npu = candidate(name, x, *others, vector, offset=offset)
        return [(each.name, each.bytes) for each in npu.adaptations]

    assert costs("rms_norm", BF16) == costs("rms_norm", F32) == []
    for weight, offset in ((None, 0.0), (F16, 0.0), (F32, 1.0), (BF16, 1.0)):
        assert costs("rms_norm", weight, offset) == [("gamma", 4 * 96)] * 2
    assert costs("add_rms_norm", BF16) == [("gamma", 4 * 96), ("sum", 4 * 96 * 16)]
    assert costs("add_rms_norm", None) == [("gamma", 4 * 96), ("gamma", 4 * 96), ("sum", 4 * 96 * 16)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (((8,), F32, (8,), F32), "input must have 2 to 8 dimensions; it has 1"),
        (((2, 8), F32, (4,), F32), "gamma must have the last sizes of input"),
        (((2, 8), F32, (8,), BF16), "input and gamma must be alike, or gamma float32"),
        (((2, 8), torch.float64, (8,), torch.float64), "input and gamma must be alike"),
    ],
)
def test_the_stand_in_is_as_strict_as_the_document(torch_npu: ModuleType, arguments: Any, text: str) -> None:
    shape, dtype, gamma_shape, gamma_dtype = arguments
    x, gamma = torch.ones(shape, dtype=dtype).to("npu"), torch.ones(gamma_shape, dtype=gamma_dtype).to("npu")
    with pytest.raises(RuntimeError, match=f"npu_rms_norm: {text}"):
        torch_npu.npu_rms_norm(x, gamma)
