"""The eager softmax kernels against the definition in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fusedops_eager import _slabs
from fusedops_eager import _softmax as kernels
from fusedops_eager._softmax import softmax_backward, softmax_forward

INF, NAN = float("inf"), float("nan")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [F16, BF16, F32, F64]
TOLERANCE = {F16: (1e-3, 1e-3), BF16: (1e-2, 1.6e-2), F32: (2e-6, 1.3e-6), F64: (1e-12, 1e-12)}
MASKS = ["none", "b1qk", "11qk", "b11k", "bhqk", "1hqk", "b1q1", "qk", "1k", "k", "scalar", "expanded"]


@pytest.fixture(params=["plain", "slabs", "tiny slabs"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of the CPU kernel at sizes a test can afford: slabs of 64 elements cross every boundary."""
    if request.param != "plain":
        monkeypatch.setattr(kernels, "_MAX_PLAIN_ELEMENTS", 0)
    if request.param == "tiny slabs":
        monkeypatch.setattr(_slabs, "SLAB", 128)
    return request.param


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine the threads' barriers cost ten times what these small sizes do; see ``test_two_threads``."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def make_mask(kind: str, b: int, h: int, sq: int, sk: int) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "expanded":
        return (torch.rand(b, 1, sq, sk) < 0.4).expand(b, h, sq, sk)
    sizes = {"b": b, "h": h, "q": sq, "k": sk, "1": 1}
    return torch.rand([] if kind == "scalar" else [sizes[c] for c in kind]) < 0.4


def masked_of(x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    masked = torch.zeros(x.shape, dtype=torch.bool)
    if mask is not None:
        masked |= mask != 0
    if causal:
        masked |= torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return masked


def reference(x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    masked = masked_of(x, mask, causal)
    scores = torch.where(masked, -INF, x.double() * scale)
    return torch.where(masked, 0.0, torch.softmax(scores, -1))


def check(x: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    """Forward, then backward from what forward gave; neither may write an input."""
    before = x.clone(), None if mask is None else mask.clone()
    y = softmax_forward(x, mask, scale, causal)
    assert y.dtype is x.dtype
    assert y.shape == x.shape
    assert y.is_contiguous()
    assert not y._is_view()
    atol, rtol = TOLERANCE[x.dtype]
    torch.testing.assert_close(y.double(), reference(x, mask, scale, causal), atol=atol, rtol=rtol, equal_nan=True)
    assert (y[masked_of(x, mask, causal)] == 0).all()
    assert torch.equal(x.view(torch.uint8) if x.is_contiguous() else x.nan_to_num(), _bits(before[0], x))
    assert mask is None or torch.equal(mask, before[1])

    grad = torch.randn(x.shape).to(x.dtype)
    kept = grad.clone(), y.clone()
    dx = softmax_backward(grad, y, scale, causal)
    assert dx.dtype is x.dtype
    assert dx.is_contiguous()
    g, p = grad.double(), y.double()
    wanted = scale * p * (g - (g * p).sum(-1, keepdim=True))
    torch.testing.assert_close(dx.double(), wanted, atol=atol * max(1, abs(scale)), rtol=rtol, equal_nan=True)
    assert (dx[(y == 0).all(-1)] == 0).all()
    assert torch.equal(grad, kept[0])
    assert torch.equal(y.nan_to_num(), kept[1].nan_to_num())
    return y


def _bits(before: Tensor, x: Tensor) -> Tensor:
    return before.view(torch.uint8) if x.is_contiguous() else before.nan_to_num()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str, causal: bool) -> None:
    for dtype, (sq, sk), scale in itertools.product(DTYPES, [(9, 9), (5, 12), (13, 6), (1, 40)], [0.125, -0.7, 1.0]):
        mask = make_mask(kind, 3, 2, sq, sk)
        check((3 * torch.randn(3, 2, sq, sk)).to(dtype), mask, scale, causal)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "shape", [(6, 7), (2, 6, 7), (2, 3, 6, 7), (2, 1, 3, 6, 7), (2, 2, 3, 1, 6, 7), (40, 90), (1, 300), (3, 1)]
)
def test_ranks(shape: tuple[int, ...]) -> None:
    for causal in (False, True):
        x = torch.randn(shape)
        check(x, None, 0.3, causal)
        check(x, torch.rand(shape) < 0.5, 0.3, causal)
        check(x, torch.rand(shape[-2:]) < 0.5, 0.3, causal)
        check(x, torch.rand((*shape[:-2], 1, shape[-1])) < 0.5, 0.3, causal)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_uint8_masks(dtype: torch.dtype) -> None:
    mask = torch.tensor([0, 1, 7, 255], dtype=torch.uint8)[torch.randint(4, (3, 1, 9, 12))]
    check(torch.randn(3, 2, 9, 12).to(dtype), mask, 0.5)
    check(torch.randn(3, 2, 9, 12).to(dtype), mask, 0.5, causal=True)
    check(torch.randn(12, 9).to(dtype), mask[0, 0].T, 0.5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(dtype: torch.dtype, causal: bool) -> None:
    mask = torch.rand(3, 1, 8, 10) < 0.4
    base = torch.randn(3, 4, 10, 8).to(dtype)
    for scale in (1.0, 0.3):
        for m in (None, mask.transpose(-1, -2).contiguous().transpose(-1, -2)):
            check(base.transpose(-1, -2), m, scale, causal)
            check(base.permute(0, 3, 2, 1)[:, :4, :8, ::1].expand(3, 4, 8, 4), None, scale, causal)
            check(torch.randn(3, 4, 16, 20).to(dtype)[:, :, ::2, ::2], m, scale, causal)
            check(torch.randn(3, 1, 8, 10).to(dtype).expand(3, 4, 8, 10), m, scale, causal)
            check(torch.randn(3, 4, 8, 10).to(dtype).contiguous(memory_format=torch.channels_last), m, scale, causal)
            check(torch.randn(1).to(dtype).expand(3, 4, 8, 10), m, scale, causal)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_any_stride(dtype: torch.dtype) -> None:
    y = torch.softmax(torch.randn(3, 4, 8, 10), -1).to(dtype)
    atol, rtol = TOLERANCE[dtype]
    for scale in (1.0, 0.125, 0.3):
        for grad in (
            torch.ones((), dtype=dtype).expand_as(y),
            torch.randn(3, 4, 10, 8).to(dtype).transpose(-1, -2),
            torch.randn(3, 1, 8, 10).to(dtype).expand_as(y),
            torch.randn(6, 4, 8, 20).to(dtype)[::2, :, :, ::2],
        ):
            for probs in (y, y.contiguous(memory_format=torch.channels_last)):
                dx = softmax_backward(grad, probs, scale, False)
                g, p = grad.double(), y.double()
                wanted = scale * p * (g - (g * p).sum(-1, keepdim=True))
                torch.testing.assert_close(dx.double(), wanted, atol=atol, rtol=rtol)
                assert dx.is_contiguous()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("scale", [0.125, 0.3])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_sums_of_16_bits_are_wide(dtype: torch.dtype, scale: float) -> None:
    """With all gradients near 30, sum(g * y) rounded to the dtype would be wrong by more than what is left of g."""
    y = torch.softmax(torch.randn(20, 1000), -1).to(dtype)
    grad = (30 + 0.1 * torch.randn(20, 1000)).to(dtype)
    g, p = grad.double(), y.double()
    wanted = scale * p * (g - (g * p).sum(-1, keepdim=True))
    error = (softmax_backward(grad, y, scale, False).double() - wanted).abs().max()
    assert error < torch.finfo(dtype).eps * wanted.abs().max()
    scores = torch.zeros(4, 5000, dtype=dtype)  # counted in 16 bits, the ones would stop at 256 or 2048
    assert torch.equal(softmax_forward(scores, None, scale, False), torch.full_like(scores, 1 / 5000))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (2, 0, 4, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    for dtype, causal in itertools.product(DTYPES, [False, True]):
        x = torch.randn(shape).to(dtype)
        check(x, None, 0.5, causal)
        check(x, None, 1.0, causal)
        check(x, torch.ones(shape[-2:], dtype=torch.bool), 0.5, causal)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["b1qk", "bhqk", "qk", "b11k", "b1q1"])
def test_fully_masked_rows_are_zero(kind: str, dtype: torch.dtype) -> None:
    for causal, scale in itertools.product([False, True], [0.125, 0.3]):
        mask = make_mask(kind, 2, 3, 10, 12)
        assert mask is not None
        mask[..., : mask.size(-2) // 2 + 1, :] = True
        y = check(torch.randn(2, 3, 10, 12).to(dtype), mask, scale, causal)
        assert (y[..., 0, :] == 0).all()
    assert (check(torch.randn(2, 3, 10, 12).to(dtype), torch.ones(1, dtype=torch.bool), 0.5) == 0).all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("junk", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_leaks_from_under_the_mask(dtype: torch.dtype, junk: float) -> None:
    kinds = [kind for kind in MASKS if kind not in ("none", "1k", "scalar")]
    for kind, causal, scale in itertools.product(kinds, [False, True], [0.125, -0.3]):
        x = torch.randn(3, 2, 9, 12).to(dtype)
        mask = make_mask(kind, 3, 2, 9, 12)
        masked = masked_of(x, mask, causal)
        dirty = x.masked_fill(masked & (torch.rand(x.shape) < 0.5), junk)
        assert torch.equal(softmax_forward(dirty, mask, scale, causal), softmax_forward(x, mask, scale, causal))
        check(dirty, mask, scale, causal)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_masked_counts(dtype: torch.dtype) -> None:
    for causal, scale in itertools.product([False, True], [0.125, 0.3]):
        x = torch.randn(2, 3, 10, 12).to(dtype)
        mask = torch.rand(2, 1, 10, 12) < 0.4
        mask[..., 4, 0], mask[..., 5, 0], mask[..., 6, :] = False, False, True
        x[..., 4, 0], x[..., 6, 1], x[..., 7, 3] = NAN, NAN, -INF
        x[..., 5, :] = -INF  # unmasked scores all -inf: NaN, as torch gives it
        x[..., 8, 2] = INF
        y = check(x, mask, scale, causal)
        open_ = ~masked_of(x, mask, causal)
        assert torch.equal(y.isnan()[..., 4:6, :], open_[..., 4:6, :])
        assert (y[..., 6, :] == 0).all()
    assert softmax_forward(torch.full((2, 3), -INF), None, 0.5, False).isnan().all()


@pytest.mark.usefixtures("path")
def test_scale_is_not_rounded_to_the_dtype() -> None:
    for dtype in (F16, BF16):
        eps = torch.finfo(dtype).eps
        scale = 0.125 * (1 + 0.49 * eps)  # rounded to the dtype it would be 0.125
        x = (100 * torch.randn(4, 8, 64)).to(dtype)
        exact = reference(x, None, scale, False)
        large = exact > 1e-2
        bound = 0.52 * eps * exact[large]  # one rounding of y
        assert ((reference(x, None, 0.125, False) - exact)[large].abs() > bound).any()
        for mask in (None, torch.zeros(8, 64, dtype=torch.bool)):
            y = softmax_forward(x, mask, scale, False).double()
            assert ((y - exact)[large].abs() <= bound).all()


@pytest.mark.usefixtures("path")
def test_scores_beyond_float16() -> None:
    x = torch.tensor([[60000.0, 50000.0, -60000.0], [1.0, 2.0, 3.0]], dtype=F16)
    check(x, torch.tensor([True, False, False]), 2.0)
    check(x, None, 4.0)
    check(torch.randn(4, 5).to(F16), None, 2.0**-24)


@pytest.mark.usefixtures("path")
def test_any_finite_scale() -> None:
    for dtype, scale in itertools.product(DTYPES, [0.0, -0.0, 5e-324, 1e-40]):
        check(torch.randn(5, 6).to(dtype), torch.rand(5, 6) < 0.5, scale)
        check(torch.randn(5, 6).to(dtype), None, scale, causal=True)
    mask = torch.tensor([False, False, True])
    y = softmax_forward(torch.tensor([[0.5, -0.5, 9.0]] * 2), mask, 3e38, False)
    assert torch.equal(y, torch.tensor([[1.0, 0.0, 0.0]] * 2)) or y[..., :2].isnan().all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    x, grad = torch.randn(2, 3, 8, 9).to(dtype), torch.randn(2, 3, 8, 9).to(dtype)
    for mask, scale in itertools.product([None, torch.rand(2, 1, 8, 9) < 0.5], [1.0, 0.125, 0.3]):
        plain = softmax_forward(x, mask, scale, True), softmax_forward(x, mask, scale, False)
        plain += (softmax_backward(grad, plain[0], scale, True),)
        with torch.autocast("cpu", torch.bfloat16):
            again = softmax_forward(x, mask, scale, True), softmax_forward(x, mask, scale, False)
            again += (softmax_backward(grad, again[0], scale, True),)
        for one, other in zip(plain, again):
            torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.usefixtures("path")
def test_grad_mode_does_not_matter() -> None:
    x, mask = torch.randn(2, 3, 8, 9), torch.rand(2, 1, 8, 9) < 0.5
    with torch.no_grad():
        y = softmax_forward(x, mask, 0.3, True)
    with torch.inference_mode():
        inferred = softmax_forward(x, mask, 0.3, True)
    with torch.enable_grad():
        assert torch.equal(softmax_forward(x, mask, 0.3, True), y)
    assert torch.equal(inferred, y)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(F32, 0.088), (F64, 0.088), (BF16, 0.125), (BF16, 0.088), (F16, 0.25), (F16, 0.3)]
)
def test_true_sizes(dtype: torch.dtype, scale: float) -> None:
    """Slabs as they are in use, with rows and heads that divide nothing."""
    for shape, kind in [((2, 3, 130, 1030), "b1qk"), ((1, 5, 333, 517), "bhqk"), ((1, 1, 3, 300_001), "b11k")]:
        mask = make_mask(kind, *shape)
        check(torch.randn(shape).to(dtype), mask, scale)
        check(torch.randn(shape).to(dtype), mask, scale, causal=True)
    check(torch.randn(3, 700, 400).to(dtype), None, scale)
    check(torch.randn(3, 700, 400).to(dtype), None, scale, causal=True)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_two_threads(dtype: torch.dtype) -> None:
    x, mask = torch.randn(2, 3, 400, 517).to(dtype), make_mask("b1qk", 2, 3, 400, 517)
    one = softmax_forward(x, mask, 0.3, False), softmax_forward(x, mask, 0.3, True)
    torch.set_num_threads(2)  # one_thread sets it back
    assert torch.equal(check(x, mask, 0.3), one[0])
    assert torch.equal(check(x, mask, 0.3, causal=True), one[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_into_its_own_input_gives_the_same_bits(dtype: torch.dtype) -> None:
    """The slabs depend on this; a torch for which it fails needs another kernel."""
    for sk in (1, 7, 8, 33, 1000, 4097):
        x, grad = torch.randn(64, sk).to(dtype), torch.randn(64, sk).to(dtype)
        y = torch._softmax(x, -1, False)
        assert torch.equal(torch._softmax(x, -1, False, out=x), y)
        dx = torch._softmax_backward_data(grad, y, -1, dtype)
        assert torch.equal(torch._softmax_backward_data(grad, y, -1, dtype, grad_input=grad), dx)


def test_other_devices_are_asked_nothing() -> None:
    """On the meta device any look at the data raises: what runs there synchronises nowhere."""
    mask = torch.ones(8, 9, dtype=torch.bool, device="meta")
    for dtype, scale, causal in itertools.product(DTYPES, [1.0, 0.125, 0.3], [False, True]):
        x = torch.empty(2, 3, 80, 90, dtype=dtype, device="meta")
        for m in (None, mask[:1, :1], mask[:1, :1].to(torch.uint8)):
            y = softmax_forward(x, m, scale, causal)
            dx = softmax_backward(y, y, scale, causal)
            assert y.dtype is dx.dtype is dtype
            assert y.shape == dx.shape == x.shape
    assert softmax_forward(x.transpose(-1, -2), None, 1.0, False).is_contiguous()


def peak(function: Callable[[], Tensor]) -> float:
    """Bytes allocated at the worst moment, as a multiple of the result's; by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        result = function()
    events = [(e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = worst = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        live += change
        worst = max(worst, live)
    size = result.numel() * result.element_size()
    assert live >= size, "the profiler saw no allocation: this test would pass whatever happened"
    return worst / size


@pytest.mark.parametrize(("dtype", "scale"), [(F32, 0.3), (BF16, 0.125), (BF16, 0.3)])
def test_peak_memory(dtype: torch.dtype, scale: float) -> None:
    """At most 15 % above the result, whatever the mask; the naive form takes 100 %."""
    b, h, sq, sk = 2, 16, 512, 512
    x = torch.randn(b, h, sq, sk).to(dtype)
    if dtype is F32:
        padding = torch.rand(b, 1, 1, sk) < 0.5
        assert peak(lambda: torch.softmax((x * scale).masked_fill(padding, -INF), -1)) > 1.9
    for kind in ("b1qk", "bhqk", "b11k"):
        mask = make_mask(kind, b, h, sq, sk)
        assert mask is not None
        assert peak(lambda mask=mask: softmax_forward(x, mask, scale, False)) < 1.15, kind
    mask = (torch.rand(b, h, sq, sk) < 0.5).to(torch.uint8)
    mask[..., 300:, :] = 1
    assert peak(lambda: softmax_forward(x, mask, scale, True)) < 1.15
    y = softmax_forward(x, mask, scale, False)
    assert peak(lambda: softmax_backward(y[:1, :1].expand_as(y), y, scale, False)) < 1.15
