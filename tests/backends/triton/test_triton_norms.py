"""The Triton norms in the interpreter: rows that do not fit, several parts of sums, dtypes, numbers at the edges."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from norm_tolerance import gradient_tolerance, tolerance
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

import triton

from fusedops import testing
from fusedops.testing import OPS
from fusedops_triton import _launch, _settings

# NaN and infinity are wanted in some tests: the GPU does not warn of them, NumPy does
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
_VERSIONS = [tuple(int(part) for part in version.split(".")[:2]) for version in (triton.__version__, np.__version__)]
needs_loops = pytest.mark.skipif(
    _VERSIONS[0] < (3, 7) and _VERSIONS[1] >= (2, 4),
    reason="Triton's interpreter cannot loop with NumPy 2.4 before Triton 3.7 (triton-lang/triton#9171)",
)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(params=["on chip", pytest.param("long", marks=needs_loops)])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Rows of the sizes in this file on chip, or in blocks of 16."""
    if request.param == "long":
        for limit in ("NORM_FORWARD_ON_CHIP", "NORM_BACKWARD_ON_CHIP"):
            monkeypatch.setattr(_settings, limit, dict.fromkeys((2, 4, 8), 0))
        monkeypatch.setattr(_settings, "LONG_TILE", dict.fromkeys((2, 4, 8), 32))
    _launch.clear_layout_caches()
    yield request.param
    _launch.clear_layout_caches()


def call_of(name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (F32,) * 3) -> dict[str, Any]:
    """Return a call; dtypes: of x, residual, and weight and bias."""
    x, residual, vector = dtypes
    numbers = torch.Generator().manual_seed(0)
    call = {
        "x": torch.randn(shape, generator=numbers).to(x),
        "residual": torch.randn(shape, generator=numbers).to(residual),
        "weight": torch.randn(shape[-1], generator=numbers).to(vector),
        "bias": torch.randn(shape[-1], generator=numbers).to(vector),
    }
    return {key: value for key, value in call.items() if key in OPS[name].parameters}


def check(name: str, call: dict[str, Any]) -> list[Tensor]:
    """Compare outputs and gradients with float64; return the gradients."""
    op = OPS[name]
    want = testing.expected(op, op.bind((), call))
    leaves = {key: call[key].detach().requires_grad_() for key in op.differentiable if call.get(key) is not None}
    ys = op.as_tuple(op.function(**{**call, **leaves}, backend="triton"))
    grads = [grad.to(y.dtype) for grad, y in zip(want.grads, ys)]
    got = torch.autograd.grad(ys, [*leaves.values()], grads)
    dtypes = [value.dtype for value in call.values() if isinstance(value, Tensor)]
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    for y, wide in zip(ys, want.outputs):
        testing.assert_within(y, wide, tolerance(op, coarsest), name)
    for key, gradient in zip(leaves, got):
        testing.assert_within(gradient, want.gradients[key], gradient_tolerance(op, coarsest), key)
    return [*ys, *got]


@pytest.mark.parametrize("shape", [(5, 40), (3, 100), (2, 3, 33), (70,), (4, 1)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_rows(name: str, shape: tuple[int, ...], rows: str) -> None:
    check(name, call_of(name, shape))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    "dtypes", [(BF16,) * 3, (F16,) * 3, (F64,) * 3, (BF16, F32, BF16), (F32, BF16, F64), (F64, F16, F32)], ids=str
)
@pytest.mark.parametrize("name", NORMS)
def test_dtypes(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    check(name, call_of(name, (5, 40), dtypes))


@pytest.mark.parametrize("missing", [("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_without_weight_or_bias(name: str, missing: tuple[str, ...], rows: str) -> None:
    check(name, {key: value for key, value in call_of(name, (5, 40)).items() if key not in missing})


@needs_loops
@pytest.mark.parametrize("name", NORMS)
def test_several_tiles_in_several_parts_give_one_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2,048 columns a program holds one row at a time: 70 rows are five parts of 16 steps."""
    call = call_of(name, (70, 2048))
    setting = _settings.norm_sums(70, 2048, 4, sums=True)
    assert (setting.rows, setting.steps) == (1, 16)
    first, second = check(name, call), check(name, call)
    assert all(map(torch.equal, first, second))


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("name", NORMS)
def test_numbers_at_the_edges_are_those_of_the_definition(name: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[0.0] * 4, [1, -2, inf, 4], [1, nan, 2, 3], [1e20, 1, 2, 3], [1e-30, 0, 0, 0]]).repeat(1, 5)
    call = {**call_of(name, (5, 20)), "x": x}
    if "residual" in call:
        call["residual"] = torch.zeros_like(x)
    op = OPS[name]
    want = op.reference(*op.bind((), call))
    got = op.function(**call, backend="triton")
    for y, wanted in zip(op.as_tuple(got), op.as_tuple(want)):
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)


@needs_loops
def test_the_mean_of_a_long_row_is_exact_far_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of squares less the square of the sum would lose every digit of the variance."""
    monkeypatch.setattr(_settings, "NORM_FORWARD_ON_CHIP", dict.fromkeys((2, 4, 8), 0))
    monkeypatch.setattr(_settings, "LONG_TILE", dict.fromkeys((2, 4, 8), 32))
    _launch.clear_layout_caches()
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) + 10_000
    y = OPS["layer_norm"].function(x, backend="triton")
    _launch.clear_layout_caches()
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x.double(), (300,)).float(), rtol=1e-3, atol=2e-3)
