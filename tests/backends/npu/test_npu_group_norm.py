"""group_norm with SiLU on the stand-in device: what the vendor gets, what backward reads, and what is refused."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import candidate
from right import assert_right

import fusedops
from fusedops import TensorSpec

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("shape", "dtypes", "passed"),
    [  # of x, weight and bias
        ((2, 6, 5), (BF16, BF16, BF16), (BF16, BF16)),
        ((2, 6, 4, 3), (F16, F32, F32), (F32, F32)),
        ((1, 6, 2, 2, 2), (BF16, BF16, F32), (F32, F32)),
        ((2, 6, 5), (BF16, F16, F16), (F32, F32)),
        ((2, 6, 5), (F32, BF16, BF16), (F32, F32)),
        ((2, 6, 5), (F32, None, F32), (F32,)),
        ((2, 6, 5), (F16, None, None), ()),
    ],
    ids=str,
)
def test_weight_and_bias_are_as_the_vendor_takes_them(
    torch_npu: ModuleType, shape: tuple[int, ...], dtypes: tuple[Any, ...], passed: tuple[Any, ...]
) -> None:
    dtype, *affine = dtypes
    weight, bias = (None if each is None else torch.randn(6).to(each) for each in affine)
    call: dict[str, Any] = {"x": torch.randn(shape).to(dtype), "groups": 3, "weight": weight, "bias": bias}
    with fusedops.use("npu,eager", fallback="silent"):  # backward is in torch
        assert_right("group_norm", **call, activation="silu", device="npu")
    assert {made.name for made in torch_npu.calls} == {"npu_group_norm_silu"}
    assert {tuple(made.dtypes) for made in torch_npu.calls} == {(dtype, *passed)}


@pytest.mark.usefixtures("torch_npu")
def test_without_silu_and_without_eps_it_is_refused() -> None:
    for options, reason in ((("none", 1e-5), "activation"), (("silu", 0.0), "eps")):
        x, activation, eps = TensorSpec((2, 6, 5), BF16, "npu"), *options
        refused = candidate("group_norm", x, 3, None, None, eps, activation=activation)
        assert reason in str(refused.reasons[0])
