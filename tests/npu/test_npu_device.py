"""Assumptions of the npu backend about the vendor's kernels; ``make npu`` checks them on the device (no root conftest).

Everywhere else the stand-in answers, smaller: a test here that the stand-in passes and a device does not is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from npu_vendor import DTYPES, REAL, npu_alone
from right import assert_right
from torch import Tensor

import fusedops
from fusedops import testing
from fusedops.testing import Case

if TYPE_CHECKING:
    from fusedops import Op

ELEMENTS = 2**25 if REAL else 2**13
SOFTMAX = testing.OPS["scaled_masked_softmax"]
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}")
    for op in testing.OPS.values()
    for case in op.evidence.cases
    if op.name == "bias_gelu" or case.name.startswith(("ascend", "gpt2", "causal"))
    if op.name in ("scaled_masked_softmax", "bias_gelu")
]


@pytest.fixture(autouse=True)
def torch_npu() -> Iterator[Any]:
    """The vendor's module; every call is served by the npu backend, or fails."""
    with npu_alone() as module:
        yield module


def check(op: Op, args: tuple[Any, ...]) -> None:
    assert_right(op.name, **dict(zip(op.parameters, args)), device="npu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_numbers_against_float64(op: Op, case: Case, dtype: torch.dtype) -> None:
    check(op, testing.arguments(op, testing.shrunk(case, ELEMENTS), dtype, "npu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", [(96,), (64, 1), (2, 1, 1, 96), (2, 3, 64, 96), None], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_each_adaptation(given: tuple[int, ...] | None, causal: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 64, 96).to(dtype).npu()
    mask = None if given is None else torch.rand(given).lt(0.3).npu()
    for masked in (mask, mask if mask is None else mask.to(torch.uint8)):
        check(SOFTMAX, (x, masked, 0.5, causal))


@pytest.mark.parametrize("shape", [(64, 32), (3, 64, 32), (2, 3, 2, 64, 32)], ids=str)
def test_other_ranks(shape: tuple[int, ...]) -> None:
    case = Case("rank", {"x": shape, "mask": (*shape[:1], *(1,) * (len(shape) - 3), *shape[-2:])[-len(shape) :]})
    check(SOFTMAX, testing.arguments(SOFTMAX, case, torch.float32, "npu"))


def test_strided_and_expanded_tensors() -> None:
    x, _, scale, _ = testing.arguments(SOFTMAX, Case("s", {"x": (2, 3, 64, 96)}), torch.float32, "npu")
    mask = torch.rand(1, 1, 96, 64).lt(0.3).npu().transpose(-1, -2).expand(2, 1, 64, 96)
    for strided in (x.transpose(0, 1).contiguous().transpose(0, 1), x[:, :1].expand(2, 3, 64, 96)):
        check(SOFTMAX, (strided, mask, scale, False))


def test_padding() -> None:
    args = testing.arguments(SOFTMAX, Case("p", {"x": (2, 3, 50, 100), "mask": (2, 1, 1, 100)}), torch.bfloat16, "npu")
    with fusedops.use(adapt="pad"):
        check(SOFTMAX, args)


def test_compiled() -> None:
    x = torch.randn(2, 3, 64, 96).npu()
    compiled = torch.compile(
        lambda t: fusedops.scaled_masked_softmax(t, None, 0.5, causal=True), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), fusedops.scaled_masked_softmax(x, None, 0.5, causal=True))


# ----------------------------------------------------------------- read in the vendor's sources, never seen on a device


def vendor_softmax(torch_npu: Any, x: Tensor, mask: Tensor) -> Tensor:
    return torch_npu.npu_scaled_masked_softmax(x, mask, 1.0, False).cpu().float()


def test_the_fill_is_finite(torch_npu: Any) -> None:
    """The deviation `finite-fill`, and why fully masked rows are set to 0."""
    mask = torch.zeros(1, 1, 32, 64, dtype=torch.bool)
    mask[..., 5, :] = mask[..., 0] = True
    x = torch.randn(1, 1, 32, 64)
    assert torch.allclose(vendor_softmax(torch_npu, x.npu(), mask.npu())[..., 5, :], torch.full((64,), 1 / 64))
    low = vendor_softmax(torch_npu, torch.full_like(x, -20000.0).npu(), mask.npu())
    assert (low[0, 0, 6, 0] - 1).abs() < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_masked_position_is_exactly_0(torch_npu: Any, dtype: torch.dtype) -> None:
    mask = torch.rand(1, 1, 32, 64) < 0.3
    mask[..., 1] = False
    y = vendor_softmax(torch_npu, (torch.randn(1, 1, 32, 64) * 100).to(dtype).npu(), mask.npu())
    assert (y[mask] == 0).all()


def test_gelu_has_both_forms_by_name(torch_npu: Any) -> None:
    x = torch.linspace(-4, 4, 101)
    for approximate in ("none", "tanh"):
        y = torch_npu.npu_gelu(x.npu(), approximate=approximate).cpu()
        torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate=approximate), atol=2e-6, rtol=1e-5)
