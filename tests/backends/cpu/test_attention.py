"""attention of few queries over many keys, whose parts are joined, and in tiles; by one thread or by several."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from itertools import cycle

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.ops import OPS

pytestmark = pytest.mark.usefixtures("on_cpu")
KEYS = 700  # three parts


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 8, 3, 40), (2, 2, KEYS, 40), (2, 2, KEYS, 24)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def mask() -> Tensor:
    """Return a mask whose first part is hidden from one query, and every key from another."""
    masked = torch.rand(2, 1, 3, KEYS, generator=torch.Generator().manual_seed(1)) < 0.3
    masked[:, :, 0, :300] = True
    masked[:, :, 1] = True
    return masked


def attention(*given: Tensor, masked: Tensor | None = None, window: tuple[int, int] | None = None) -> list[Tensor]:
    return [*fusedops.attention(*given, masked, window=window, return_lse=True, backend="cpu")]


@pytest.fixture(params=[4])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


on_threads = pytest.mark.parametrize("threads", [1, 2, 4], indirect=True)  # of bits; values are those of 4


@pytest.mark.parametrize("window", [None, (200, 0)])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)
def test_the_parts_of_many_keys_are_joined(
    dtype: torch.dtype, close: float, is_masked: bool, window: tuple[int, int] | None, threads: int
) -> None:
    given, masked = tensors(dtype), mask() if is_masked else None
    with fusedops.use(fallback="raise"):
        out, lse = attention(*given, masked=masked, window=window)
    wanted = OPS["attention"].reference(*(each.double() for each in given), masked, None, "none", window, True)
    torch.testing.assert_close(out.double(), wanted[0], rtol=close, atol=close)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-6, atol=1e-6)


@on_threads
@pytest.mark.parametrize("rows", ["any", "independent"])
def test_bits_depend_neither_on_threads_nor_on_other_rows(rows: str, threads: int) -> None:
    q, k, v = tensors()
    one = torch.get_num_threads()
    with fusedops.use(rows=rows):
        out, lse = attention(q, k, v, masked=mask())
        torch.set_num_threads(1)
        for got, wanted in zip((out, lse), attention(q, k, v, masked=mask())):
            assert torch.equal(got, wanted)
        torch.set_num_threads(one)
        if rows == "any":  # one query is not computed in tiles
            return
        for query in range(3):
            alone = attention(q[1:, :, query : query + 1], k[1:], v[1:], masked=mask()[1:, :, query : query + 1])
            assert torch.equal(alone[0][0, :, 0], out[1, :, query])
            assert torch.equal(alone[1][0, :, 0], lse[1, :, query])


def test_gradients_over_many_keys(threads: int) -> None:
    found = list[tuple[Tensor, ...]]()
    for dtype in (torch.float32, torch.float64):
        leaves = [each.to(dtype).requires_grad_() for each in tensors()]
        if dtype is torch.float32:
            out, lse = attention(*leaves, masked=mask())
        else:
            out, lse = OPS["attention"].reference(*leaves, mask(), None, "none", None, True)
        loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).square().sum()
        found.append(torch.autograd.grad(loss, leaves))
    for got, wanted in zip(*found):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("causal", ["none", "upper_left", "lower_right"])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=["float32", "bfloat16"]
)
def test_tiles_over_several_blocks(dtype: torch.dtype, close: float, causal: str, threads: int) -> None:
    """With keys that nothing sees, which are not finite, a window, and rows that see nothing."""
    generator = torch.Generator().manual_seed(2)
    shapes = (1, 4, 210, 40), (1, 2, 530, 40), (1, 2, 530, 72), (1, 4, 210, 72)
    *given, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    masked = torch.rand(1, 1, 210, 530, generator=generator) < 0.2
    masked[..., 500:] = masked[:, :, 17] = True
    given[1][:, :, 500:], given[2][:, :, 500:] = torch.nan, torch.inf
    found = list[tuple[Tensor, ...]]()
    for wide in (False, True):
        leaves = [(each.double() if wide else each).detach().requires_grad_() for each in given]
        if wide:
            out, lse = OPS["attention"].reference(*leaves, masked, None, causal, (180, 60), True)
        else:
            alignment = False if causal == "none" else causal
            with fusedops.use(fallback="raise"):
                out, lse = fusedops.attention(
                    *leaves, masked, causal=alignment, window=(180, 60), return_lse=True, backend="cpu"
                )
        gradients = torch.autograd.grad((out, lse), leaves, (grad.to(out), torch.ones_like(lse)))
        found.append((out, lse, *gradients))
    for got, wanted in zip(*found):
        seen = wanted.masked_fill(wanted.isinf(), 0.0)
        assert torch.equal(got.isinf(), wanted.isinf())
        distance = (got.double().masked_fill(got.isinf(), 0.0) - seen).abs().max() / seen.abs().max()
        assert distance <= close


@on_threads
def test_gradients_in_chunks_of_rows_have_the_same_bits_on_any_threads(threads: int) -> None:
    """Seven chunks, which add to the sums of twelve parts of the keys in turn."""
    generator = torch.Generator().manual_seed(3)
    leaves = [torch.randn(1, 1, 3000, 16, generator=generator).requires_grad_() for _ in range(3)]
    found = list[tuple[Tensor, ...]]()
    for count in (1, *[torch.get_num_threads()] * 4):
        torch.set_num_threads(count)
        out = fusedops.attention(*leaves, causal=True, backend="cpu")
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(torch.equal(got, wanted) for each in found[1:] for got, wanted in zip(each, found[0]))


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_the_gradients_of_many_chunks_take_no_more_memory_than_one() -> None:
    """Of 16 chunks, of which each has sums for dk and dv of all keys: 64 MiB."""
    code = """
    import re, torch, fusedops
    def peak():
        return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
    q, k, v = (torch.randn(1, 4, size, 16, requires_grad=True) for size in (6400, 8192, 8192))
    out = fusedops.attention(q, k, v, window=(0, 0), backend="cpu").sum()
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    out.backward()
    print(peak() - before)
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 20 * 1024, "KiB, of which the gradients are 6"


def seen_by(form: str, queries: int, keys: int) -> Tensor:
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if form.startswith(("causal", "window")):
        seen = seen.tril(keys - queries)
    if form.startswith("window"):
        seen = seen.triu(keys - queries - 4)
    if form == "mask":
        seen[:, ::3] = False
    return seen


def attend(form: str, seen: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if form == "packed":
        bounds = [torch.tensor([0, each.shape[2]]) for each in (q, k)]
        packed = [each[0].transpose(0, 1) for each in (q, k, v)]
        return fusedops.varlen_attention(*packed, *bounds).transpose(0, 1)[None]
    if form.startswith(("causal", "window")):
        window = (4, 0) if form.startswith("window") else None
        return fusedops.attention(q, k, v, causal="lower_right", window=window)
    return fusedops.attention(q, k, v, ~seen if form == "mask" else None)


FORMS = ["plain", "mask", "causal", "window", "packed", "rows", "window, rows"]
#: Few queries and keys, few queries, and tiles: each form in two of them.
LARGE = [(form, 3, 300) for form in FORMS] + [(form, *sizes) for form, sizes in zip(FORMS, cycle([(3, 6), (60, 300)]))]


@pytest.mark.parametrize(("form", "queries", "keys"), LARGE)
def test_gradients_of_large_scores_are_as_exact_as_those_of_torch(form: str, queries: int, keys: int) -> None:
    """Scores of up to 70: a last bit of one is 2**-17 of its probability."""
    seen, errors = seen_by(form, queries, keys), torch.zeros(2, 3, dtype=torch.float64)
    for seed in range(20):
        torch.manual_seed(seed)
        given = [torch.empty(1, 4, length, 8).uniform_(-9, 9) for length in (queries, keys, keys)]
        grad = torch.randn_like(given[0])

        def gradients(dtype: torch.dtype, op: Callable[..., Tensor]) -> list[Tensor]:
            args = [each.to(dtype, copy=True).requires_grad_() for each in given]  # noqa: B023
            return [each.double() for each in torch.autograd.grad(op(*args), args, grad.to(dtype))]  # noqa: B023

        of_torch = partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=seen)
        want = gradients(torch.float64, of_torch)
        with fusedops.use("cpu", fallback="raise", rows="independent" if form.endswith("rows") else None):
            got = gradients(torch.float32, partial(attend, form, seen))
        for number, each in enumerate((got, gradients(torch.float32, of_torch))):
            errors[number] += torch.stack([(x - y).square().mean() for x, y in zip(each, want)])
    ratios = (errors[0] / errors[1]).sqrt()
    assert ratios.max() < 1.3, ratios


def test_gradients_have_the_same_bits_whether_weights_are_kept_or_computed_again() -> None:
    """Those of 700 queries and 1,400 keys take more memory than is kept for them; most have a gradient of 0."""
    generator = torch.Generator().manual_seed(4)
    q, k, v, grad = (torch.randn(1, 1, length, 8, generator=generator) for length in (700, 1400, 1400, 700))
    grad[:, :, 60:] = 0
    found = list[tuple[Tensor, ...]]()
    for queries in (60, 700):
        leaves = [each.detach().requires_grad_() for each in (q[:, :, :queries], k, v)]
        with fusedops.use("cpu", fallback="raise", rows="independent"):
            out = fusedops.attention(*leaves)
        found.append(torch.autograd.grad(out, leaves, grad[:, :, :queries]))
    (of_few, *of_keys), (of_many, *wanted) = found
    assert torch.equal(of_few, of_many[:, :, :60])
    assert all(torch.equal(got, want) for got, want in zip(of_keys, wanted))
