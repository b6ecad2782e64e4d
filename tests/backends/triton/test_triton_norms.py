"""The Triton norms in the interpreter: rows that do not fit, several parts of sums, dtypes, numbers at the edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pairwise import pairwise
from right import assert_right
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")


from triton_cases import needs_loops

import fusedops
from fusedops.testing import OPS
from fusedops_triton.launch import launcher, settings
from fusedops_triton.norms import _norm_backward, _norm_settings

# NaN and infinity are wanted in some tests: the GPU does not warn of them, NumPy does
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NORMS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture(params=["on chip", pytest.param("long", marks=needs_loops)])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Rows of the sizes in this file on chip, or in blocks of 16."""
    if request.param == "long":
        for limit in ("NORM_FORWARD_ON_CHIP", "NORM_BACKWARD_ON_CHIP"):
            monkeypatch.setattr(_norm_settings, limit, dict.fromkeys((2, 4), 0))
        monkeypatch.setattr(_norm_settings, "LONG_TILE", dict.fromkeys((2, 4), 32))
    launcher.clear_layout_caches()
    yield request.param
    launcher.clear_layout_caches()


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


def check(name: str, call: dict[str, Any]) -> tuple[Tensor, ...]:
    with fusedops.use("triton", fallback="raise"):
        return assert_right(name, **call)


@needs_loops
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_the_rows_of_a_b200_each_read_the_weight(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "chip", settings.CHIPS["sm_100"])
    launcher.clear_layout_caches()
    setting = _norm_settings.norm_sums(48, 5000, 2, True, False)
    assert not setting.held
    assert setting.steps > 1
    check(name, call_of(name, (48, 5000), (BF16,) * 3))
    launcher.clear_layout_caches()


@pytest.mark.parametrize(
    ("name", "shape", "dtypes", "missing"),
    pairwise(
        NORMS,
        [(5, 40), (3, 100), (2, 3, 33), (70,), (4, 1)],
        [(F32,) * 3, (BF16,) * 3, (F16,) * 3, (BF16, F32, BF16), (F32, BF16, F64), (F32, F16, F32)],
        [(), ("weight",), ("bias",), ("weight", "bias")],
    ),
    ids=str,
)
def test_any_call(
    name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], missing: tuple[str, ...], rows: str
) -> None:
    check(name, {key: value for key, value in call_of(name, shape, dtypes).items() if key not in missing})


@needs_loops
@pytest.mark.parametrize("name", NORMS)
def test_several_tiles_in_several_parts_give_one_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2,048 columns a program holds one row at a time: 70 rows are five parts of 14 steps."""
    call = call_of(name, (70, 2048))
    setting = _norm_settings.norm_sums(70, 2048, 4, sums=True, centered=False)
    assert (setting.rows, setting.steps) == (1, 14)
    check(name, call)


def gradients(setting: _norm_settings.NormSums, n_rows: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, ...]:
    """Return the gradients of layer_norm of (n_rows, 30) with a setting of its backward."""
    call = call_of("layer_norm", (n_rows, 30), (BF16, BF16, BF16))
    leaves = [value.requires_grad_() for value in call.values()]
    monkeypatch.setattr(_norm_backward, "norm_sums", lambda *_: setting)
    launcher.clear_layout_caches()
    y = OPS["layer_norm"].function(**call, backend="triton")
    found = torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    launcher.clear_layout_caches()
    return found


@needs_loops
@pytest.mark.parametrize("n_rows", [1, 37])
@pytest.mark.parametrize(
    "other",
    [
        {"ahead": 1},
        {"ahead": 2},
        {"held": False, "again": (False, True)},
        {"held": False, "again": (True, True)},
        {"held": False, "again": (True, False), "ahead": 1},
    ],
)
def test_tiles_that_are_read_ahead_or_again_give_the_same_bits(
    n_rows: int, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has four tiles of four rows, or fewer: the last part of 37 rows ends in a tile."""
    setting = _norm_settings.NormSums(4, 32, 1, True, 4)
    now, then = (gradients(each, n_rows, monkeypatch) for each in (setting, setting._replace(**other)))
    assert all(torch.equal(*pair) for pair in zip(now, then))


@needs_loops
def test_two_sums_by_one_reduction_are_those_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, both = (
        gradients(_norm_settings.NormSums(1, 32, 1, True, 2, joined=joined), 3, monkeypatch) for joined in (True, False)
    )
    for got, want in zip(both, pairs):
        torch.testing.assert_close(got, want)


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
    monkeypatch.setattr(_norm_settings, "NORM_FORWARD_ON_CHIP", dict.fromkeys((2, 4), 0))
    monkeypatch.setattr(_norm_settings, "LONG_TILE", dict.fromkeys((2, 4), 32))
    launcher.clear_layout_caches()
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) + 10_000
    y = OPS["layer_norm"].function(x, backend="triton")
    launcher.clear_layout_caches()
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x.double(), (300,)).float(), rtol=1e-3, atol=2e-3)
