"""The softmax kernels of the triton backend, run by Triton's interpreter on a CPU, against float64 arithmetic in torch.

The interpreter executes the same kernels with NumPy: it shows that indices, masks and formulas are right, not how the
compiled code rounds (float32 to bfloat16 is cut off there, rounded on a GPU) or how fast it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from right import assert_right
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from triton_cases import needs_loops

import fusedops
from fusedops.testing import OPS
from fusedops_triton.launch import launcher, settings
from fusedops_triton.launch.settings import plan
from fusedops_triton.softmax._softmax import softmax_backward, softmax_forward

OP = OPS["scaled_masked_softmax"]
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCALE = 0.3


# NaN and infinity are wanted in some tests: the GPU does not warn of them, NumPy does
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(x: Tensor, mask: Tensor | None = None, scale: float = SCALE, causal: bool = False) -> Tensor:
    """Compare forward and backward of one call with float64. Returns y."""
    with fusedops.use("triton", fallback="raise"):
        return assert_right(OP.name, x, mask, scale, causal=causal)[0]


def some_mask(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.3


# --------------------------------------------------------------------------------------------------------- plain calls


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits of 16 instead of 32768, blocks of 32 and 16: the kernels cannot tell, and the interpreter is slow."""
    launcher.clear_layout_caches()
    for name, width in {"FORWARD_ON_CHIP": 16, "BACKWARD_ON_CHIP": 16, "LONG_TILE": 32}.items():
        monkeypatch.setattr(settings, name, dict.fromkeys((2, 4), width))
    yield
    launcher.clear_layout_caches()


@needs_loops
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("narrow")
def test_rows_longer_than_fit_on_chip(dtype: torch.dtype) -> None:
    x = torch.randn(4, 70).to(dtype)
    check(x)
    mask = some_mask(4, 70)
    mask[0] = True  # a dead row
    mask[1, :32] = True  # a row whose first block is masked
    check(x, mask)
    check(x, mask, causal=True)  # with blocks wholly above the diagonal
    check(torch.randn(35, 34).to(dtype), causal=True)  # the diagonal passes from one block to the next


@needs_loops
@pytest.mark.parametrize("causal", [False, True])
def test_a_long_row_on_chip_whose_mask_is_read_before_x(causal: bool) -> None:
    x, mask = torch.randn(3, 20000), some_mask(3, 20000)
    mask[1] = True  # a dead row
    check(x, mask, causal=causal)


@needs_loops
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_longer_than_any_limit(dtype: torch.dtype) -> None:
    size_k = 40_000
    assert not plan(size_k, dtype.itemsize, inputs=1).on_chip
    x = torch.randn(2, size_k).to(dtype)
    check(x, some_mask(1, size_k))
    check(x, causal=True)


def test_a_mask_shared_by_heads_over_long_rows() -> None:
    # one row to a program, heads innermost: the order of rows is another
    x = torch.randn(2, 3, 2, 2000)
    for shape in ((2, 1, 2, 2000), (1, 1, 2, 2000)):
        check(x, some_mask(*shape))
        check(x, some_mask(*shape), causal=True)


# ----------------------------------------------------------------------------------------------------- memory layouts


def test_a_y_from_elsewhere_need_not_be_contiguous() -> None:
    y = torch.softmax(torch.randn(2, 3, 20, 5), 2).transpose(-1, -2)
    grad = torch.randn(2, 3, 5, 20)
    want = OP.backward(grad.double(), y.double(), SCALE, False)
    torch.testing.assert_close(softmax_backward(grad, y, SCALE, False).double(), want, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------------------------------- hard numbers

HARD_LENGTHS = [20, 2000, pytest.param(40_000, marks=needs_loops)]  # several rows to a program, one row, a long row


@pytest.mark.parametrize(
    ("size_k", "dtype"),
    [
        *itertools.product((20, 2000), (torch.float16, torch.float32)),
        pytest.param(40_000, torch.float32, marks=needs_loops),
    ],
)
def test_fully_masked_rows_are_zero(size_k: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 2, size_k).to(dtype)
    mask = torch.zeros(2, 1, 1, dtype=torch.bool)
    mask[1] = True
    y = check(x, mask)
    assert (y[1] == 0).all()
    assert (softmax_backward(torch.randn(2, 2, size_k).to(dtype), y, SCALE, False)[1] == 0).all()


@pytest.mark.parametrize("size_k", HARD_LENGTHS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nothing_leaks_from_under_the_mask(size_k: int, poison: float) -> None:
    x = torch.randn(1, 2, size_k)
    mask = torch.rand(1, 2, size_k) < 0.3
    clean = softmax_forward(x, mask, SCALE, False)
    assert torch.equal(softmax_forward(x.masked_fill(mask, poison), mask, SCALE, False), clean)
    above = torch.ones(1, 2, size_k, dtype=torch.bool).triu(1)
    clean = softmax_forward(x, None, SCALE, True)
    assert torch.equal(softmax_forward(x.masked_fill(above, poison), None, SCALE, True), clean)
    grad = torch.randn(1, 2, size_k)
    assert torch.equal(
        softmax_backward(grad.masked_fill(above, poison), clean.masked_fill(above, poison), SCALE, True),
        softmax_backward(grad, clean, SCALE, True),
    )


@pytest.mark.parametrize("size_k", HARD_LENGTHS)
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_unmasked_nan_and_infinity_as_in_torch(size_k: int, number: float) -> None:
    x = torch.randn(3, size_k)
    x[0, 5] = number
    x[1, :] = number
    mask = torch.zeros(3, size_k, dtype=torch.bool)
    mask[:, 3] = True
    for some in (None, mask):
        y = softmax_forward(x, some, SCALE, False)
        want = OP.reference(x.double(), some, SCALE, False)
        torch.testing.assert_close(y.double(), want, rtol=1e-6, atol=0.0, equal_nan=True)
    assert (y[:, 3] == 0).all()


@pytest.mark.parametrize("size_k", HARD_LENGTHS)
def test_a_long_run_of_minus_infinity_before_a_score(size_k: int) -> None:
    # the running maximum of the long kernel stays at -inf for whole blocks, unmasked
    x = torch.full((1, size_k), -math.inf)
    x[0, -1] = 1.0
    y = softmax_forward(x, None, SCALE, False)
    assert y[0, -1] == 1
    assert (y[0, :-1] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_scores(dtype: torch.dtype) -> None:
    # the finite minimum, with which some code masks, and the maximum: scores times log2(e) would not be finite
    low, high = torch.finfo(dtype).min, torch.finfo(dtype).max
    x = torch.tensor([[low] * 4, [low, 0.0, 1.0, low], [high, 0.0, 0.0, low], [high] * 4], dtype=dtype)
    check(x, scale=1.0)


@pytest.mark.parametrize("scale", [-1 / 3, 1e-320, 0.0, 1e38])
def test_any_finite_scale(scale: float) -> None:
    """Triton takes a scale below the smallest normal float32 as a float64."""
    check(torch.randn(3, 9) * (1.0 if abs(scale) < 2 else 1e-38), scale=scale)


def test_scale_is_not_rounded_to_half_precision() -> None:
    scale = 1 / math.sqrt(72)  # 0.15 % off in bfloat16: scores near 40 would be off by 6 %
    x = torch.linspace(-340, 340, 33).to(torch.float16).expand(2, 33)
    want = OP.reference(x.double(), None, scale, False)
    torch.testing.assert_close(softmax_forward(x, None, scale, False).double(), want, rtol=1e-3, atol=6e-8)


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("inputs", [1, 2])
def test_plans(element_size: int, inputs: int) -> None:
    for size_k in (1, 2, 31, 64, 65, 1000, 1024, 1025, 4096, 16384, 16385, 32768, 32769, 1 << 20):
        rows, block, warps, on_chip, _ = plan(size_k, element_size, inputs)
        assert on_chip == (size_k <= block)
        assert 1 <= warps <= 32
        assert warps & (warps - 1) == 0
        assert rows == 1 or rows * block <= 1024
