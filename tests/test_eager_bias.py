"""The eager kernels of bias_gelu, bias_dropout and bias_dropout_add against their definitions in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fusedops
from fusedops_eager import _gelu, _slabs
from fusedops_eager._dropout import dropout_backward, dropout_forward
from fusedops_eager._gelu import gelu_backward, gelu_forward
from fusedops_eager._philox import Keep

INF, NAN = float("inf"), float("nan")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [F16, BF16, F32, F64]
MIXED = [*((dtype, dtype) for dtype in DTYPES), (BF16, F32), (F32, BF16), (F16, BF16), (F32, F64), (F64, F16)]
TOLERANCE = {F16: (1e-3, 1e-3), BF16: (1e-2, 1.6e-2), F32: (2e-6, 1.3e-6), F64: (1e-12, 1e-12)}
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    ((6, 50), None),
    ((6, 50), (50,)),
    ((6, 50), (1, 50)),
    ((6, 50), (6, 1)),
    ((6, 50), (6, 50)),
    ((6, 50), ()),
    ((2, 3, 5, 11), (11,)),
    ((2, 3, 5, 11), (3, 1, 11)),
    ((2, 3, 5, 11), (2, 1, 5, 1)),
    ((2, 3, 5, 11), (1, 1, 1, 1)),
    ((300,), (300,)),
    ((300,), (1,)),
    ((), ()),
    ((1, 1), (1,)),
]


@pytest.fixture(params=["one slab", "tiny slabs"])
def slabs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of 64 elements cross every boundary at sizes that a test can afford."""
    monkeypatch.setattr(_gelu, "_SMALL", 0)
    if request.param == "tiny slabs":
        monkeypatch.setattr(_slabs, "SLAB", 64)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine the threads' barriers cost ten times what these small sizes do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def layouts(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    """A contiguous tensor, one with strides, a transposed and an expanded one, all of one shape."""
    yield (2 * torch.randn(shape)).to(dtype)
    if shape:
        yield (2 * torch.randn([2 * size for size in shape])).to(dtype)[tuple(slice(None, None, 2) for _ in shape)]
        yield (2 * torch.randn(shape[::-1])).to(dtype).permute(*reversed(range(len(shape))))
        yield (2 * torch.randn(shape[-1])).to(dtype).expand(shape)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    atol, rtol = TOLERANCE[dtype]
    assert got.dtype is dtype
    torch.testing.assert_close(got.double(), want, atol=times * atol, rtol=times * rtol, equal_nan=True)


def fresh(made: Tensor, *inputs: Tensor | None) -> None:
    assert made.is_contiguous()
    assert not made._is_view()
    owners = {t.untyped_storage().data_ptr() for t in inputs if t is not None and t.numel()}
    assert made.untyped_storage().data_ptr() not in owners


class Unchanged:
    """Asserts that the tensors are as they were, bit for bit."""

    def __init__(self, *tensors: Tensor | None) -> None:
        self.tensors = [t for t in tensors if t is not None]
        self.before = [self._bits(t) for t in self.tensors]

    def check(self) -> None:
        for now, then in zip(self.tensors, self.before):
            assert torch.equal(self._bits(now), then)

    @staticmethod
    def _bits(t: Tensor) -> Tensor:
        flat = torch.empty(t.numel(), dtype=t.dtype).copy_(t.reshape(-1))
        return flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


# --- bias_gelu ---


def gelu_of(u: Tensor, form: str) -> Tensor:
    if form == "tanh":
        return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    return 0.5 * u * (1 + torch.erf(u / math.sqrt(2)))


def check_gelu(x: Tensor, bias: Tensor | None, form: str, grad: Tensor | None = None) -> None:
    dtype = x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)
    grad = torch.randn(x.shape).to(dtype) if grad is None else grad
    unchanged = Unchanged(x, bias, grad)
    wide_x = x.double().detach().requires_grad_()
    wide_bias = None if bias is None else bias.double().detach().requires_grad_()
    wanted = gelu_of(wide_x if wide_bias is None else wide_x + wide_bias, form)
    inputs = [wide_x] if wide_bias is None else [wide_x, wide_bias]
    gradients = torch.autograd.grad(wanted, inputs, grad.double())

    y = gelu_forward(x, bias, form)
    fresh(y, x, bias)
    assert y.shape == x.shape
    close(y, wanted.detach(), dtype)
    for needs in ((True, True), (True, False), (False, True)):
        dx, dbias = gelu_backward(grad, x, bias, form, needs)
        assert (dx is not None) == needs[0]
        assert (dbias is not None) == (needs[1] and bias is not None)
        if dx is not None:
            fresh(dx, x, grad)
            assert dx.shape == x.shape
            close(dx, gradients[0], x.dtype, 2)
        if bias is not None and dbias is not None:
            fresh(dbias, bias, dx, grad)
            assert dbias.shape == bias.shape
            close(dbias, gradients[1], bias.dtype, 8)
    unchanged.check()


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("form", ["tanh", "none"])
@pytest.mark.parametrize(("shape", "bias_shape"), SHAPES)
def test_gelu(shape: tuple[int, ...], bias_shape: tuple[int, ...] | None, form: str) -> None:
    for x_dtype, bias_dtype in MIXED:
        for x in layouts(shape, x_dtype) if x_dtype is bias_dtype else [torch.randn(shape).to(x_dtype)]:
            check_gelu(x, None if bias_shape is None else torch.randn(bias_shape).to(bias_dtype), form)


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_with_gradients_and_biases_of_any_stride(dtype: torch.dtype) -> None:
    for grad, bias in itertools.product(layouts((6, 50), dtype), layouts((6, 50), dtype)):
        check_gelu(torch.randn(6, 50).to(dtype), bias, "tanh", grad)
        check_gelu(torch.randn(6, 50).to(dtype), bias[0], "none", grad)


@pytest.mark.parametrize("form", ["tanh", "none"])
def test_gelu_of_extremes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large numbers are as torch has them; 1e14 cubed is beyond float32, and its gradient is still 1."""
    monkeypatch.setattr(_gelu, "_SMALL", 0)
    x = torch.tensor([0.0, -0.0, 30, -30, 1e14, -1e14, 1e18, -1e18, INF, -INF, NAN, 1e-40])
    y = gelu_forward(x, None, form)
    torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate=form), rtol=1e-6, atol=1e-7, equal_nan=True)
    dx, _ = gelu_backward(torch.ones_like(x), x, None, form, (True, False))
    assert dx is not None
    want = torch.tensor([0.5, 0.5, 1, 0, 1, 0, 1, 0])
    torch.testing.assert_close(dx[:8], want, rtol=1e-6, atol=1e-7)
    rows, bias = x[:8].expand(3, 8), torch.zeros(8)
    for needs in ((True, True), (False, True)):
        dx, dbias = gelu_backward(torch.ones(3, 8), rows, bias, form, needs)
        assert dbias is not None
        torch.testing.assert_close(dbias, 3 * want, rtol=1e-6, atol=1e-7)
        if dx is not None:
            torch.testing.assert_close(dx, want.expand(3, 8), rtol=1e-6, atol=1e-7)


def test_gelu_of_large_numbers_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 1e12 the cube is finite, and nothing is done again."""
    monkeypatch.setattr(_gelu, "_SMALL", 0)
    monkeypatch.setattr(Tensor, "clamp_", lambda *_: pytest.fail("done again"))
    x = torch.tensor([0.0, -0.0, 1e-40, 5, -5, 9, -9, 12, -12, 30, -30, 1e8, -1e8, 1e12, -1e12]).expand(3, 15)
    grad = torch.tensor([1.0, -1e30, 1e-30])[:, None].expand_as(x)
    dx, dbias = gelu_backward(grad, x, torch.zeros(15), "tanh", (True, True))
    want = torch.ops.aten.gelu_backward(grad.double(), x.double(), approximate="tanh")
    assert dx is not None
    assert dbias is not None
    torch.testing.assert_close(dx.double() / grad, want / grad, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(dbias.double() / -1e30, want.sum(0) / -1e30, rtol=2e-5, atol=1e-6)


def test_an_infinite_gradient_of_gelu_is_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gelu, "_SMALL", 0)
    x, grad = torch.randn(4, 6), torch.randn(4, 6)
    grad[0, 0], grad[1, 1], grad[2, 2] = INF, -INF, NAN
    dx, dbias = gelu_backward(grad, x, torch.zeros(6), "tanh", (True, True))
    want = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    assert dx is not None
    torch.testing.assert_close(dx, want, rtol=2e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(dbias, want.sum(0), rtol=2e-5, atol=1e-6, equal_nan=True)


def test_small_gelu_is_the_large_one() -> None:
    x, bias = torch.randn(8, 100), torch.randn(100)
    for form in ("tanh", "none"):
        large = gelu_forward(x.repeat(3, 1), bias, form)
        torch.testing.assert_close(gelu_forward(x, bias, form), large[:8], rtol=1e-6, atol=1e-6)


# --- the bits of dropout ---


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10 as the paper has it, in numpy's uint64: nothing here comes from fusedops."""
    c, (k0, k1) = [word.astype(np.uint64) for word in counter], key
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        one, two = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(two >> half) ^ c[1] ^ np.uint64(k0), two & low, (one >> half) ^ c[3] ^ np.uint64(k1), one & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def words_of(seed: int, first: int, count: int) -> np.ndarray:
    """The words of elements ``first`` to ``first + count``."""
    index = np.arange(first, first + count, dtype=np.uint64)
    unit = np.unique(index // np.uint64(4))
    zero = np.zeros_like(unit)
    counter = [unit & np.uint64(0xFFFFFFFF), unit >> np.uint64(32), zero, zero]
    words = np.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), -1).reshape(-1)
    return words[first % 4 :][:count]


# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, answer
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = [0, 1234567890123456789, -(2**63) + 5]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_the_independent_philox_knows_the_published_answers(counter: str, key: str, answer: str) -> None:
    words = [np.array([int(word, 16)]) for word in counter.split()]
    k0, k1 = (int(word, 16) for word in key.split())
    assert [int(word[0]) for word in philox(words, (k0, k1))] == [int(word, 16) for word in answer.split()]


def test_the_kernel_knows_the_published_answer() -> None:
    words = Keep(0, 0.5, 4).words(0, 1)
    assert [int(word) + 2**31 for word in words] == [int(word, 16) for word in KNOWN[0][2].split()]


@pytest.mark.parametrize("seed", SEEDS)
def test_first_million_bits(seed: int) -> None:
    for p in (0.1, 0.75):
        y = dropout_forward(torch.ones(1000, 1000), None, None, p, True, torch.tensor([seed]))
        wanted = torch.from_numpy(words_of(seed, 0, 10**6) >= round(p * 2**32))
        assert torch.equal(y.view(-1) != 0, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("first", [0, 1, 2, 3, 4, 1001, 2**31, 2**32 - 3, 2**33 + 1, 2**34 - 9, 2**34 - 203, 2**50 + 6])
def test_any_stretch(first: int, seed: int) -> None:
    """2**34 elements are 2**32 counters: there the counter's second word steps."""
    for count in (1, 2, 5, 8, 203):
        kept = Keep(seed, 0.3, 203)(first, count)
        assert kept.dtype is torch.int32
        assert torch.equal(kept.bool(), torch.from_numpy(words_of(seed, first, count) >= round(0.3 * 2**32)))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1 / 3])
def test_keep_rate(p: float) -> None:
    n = 2**21
    y = dropout_forward(torch.ones(n), None, None, p, True, torch.tensor([11]))
    assert abs(int((y != 0).sum()) - n * (1 - p)) < 4 * math.sqrt(n * p * (1 - p))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - p)).item()}


@pytest.mark.usefixtures("slabs")
def test_the_mask_is_of_the_linear_index() -> None:
    """Whatever the shape, the strides and the slabs are."""
    x, seed = torch.ones(2, 3, 70, 5), torch.tensor([99])
    mask = dropout_forward(x.view(-1), None, None, 0.4, True, seed)
    assert torch.equal(mask != 0, torch.from_numpy(words_of(99, 0, x.numel()) >= round(0.4 * 2**32)))
    for shape in ((2100,), (30, 70), (2, 1050), (7, 5, 60), (2, 3, 70, 5), (1, 2100, 1)):
        for dtype in DTYPES:
            for ones in (torch.ones(shape), torch.ones(shape[::-1]).permute(*reversed(range(len(shape))))):
                y = dropout_forward(ones.to(dtype), None, None, 0.4, True, seed)
                assert torch.equal(y.view(-1) != 0, mask != 0)
    odd = torch.randn(70, 30).T
    for residual in (None, torch.randn(30, 70), torch.randn(70, 30).T):
        again = dropout_forward(odd.contiguous(), None, residual, 0.4, True, seed)
        assert torch.equal(dropout_forward(odd, None, residual, 0.4, True, seed), again)


# --- bias_dropout, bias_dropout_add ---


def check_dropout(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, grad: Tensor | None = None
) -> None:
    dtype = residual.dtype if residual is not None else x.dtype
    if residual is None and bias is not None:
        dtype = torch.promote_types(dtype, bias.dtype)
    grad = torch.randn(x.shape).to(dtype) if grad is None else grad
    seed = torch.tensor([2**40 + 17])
    unchanged = Unchanged(x, bias, residual, grad, seed)
    keep = torch.from_numpy(words_of(2**40 + 17, 0, x.numel()) >= round(p * 2**32)).view(x.shape)
    scale = 1 / (1 - p) if p < 1 else 0.0
    taken = [None if t is None else t.to(dtype if residual is not None else t.dtype).double() for t in (x, bias)]
    u = taken[0] if taken[1] is None else taken[0] + taken[1]
    y = dropout_forward(x, bias, residual, p, True, seed)
    fresh(y, x, bias, residual)
    wanted = torch.where(keep, u * scale, 0.0)
    close(y, wanted if residual is None else residual.double() + wanted, dtype, 4)
    assert (y == (0 if residual is None else residual))[~keep].all()

    arithmetic = F64 if dtype is F64 else F32  # what is float64 need be no better than this
    du = torch.where(keep, grad.double() * scale, 0.0)
    for needs in ((True, True), (True, False), (False, True)):
        dx, dbias = dropout_backward(grad, seed, bias, p, True, x.dtype, needs)
        assert (dx is not None) == needs[0]
        assert (dbias is not None) == (needs[1] and bias is not None)
        if dx is not None:
            fresh(dx, grad)
            close(dx.to(arithmetic), du, arithmetic, 4) if x.dtype is F64 else close(dx, du, x.dtype, 4)
            assert torch.equal(dx != 0, keep & (grad != 0))
        if bias is not None and dbias is not None:
            fresh(dbias, grad, bias, dx)
            assert dbias.shape == bias.shape
            sums = du.sum_to_size(bias.shape)
            close(dbias.to(arithmetic), sums, arithmetic, 8) if bias.dtype is F64 else close(dbias, sums, bias.dtype, 8)
    unchanged.check()


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize(("shape", "bias_shape"), SHAPES)
def test_dropout(shape: tuple[int, ...], bias_shape: tuple[int, ...] | None) -> None:
    for x_dtype, bias_dtype in MIXED:
        for x in layouts(shape, x_dtype) if x_dtype is bias_dtype else [torch.randn(shape).to(x_dtype)]:
            bias = None if bias_shape is None else torch.randn(bias_shape).to(bias_dtype)
            check_dropout(x, bias, None, 0.3)


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize(("shape", "bias_shape"), SHAPES)
def test_dropout_add(shape: tuple[int, ...], bias_shape: tuple[int, ...] | None) -> None:
    mixed = [(BF16, F32), (F32, BF16), (F64, F16), (F16, F64)]
    for x_dtype, residual_dtype in [*((dtype, dtype) for dtype in DTYPES), *mixed]:
        bias_dtype = torch.promote_types(x_dtype, residual_dtype)
        every = x_dtype is residual_dtype is F32
        for residual in layouts(shape, residual_dtype) if every else [torch.randn(shape).to(residual_dtype)]:
            bias = None if bias_shape is None else torch.randn(bias_shape).to(bias_dtype)
            check_dropout(torch.randn(shape).to(x_dtype), bias, residual, 0.6)


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("p", [1e-12, 0.1, 0.5, 0.9, 1 - 1e-5, 1 - 1e-12, 1.0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_probability(dtype: torch.dtype, p: float) -> None:
    for residual in (None, torch.randn(3, 50).to(dtype)):
        scale = torch.ones(3, 50) / max(1.0, 1 / (1 - p) if p < 1 else 1.0)  # so that nothing overflows
        check_dropout(scale.to(dtype), torch.zeros(50).to(dtype), residual, p, scale.to(dtype))


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropped_is_exact_whatever_it_was(dtype: torch.dtype) -> None:
    seed, residual = torch.tensor([4]), torch.randn(6, 50).to(dtype)
    keep = torch.from_numpy(words_of(4, 0, 300) >= 2**31).view(6, 50)
    for junk in (NAN, INF, -INF, torch.finfo(dtype).max):
        x = torch.randn(6, 50).to(dtype)
        dirty = torch.where(keep, x, junk).to(dtype)
        assert torch.equal(
            dropout_forward(dirty, None, None, 0.5, True, seed)[~keep], torch.zeros(int((~keep).sum()), dtype=dtype)
        )
        assert torch.equal(dropout_forward(dirty, None, residual, 0.5, True, seed)[~keep], residual[~keep])
        all_junk = torch.full((6, 50), junk, dtype=dtype)
        assert torch.equal(dropout_forward(all_junk, None, None, 1.0, True, seed), torch.zeros(6, 50, dtype=dtype))
        y = dropout_forward(all_junk, None, residual, 1.0, True, seed)
        assert torch.equal(y, residual)
        fresh(y, residual)
        dx, dbias = dropout_backward(dirty, seed, torch.randn(50).to(dtype), 0.5, True, dtype, (True, True))
        assert dx is not None
        assert dbias is not None
        assert (dx[~keep] == 0).all()
        assert dbias.isfinite().all()
        dx, dbias = dropout_backward(all_junk, seed, torch.randn(50).to(dtype), 1.0, True, dtype, (True, True))
        assert dx is not None
        assert dbias is not None
        assert (dx == 0).all()
        assert (dbias == 0).all()
    kept = dropout_forward(torch.full((6, 50), NAN, dtype=dtype), None, None, 0.5, True, seed)
    assert torch.equal(kept.isnan(), keep)


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_nothing_is_dropped(dtype: torch.dtype) -> None:
    seed = torch.tensor([4])
    for p, training, given in (
        (0.0, True, seed),
        (0, True, seed),
        (0.3, False, seed),
        (0.0, True, None),
        (1.0, False, None),
    ):
        for x in layouts((6, 50), dtype):
            bias, residual, grad = (torch.randn(size).to(dtype) for size in ((50,), (6, 50), (6, 50)))
            u = x.double() + bias.double()
            close(dropout_forward(x, bias, None, p, training, given), u.to(dtype).double(), dtype)
            close(dropout_forward(x, bias, residual, p, training, given), u + residual.double(), dtype, 2)
            plain = dropout_forward(x, None, None, p, training, given)
            assert torch.equal(plain, x)
            fresh(plain, x)
            dx, dbias = dropout_backward(grad, given, bias, p, training, dtype, (True, True))
            assert dx is not None
            assert torch.equal(dx, grad)
            fresh(dx, grad)
            assert dbias is not None
            close(dbias, grad.double().sum(0), dtype, 4)
            for given_grad in layouts((6, 50), dtype):  # that of the bias alone, as autograd asks for it
                none, alone = dropout_backward(given_grad, given, bias, p, training, dtype, (False, True))
                assert none is None
                assert alone is not None
                close(alone, given_grad.double().sum(0), dtype, 4)


def test_forward_and_backward_use_one_mask() -> None:
    x, bias, residual = torch.randn(300, 1000, requires_grad=True), torch.randn(1000), torch.randn(300, 1000)
    for call in (
        lambda: fusedops.bias_dropout(x, bias, 0.4, backend="eager"),
        lambda: fusedops.bias_dropout_add(x, bias, residual, 0.4, backend="eager") - residual,
    ):
        y = call()
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx == 0, y == 0)
        assert torch.equal(dx[dx != 0], torch.full_like(dx[dx != 0], 1 / 0.6))


def test_the_generator_governs() -> None:
    x = torch.ones(4000)

    def draw(seed: int | None = None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return fusedops.bias_dropout(x, p=0.5, backend="eager")

    first = draw(1)
    assert not torch.equal(first, draw())
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, draw(2))
    with torch.random.fork_rng():
        inside = draw(7)
    assert torch.equal(draw(7), inside)
    state = torch.get_rng_state()
    fusedops.bias_dropout(x, p=0.0, backend="eager")
    fusedops.bias_dropout_add(x, None, x, 0.5, training=False, backend="eager")
    fusedops.bias_dropout(x, p=0.5, seed=3, backend="eager")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_float32_residual_is_not_narrowed() -> None:
    x, bias, residual = torch.randn(50, 70).to(BF16), torch.randn(70).to(BF16), torch.randn(50, 70)
    seed, keep = torch.tensor([5]), torch.from_numpy(words_of(5, 0, 3500) >= 2**31).view(50, 70)
    y = dropout_forward(x, bias, residual, 0.5, True, seed)
    exact = residual.double() + torch.where(keep, (x.double() + bias.double()) * 2, 0.0)
    close(y, exact, F32, 2)
    # and the other way: x is rounded to the residual's dtype before anything is added
    x, residual = 100 + torch.randn(50, 70), torch.zeros(50, 70, dtype=BF16)
    assert torch.equal(dropout_forward(x, None, residual, 0.5, False, None), x.to(BF16))
    y = dropout_forward(x, torch.full((70,), -100.0), residual, 0.5, False, None)
    assert torch.equal(y, (x.to(BF16).float() - 100).to(BF16))


# --- all of them ---

SIZES = [
    ((1, 262_144), (262_144,)),
    ((3, 262_145), (262_145,)),
    ((1_048_577,), (1,)),
    ((700, 1111), (1111,)),
    ((700, 1111), (700, 1)),
    ((2, 3, 130, 1030), (1030,)),
    ((5, 7, 30_011), (7, 30_011)),
    ((90_000, 7), (7,)),
    ((600, 1000), (600, 1000)),
]


@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32)])
@pytest.mark.parametrize(("shape", "bias_shape"), SIZES)
def test_true_sizes(
    shape: tuple[int, ...], bias_shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Slabs as they are in use, with sizes that divide nothing: rows within a slab, and slabs within a row."""
    x, bias, seed = torch.randn(shape).to(dtypes[0]), torch.randn(bias_shape).to(dtypes[1]), torch.tensor([-3])
    dtype = torch.promote_types(*dtypes)
    residual, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    u, wide = x.double() + bias.double(), grad.double()
    close(gelu_forward(x, bias, "tanh"), torch.nn.functional.gelu(u, approximate="tanh"), dtype)
    du = torch.ops.aten.gelu_backward(wide, u, approximate="tanh")
    dx, dbias = gelu_backward(grad, x, bias, "tanh", (True, True))
    assert dx is not None
    assert dbias is not None
    close(dx, du, dtypes[0], 2)
    sums = 1 + math.sqrt(x.numel() / bias.numel())  # of so many roundings, at random
    close(dbias, du.sum_to_size(bias_shape), dtypes[1], sums)

    keep = torch.from_numpy(words_of(-3, 0, x.numel()) >= round(0.1 * 2**32)).view(shape)
    dropped = torch.where(keep, u / 0.9, 0.0)
    close(dropout_forward(x, bias, None, 0.1, True, seed), dropped, dtype)
    close(dropout_forward(x, bias, residual, 0.1, True, seed), residual.double() + dropped, dtype)
    du = torch.where(keep, wide / 0.9, 0.0)
    dx, dbias = dropout_backward(grad, seed, bias, 0.1, True, dtypes[0], (True, True))
    assert dx is not None
    assert dbias is not None
    close(dx, du, dtypes[0])
    close(dbias, du.sum_to_size(bias_shape), dtypes[1], sums)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_bias_gradient_has_the_same_bits_on_every_run_and_with_any_number_of_threads(dtype: torch.dtype) -> None:
    x, grad, seed = torch.randn(700, 1111).to(dtype), torch.randn(700, 1111).to(dtype), torch.tensor([8])
    for shape in ((1111,), (700, 1), ()):
        bias = torch.randn(shape).to(dtype)
        found: list[tuple[Tensor | None, ...]] = []
        for threads in (1, 1, 2, 3):
            torch.set_num_threads(threads)
            _, one = gelu_backward(grad, x, bias, "tanh", (threads == 3, True))
            _, two = dropout_backward(grad, seed, bias, 0.1, True, dtype, (threads == 3, True))
            _, three = gelu_backward(grad, x, bias, "none", (threads == 3, True))
            _, four = dropout_backward(grad, None, bias, 0.0, True, dtype, (False, True))
            found.append((one, two, three, four))
        for sums in found:
            for one, first in zip(sums, found[0]):
                assert one is not None
                assert first is not None
                assert torch.equal(one, first)


def test_the_bias_gradient_is_summed_in_float32() -> None:
    """4096 ones of bfloat16 summed in bfloat16 would be 256."""
    grad, bias = torch.ones(4096, 8, dtype=BF16), torch.zeros(8, dtype=BF16)
    _, dbias = dropout_backward(grad, None, bias, 0.5, False, BF16, (True, True))
    assert dbias is not None
    assert torch.equal(dbias, torch.full((8,), 4096, dtype=BF16))
    _, dbias = gelu_backward(2 * grad, torch.zeros(4096, 8, dtype=BF16), bias, "tanh", (False, True))
    assert dbias is not None
    assert torch.equal(dbias, torch.full((8,), 4096, dtype=BF16))


def test_no_gradient_is_made_that_is_not_needed() -> None:
    x, bias = torch.randn(6, 3000), torch.randn(3000)
    assert gelu_backward(x, x, bias, "tanh", (False, False)) == (None, None)
    assert dropout_backward(x, None, bias, 0.3, False, F32, (False, False)) == (None, None)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 4)])
def test_empty(shape: tuple[int, ...]) -> None:
    seed = torch.tensor([8])
    for dtype, form in itertools.product(DTYPES, ("tanh", "none")):
        x = torch.randn(shape).to(dtype)
        for bias in (None, torch.randn(shape[-1:]).to(dtype), torch.randn(1).to(dtype)):
            assert gelu_forward(x, bias, form).shape == shape
            for p in (0.5, 1.0):
                assert dropout_forward(x, bias, None, p, True, seed).shape == shape
                assert dropout_forward(x, bias, x, p, True, seed).shape == shape
                for dx, dbias in (
                    gelu_backward(x, x, bias, form, (True, True)),
                    dropout_backward(x, seed, bias, p, True, dtype, (True, True)),
                ):
                    assert dx is not None
                    assert dx.shape == shape
                    if bias is not None:
                        assert dbias is not None
                        assert dbias.shape == bias.shape
                        assert (dbias == 0).all()


@pytest.mark.usefixtures("slabs")
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_and_grad_mode_change_nothing(dtype: torch.dtype) -> None:
    x, bias, residual, seed = (
        torch.randn(6, 50).to(dtype),
        torch.randn(50),
        torch.randn(6, 50).to(dtype),
        torch.tensor([5]),
    )

    def everything() -> list[Tensor | None]:
        made: list[Tensor | None] = []
        for form in ("tanh", "none"):
            made.append(gelu_forward(x, bias, form))
            made.extend(gelu_backward(made[-1], x, bias, form, (True, True)))  # pyright: ignore[reportArgumentType]
        made.append(dropout_forward(x, bias, None, 0.3, True, seed))
        made.append(dropout_forward(x, bias, residual, 0.3, True, seed))
        made.extend(dropout_backward(residual, seed, bias, 0.3, True, dtype, (True, True)))
        return made

    with torch.no_grad():
        plain = everything()
    for mode in (torch.enable_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            for one, other in zip(everything(), plain):
                torch.testing.assert_close(one, other, atol=0, rtol=0)


def test_the_default_device_does_not_matter() -> None:
    x, bias, seed = torch.randn(6, 3000), torch.randn(3000), torch.tensor([5])
    with torch.device("meta"):
        for made in (
            gelu_forward(x, bias, "tanh"),
            *gelu_backward(x, x, bias, "tanh", (True, True)),
            dropout_forward(x, bias, x, 0.3, True, seed),
            *dropout_backward(x, seed, bias[:1], 0.3, True, F32, (True, True)),
        ):
            assert made is not None
            assert made.is_cpu


def test_other_devices_are_asked_nothing() -> None:
    """On the meta device any look at the data raises: what runs there synchronises nowhere."""
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    for dtype, form in itertools.product(DTYPES, ("tanh", "none")):
        x = torch.empty(90, 80, dtype=dtype, device="meta").T
        for bias in (None, torch.empty(90, device="meta")):
            made = [gelu_forward(x, bias, form), *gelu_backward(x, x, bias, form, (True, True))]
            made += [dropout_forward(x, bias, residual, 0.5, True, seed) for residual in (None, x)]
            made += dropout_backward(x, seed, bias, 0.5, True, dtype, (True, True))
            for y in made[:2] + made[3:6]:
                assert y is not None
                assert y.shape == x.shape
                assert y.is_contiguous()


def test_the_exact_form_elsewhere() -> None:
    """Not by F.gelu, which makes the tanh form of either on npu."""
    x = torch.linspace(-8, 8, 1001)
    y = _gelu._erf_form(x)
    torch.testing.assert_close(y.double(), gelu_of(x.double(), "none"), atol=2e-6, rtol=1.3e-6)


def peak(function: Callable[[], object], size: int) -> float:
    """Bytes allocated at the worst moment, as a multiple of ``size``; by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = function()
    assert result is not None
    events = [(e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = worst = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        live += change
        worst = max(worst, live)
    assert live >= size, "the profiler saw no allocation: this test would pass whatever happened"
    return worst / size


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_peak_memory(dtype: torch.dtype) -> None:
    """What is taken beside the result is a matter of the slab, not of the tensor."""
    shape, seed = (16384, 1024) if dtype is BF16 else (8192, 1024), torch.tensor([5])
    x, bias = torch.randn(shape).to(dtype), torch.randn(1024).to(dtype)
    size = x.numel() * x.element_size()
    assert size == 2**25
    assert peak(lambda: x + bias + 1, size) > 1.9
    assert peak(lambda: gelu_forward(x, bias, "tanh"), size) < 1.1
    assert peak(lambda: gelu_backward(x, x, bias, "tanh", (True, True)), size) < 1.25
    assert peak(lambda: dropout_forward(x, bias, None, 0.1, True, seed), size) < 1.25
    assert peak(lambda: dropout_forward(x, bias, x, 0.1, True, seed), size) < 1.25
    assert peak(lambda: dropout_backward(x, seed, bias, 0.1, True, dtype, (True, True)), size) < 1.35
