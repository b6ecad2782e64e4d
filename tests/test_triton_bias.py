"""The bias_gelu and dropout kernels of the triton backend, run by Triton's interpreter on a CPU, against float64.

What the interpreter shows, and what it does not: see test_triton_softmax.py. It takes 50 ms for a program that draws
random numbers, so tensors here have few elements more than one program takes.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from fusedops.ops import _bias_dropout, _bias_dropout_add, _bias_gelu, _philox
from fusedops_triton import _bias, _launch, _settings
from fusedops_triton._bias import locate, unit
from fusedops_triton._bias_dropout import _kept, dropout_backward, dropout_forward
from fusedops_triton._bias_dropout import _philox as philox_of_triton
from fusedops_triton._bias_gelu import gelu_backward, gelu_forward
from fusedops_triton._settings import share_columns, tile

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FORMS = ("tanh", "none")
# bfloat16: a whole last place, as the interpreter does not round to it. float64: the reference loses digits itself
RTOL = {
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
    torch.float32: 2e-6,
    torch.float64: 4e-14,
}
ATOL = {torch.float16: 6e-8, torch.bfloat16: 0.0, torch.float32: 0.0, torch.float64: 0.0}
SEEDS = (7, -3, 2**62 + 12345)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(20240607)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several parts of several steps each for sums over some 50 rows, which is what long tensors have."""
    _launch.forget_layouts()
    monkeypatch.setattr(_settings, "MOST_ROWS", 4)
    yield
    _launch.forget_layouts()


def near(got: Tensor, want: Tensor, size: Tensor | float = 0.0, dtype: torch.dtype | None = None) -> None:
    """Asserts that got is want, within rounding of it and of terms of ``size`` that it is a sum of."""
    allowed = RTOL[dtype or got.dtype] * (want.abs() + size) + ATOL[dtype or got.dtype]
    off = (got.double() - want).abs() - allowed
    assert off.numel() == 0 or off.max() <= 0, f"off by {(got.double() - want).abs().max():.2e}"


def seed_of(number: int) -> Tensor:
    return torch.tensor([number])


def wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def check_gradients(
    got: tuple[Tensor | None, Tensor | None],
    du: Tensor,
    x_dtype: torch.dtype,
    bias: Tensor | None,
    needs: tuple[bool, bool],
    coarsest: torch.dtype,
) -> None:
    """dx and dbias against du, the gradient of each element in float64 and as large as its terms."""
    dx, dbias = got
    assert (dx is not None) == needs[0]
    assert (dbias is not None) == (needs[1] and bias is not None)
    if dx is not None:
        assert dx.dtype == x_dtype
        assert dx.shape == du.shape
        assert dx.is_contiguous()
        near(dx, du, du.abs() + 0.2, coarsest)
    if dbias is not None and bias is not None:
        assert dbias.dtype == bias.dtype
        assert dbias.shape == bias.shape
        assert dbias.is_contiguous()
        near(dbias, du.sum_to_size(bias.shape), (du.abs() + 0.2).sum_to_size(bias.shape), coarsest)
        assert dx is None or dx.data_ptr() != dbias.data_ptr()


def coarser(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that rounds most."""
    return max(dtypes, key=lambda dtype: RTOL[dtype])


NEEDS = ((True, True), (True, False), (False, True), (False, False))


def check_gelu(
    x: Tensor,
    bias: Tensor | None = None,
    approximate: str = "tanh",
    all_needs: tuple[tuple[bool, bool], ...] = NEEDS[:1],
    grad: Tensor | None = None,
) -> Tensor:
    y = gelu_forward(x, bias, approximate)
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert y.is_contiguous()
    near(y, _bias_gelu.OP.reference(x.double(), wide(bias), approximate=approximate), 1.0)
    grad = torch.randn(x.shape).to(dtype) if grad is None else grad
    before = [None if t is None else t.clone() for t in (x, bias, grad)]
    (du, _) = _bias_gelu.OP.backward(grad.double(), x.double(), wide(bias), approximate, (True, False))
    for needs in all_needs:
        got = gelu_backward(grad, x, bias, approximate, needs)
        check_gradients(got, du, x.dtype, bias, needs, coarser(x.dtype, dtype if bias is None else bias.dtype))
    for now, then in zip((x, bias, grad), before, strict=True):
        assert now is None or torch.equal(now, then), "an input was written"
    return y


def check_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    p: float = 0.5,
    training: bool = True,
    seed: int | None = 7,
    all_needs: tuple[tuple[bool, bool], ...] = NEEDS[:1],
    grad: Tensor | None = None,
) -> Tensor:
    at = None if seed is None else seed_of(seed)
    y = dropout_forward(x, bias, residual, p, training, at)
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    inputs: tuple[Tensor | None, ...] = (x, bias)
    if residual is None:
        want = _bias_dropout.OP.reference(x.double(), wide(bias), p, training=training, seed=at)
    else:
        dtype = residual.dtype
        inputs = (x.to(dtype), None if bias is None else bias.to(dtype), residual)
        want = _bias_dropout_add.OP.reference(*map(wide, inputs), p, training=training, seed=at)
    assert y.dtype == dtype
    assert y.shape == x.shape
    assert y.is_contiguous()
    size = sum((t.double().abs() for t in inputs if t is not None), torch.zeros(x.shape, dtype=torch.float64))
    near(
        y,
        want,
        size / (1 - p) if training and p < 1 else size,
        coarser(dtype, x.dtype, x.dtype if bias is None else bias.dtype),
    )

    grad = torch.randn(x.shape).to(dtype) if grad is None else grad
    before = [None if t is None else t.clone() for t in (x, bias, residual, grad, at)]
    (du, _) = _bias_dropout.OP.backward(grad.double(), at, None, p, training, torch.float64, (True, False))
    for needs in all_needs:
        got = dropout_backward(grad, at, bias, p, training, x.dtype, needs)
        check_gradients(got, du, x.dtype, bias, needs, coarser(x.dtype, dtype, x.dtype if bias is None else bias.dtype))
    for now, then in zip((x, bias, residual, grad, at), before, strict=True):
        assert now is None or torch.equal(now, then), "an input was written"
    return y


# ----------------------------------------------------------------------------------------------------------- bias_gelu


@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (37, 100), (3, 1000), (2, 2056)])
def test_gelu(rows: int, size: int, dtype: torch.dtype, approximate: str) -> None:
    x, bias = (3 * torch.randn(rows, size)).to(dtype), torch.randn(size).to(dtype)
    check_gelu(x, bias, approximate)
    check_gelu(x, None, approximate)


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("bias_shape", [None, (8,), (6, 8), (6, 1)], ids=str)
def test_gelu_computes_what_is_needed(bias_shape: tuple[int, ...] | None, needs: tuple[bool, bool]) -> None:
    bias = None if bias_shape is None else torch.randn(bias_shape)
    check_gelu(torch.randn(6, 8), bias, all_needs=(needs,))


@pytest.mark.parametrize("dtypes", [(a, b) for a, b in itertools.product(DTYPES, repeat=2) if a != b], ids=str)
def test_gelu_of_mixed_dtypes(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x = torch.randn(5, 24).to(dtypes[0])
    for shape in ((24,), (5, 24), (5, 1)):
        check_gelu(x, torch.randn(shape).to(dtypes[1]))


@pytest.mark.parametrize("approximate", FORMS)
def test_gelu_keeps_float64_digits(approximate: str) -> None:
    x = torch.linspace(-9, 9, 301, dtype=torch.float64)
    want = _bias_gelu.OP.reference(x, approximate=approximate)
    torch.testing.assert_close(gelu_forward(x, None, approximate), want, rtol=4e-15, atol=4e-16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of what overflows, a GPU does not
@pytest.mark.parametrize("approximate", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gelu_of_large_numbers(dtype: torch.dtype, approximate: str) -> None:
    high = torch.finfo(dtype).max
    x = torch.tensor([high, 1e18, 1e4, 300.0, 20.0, -20.0, -300.0, -1e4, -1e18, -high], dtype=dtype)
    y = gelu_forward(x, None, approximate)
    assert torch.equal(y[:5], x[:5])
    assert (y[5:].abs() < 1e-37).all()
    dx, _ = gelu_backward(torch.ones_like(x), x, None, approximate, (True, False))
    assert dx is not None
    assert (dx[1:5] == 1).all()
    assert (dx[5:9].abs() < 1e-37).all()
    odd = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    want = torch.nn.functional.gelu(odd, approximate=approximate)
    torch.testing.assert_close(gelu_forward(odd, None, approximate), want, equal_nan=True)


def test_gelu_in_the_left_tail_is_good_to_its_own_size() -> None:
    # in float32 1 + tanh(z) is 0 from -5.1 on, and the slope of tanh, 1 - tanh(z)**2
    x = torch.linspace(-8, -4, 64)
    u = x.double().requires_grad_()
    want = u * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (u + 0.044715 * u**3))
    torch.testing.assert_close(gelu_forward(x, None, "tanh").double(), want.detach(), rtol=1e-5, atol=0.0)
    (slope,) = torch.autograd.grad(want.sum(), u)
    dx, _ = gelu_backward(torch.ones_like(x), x, None, "tanh", (True, False))
    assert dx is not None
    torch.testing.assert_close(dx.double(), slope, rtol=1e-5, atol=0.0)


# ------------------------------------------------------------------------------------------------------ random numbers


@triton.jit
def _words(out_ptr, seed_ptr, counter_ptr, RANDINT: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    counter, seed = tl.load(counter_ptr + at), tl.load(seed_ptr)
    w0, w1, w2, w3 = tl.randint4x(seed, counter) if RANDINT else philox_of_triton(seed, counter)
    tl.store(out_ptr + at, w0.to(tl.uint32).to(tl.int64))
    tl.store(out_ptr + SIZE + at, w1.to(tl.uint32).to(tl.int64))
    tl.store(out_ptr + 2 * SIZE + at, w2.to(tl.uint32).to(tl.int64))
    tl.store(out_ptr + 3 * SIZE + at, w3.to(tl.uint32).to(tl.int64))


@triton.jit(do_not_specialize=["first", "last"])
def _keep(out_ptr, seed_ptr, first, last, SIZE: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, SIZE), _kept(seed_ptr, first, last, SIZE).to(tl.uint8))


COUNTERS = (0, 1, 2**32 - 1, 2**32, 2**32 + 5, 2**40 + 3, 2**61 - 1, 12345)


@pytest.mark.parametrize("seed", [0, *SEEDS, -(2**63)])
def test_philox_has_the_words_of_the_reference_and_of_triton(seed: int) -> None:
    counters = torch.tensor(COUNTERS)
    ours, theirs = torch.empty(2, 4, len(COUNTERS), dtype=torch.int64)
    _words[(1,)](ours, seed_of(seed), counters, False, len(COUNTERS))
    _words[(1,)](theirs, seed_of(seed), counters, True, len(COUNTERS))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, torch.stack(_philox.philox(counters, seed_of(seed))))


def test_philox_known_answer() -> None:
    # Random123, tests/kat_vectors: philox 4x32 10, counter and key 0
    out = torch.empty(4, 1, dtype=torch.int64)
    _words[(1,)](out, seed_of(0), torch.tensor([0]), False, 1)
    assert out.flatten().tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 2**30 - 8, 2**32 - 8, 2**45])  # the third passes index 2**34
def test_keep_bits_far_from_the_beginning(first: int, seed: int) -> None:
    out = torch.empty(64, dtype=torch.uint8)
    _keep[(1,)](out, seed_of(seed), first, _philox.threshold(0.3) - 1, 64)
    words = torch.stack(_philox.philox(torch.arange(first, first + 16), seed_of(seed)), dim=-1).flatten()
    assert torch.equal(out.bool(), words >= _philox.threshold(0.3))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 3, 4, 1027, 2050])
def test_keep_bits_forward_and_backward(size: int, dtype: torch.dtype, seed: int) -> None:
    p = 0.6
    keep = _philox.keep_mask(seed_of(seed), p, (size,))
    y = dropout_forward(torch.ones(size, dtype=dtype), None, None, p, True, seed_of(seed))
    assert torch.equal(y != 0, keep)
    dx, _ = dropout_backward(torch.ones(size, dtype=dtype), seed_of(seed), None, p, True, dtype, (True, False))
    assert dx is not None
    assert torch.equal(dx != 0, keep)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("rows", "size"), [(17, 4), (9, 100), (3, 1028), (5, 18)])  # the last tears groups of four
@pytest.mark.usefixtures("parts")
def test_keep_bits_where_columns_are_summed(rows: int, size: int, seed: int) -> None:
    keep = _philox.keep_mask(seed_of(seed), 0.25, (rows, size))
    grad, bias = torch.full((rows, size), 0.75), torch.zeros(size)
    dx, dbias = dropout_backward(grad, seed_of(seed), bias, 0.25, True, torch.float32, (True, True))
    assert torch.equal(dx, keep.float())
    assert torch.equal(dbias, keep.sum(0).float())


@pytest.mark.parametrize("p", [1e-12, 2**-33, 1e-9, 0.5, 1 - 1e-9, 1 - 2**-34, 1.0])
def test_thresholds(p: float) -> None:
    x = torch.ones(50, dtype=torch.float64)
    torch.testing.assert_close(
        dropout_forward(x, None, None, p, True, seed_of(1)),
        _bias_dropout.OP.reference(x, None, p, seed=seed_of(1)), rtol=1e-15, atol=0.0,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0, 0.1, 0.5, 0.9, 1, 1.0])
def test_dropout(p: float, dtype: torch.dtype) -> None:
    x, bias, residual = (torch.randn(shape).to(dtype) for shape in ((7, 36), (36,), (7, 36)))
    check_dropout(x, bias, None, p)
    y = check_dropout(x, bias, residual, p)
    assert p < 1 or torch.equal(y, residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_evaluation_drops_nothing(dtype: torch.dtype) -> None:
    x, bias, residual = (torch.randn(shape).to(dtype) for shape in ((7, 37), (37,), (7, 37)))
    for p, training in ((0.0, True), (0.3, False), (1.0, False)):
        check_dropout(x, bias, None, p, training, None)
        check_dropout(x, bias, residual, p, training, None)
        check_dropout(x, None, residual, p, training, 7)  # a seed, of no use


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (3, 1001), (2, 2056)])
def test_dropout_row_lengths(rows: int, size: int) -> None:
    x, bias, residual = torch.randn(rows, size), torch.randn(size), torch.randn(rows, size)
    check_dropout(x, bias, None)
    check_dropout(x.to(torch.bfloat16), bias.to(torch.bfloat16), residual.to(torch.bfloat16))


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("bias_shape", [None, (8,), (6,), (6, 8), (8, 1)], ids=str)
def test_dropout_computes_what_is_needed(bias_shape: tuple[int, ...] | None, needs: tuple[bool, bool]) -> None:
    bias = None if bias_shape is None else torch.randn(bias_shape)
    x = torch.randn(*((8, 6) if bias_shape in ((6,), (8, 1)) else (6, 8)))
    check_dropout(x, bias, None, all_needs=(needs,))


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES[1:], repeat=3)), ids=str)
def test_dropout_of_mixed_dtypes(dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> None:
    x, bias, residual = (torch.randn(s).to(d) for s, d in zip(((3, 8), (8,), (3, 8)), dtypes, strict=True))
    check_dropout(x, bias, residual)


def test_x_is_taken_in_the_dtype_of_the_residual() -> None:
    # float16 holds no 70000: x becomes infinity there, and it would not if it were only narrowed at the end
    x, residual = torch.tensor([70000.0, 1.0]), torch.tensor([-60000.0, 1.0], dtype=torch.float16)
    with pytest.warns(RuntimeWarning, match="overflow"):
        y = dropout_forward(x, None, residual, 0.0, True, None)
    assert torch.equal(y, _bias_dropout_add.OP.reference(x, None, residual, 0.0))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nothing_leaks_from_dropped_elements() -> None:
    keep = _philox.keep_mask(seed_of(7), 0.5, (40,))
    for poison in (math.nan, math.inf):
        x = torch.ones(40).masked_fill(~keep, poison)
        assert torch.equal(dropout_forward(x, None, torch.ones(40), 0.5, True, seed_of(7)), 1 + 2 * keep.float())
        everything = torch.full((40,), poison)
        assert torch.equal(dropout_forward(everything, None, torch.ones(40), 1.0, True, seed_of(7)), torch.ones(40))
        dx, _ = dropout_backward(x, seed_of(7), None, 0.5, True, torch.float32, (True, False))
        assert torch.equal(dx, 2 * keep.float())


def test_a_seed_anywhere_in_memory() -> None:
    seeds, x = torch.tensor([1, 2, 3]), torch.randn(40)
    for seed in (seeds[1], seeds[1:2], seeds[1].view(1, 1, 1)):
        y = dropout_forward(x, None, None, 0.5, True, seed)
        assert torch.equal(y, dropout_forward(x, None, None, 0.5, True, seed_of(2)))


# ---------------------------------------------------------------------------------------- shapes of bias, layouts of x


def test_every_shape_of_bias_is_found() -> None:
    shape = torch.Size((2, 1, 3, 2, 5))
    kinds = set()
    for rank in range(6):
        for kept in itertools.product((False, True), repeat=rank):
            bias = torch.randn([size if keep else 1 for size, keep in zip(shape[5 - rank :], kept, strict=True)])
            place = locate(bias, shape)
            at, (size, inner, wrap, outer, step) = torch.arange(shape.numel()), place.sizes
            if "tail" in place.kind:
                at = at % (size * place.unit)
            elif place.kind == "other":
                at = at // outer % wrap * step + at // inner % size
            assert place.tensor is not None
            assert torch.equal(place.tensor.flatten()[at].view(shape), bias.expand(shape)), (kept, place)
            kinds.add(place.kind)
    assert kinds == {"all", "tail", "other"}


@pytest.mark.parametrize(
    "bias_shape",
    [
        *((2, 3, 4, 8), (8,), (4, 8), (1, 1, 8), (), (1,), (4, 1), (3, 1, 1), (2, 1, 1, 8), (1, 3, 1, 1)),
        *((2, 1, 4, 1), (1, 3, 1, 8), (2, 3, 1, 8)),
    ],
    ids=str,
)
def test_shapes_of_bias(bias_shape: tuple[int, ...]) -> None:
    x, bias = torch.randn(2, 3, 4, 8), torch.randn(bias_shape)
    check_gelu(x, bias)
    check_dropout(x, bias, x + 1)


def test_a_bias_may_be_a_view() -> None:
    x = torch.randn(6, 8)
    for bias in (torch.randn(16)[::2], torch.randn(1).expand(8), torch.randn(8, 6).t(), torch.randn(8).expand(6, 8)):
        check_gelu(x, bias)
        check_dropout(x, bias, x + 1)


def _layouts() -> dict[str, Tensor]:
    return {
        "transposed": torch.randn(20, 6).t(),
        "every second row": torch.randn(12, 20)[::2],
        "every second column": torch.randn(6, 40)[:, ::2],
        "a window": torch.randn(8, 30)[1:7, 3:23],
        "expanded rows": torch.randn(1, 20).expand(6, 20),
        "expanded columns": torch.randn(6, 1).expand(6, 20),
        "one number": torch.randn(()).expand(6, 20),
        "misaligned": torch.randn(121)[1:].view(6, 20),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "one dimension": torch.randn(33),
        "none": torch.randn(()),
        "rank six": torch.randn(2, 1, 3, 1, 2, 4),
    }


@pytest.mark.parametrize("layout", list(_layouts()))
def test_layouts_of_x_residual_and_grad(layout: str) -> None:
    x = _layouts()[layout]
    bias = torch.randn(x.shape[-1:])
    check_gelu(x, bias)
    check_gelu(torch.randn(x.shape), bias, grad=x)
    check_dropout(x, bias)
    check_dropout(torch.randn(x.shape), bias, x, grad=x)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0), (2, 0, 8)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    for bias in (None, torch.randn(shape[-1:]), torch.randn(1)):
        assert gelu_forward(x, bias, "tanh").shape == shape
        assert dropout_forward(x, bias, x, 0.5, True, seed_of(1)).shape == shape
        for dx, dbias in (
            gelu_backward(x, x, bias, "tanh", (True, True)),
            dropout_backward(x, seed_of(1), bias, 0.5, True, x.dtype, (True, True)),
        ):
            assert dx is not None
            assert dx.shape == shape
            assert bias is None or torch.equal(dbias, torch.zeros_like(bias))


# ------------------------------------------------------------------------------------------------------ sums of columns


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("parts")
def test_sums_in_parts(dtype: torch.dtype) -> None:
    x, bias = torch.randn(51, 20).to(dtype), torch.randn(20).to(dtype)
    share = share_columns(51, 20, dtype.itemsize)
    assert (share.parts, share.steps) == (4, 4)
    check_gelu(x, bias, all_needs=NEEDS[::2])
    check_dropout(x, bias, all_needs=NEEDS[::2])


@pytest.mark.parametrize("parts", [2, 37, 256, 600])
@pytest.mark.parametrize("size", [1, 40])
def test_parts_are_added(parts: int, size: int) -> None:
    sums = torch.randint(-9, 9, (parts, size)).float()
    dbias = torch.empty(size)
    _bias.add_sums(dbias, sums)
    assert torch.equal(dbias, sums.sum(0))


def test_sums_are_wide() -> None:
    # float16 holds no 70000, bfloat16 no 257. The bias, and so its gradient, is float32
    for dtype, each, rows in ((torch.float16, 2000.0, 40), (torch.bfloat16, 1.0, 300)):
        x, grad = torch.full((rows, 4), 20.0, dtype=dtype), torch.full((rows, 4), each)
        _, dbias = gelu_backward(grad, x, torch.zeros(4), "tanh", (True, True))
        assert dbias is not None
        assert (dbias == rows * each).all()


@pytest.mark.usefixtures("parts")
def test_the_same_bits_again() -> None:
    x, bias, grad = torch.randn(60, 24), torch.randn(24), torch.randn(60, 24)
    for call in (
        lambda: gelu_backward(grad, x, bias, "tanh", (True, True)),
        lambda: dropout_backward(grad, seed_of(3), bias, 0.3, True, torch.float32, (True, True)),
    ):
        for one, other in zip(call(), call(), strict=True):
            assert torch.equal(one, other)


# ------------------------------------------------------------------------------------------------------------ settings

WIDTHS = (1, 2, 31, 64, 96, 768, 1000, 4096, 5120, 16384, 32768, 250_000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares(dtype: torch.dtype) -> None:
    each = dtype.itemsize
    for size, n_rows in itertools.product(WIDTHS, (1, 3, 64, 1000, 8192, 65536, 1 << 22)):
        rows, cols, steps, tiles, parts, warps = share_columns(n_rows, size, each)
        assert rows * cols <= tile(each)[0]
        assert tiles * cols >= size > (tiles - 1) * cols
        assert parts * steps * rows >= n_rows > (parts - 1) * steps * rows, "a part without a row"
        assert parts <= 1024
        assert warps in (1, 2, 4)
        elements = n_rows * size
        if elements * each > 16 * 2**20:  # else sums stay in a cache
            share = 2 * parts * size * max(each, 4) / (3 * elements * each)
            assert parts == 1 or share < 0.03


def test_units() -> None:
    assert [unit(n) for n in (1, 2, 3, 4, 1000, 1001, 4096, 48)] == [1, 2, 1, 4, 8, 1, 16, 16]


def test_tiles() -> None:
    assert [tile(each) for each in (2, 4, 8)] == [(2048, 4), (1024, 4), (512, 4)]
