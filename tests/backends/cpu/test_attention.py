"""attention of few queries over many keys: the parts of the keys are joined, by one thread or by several."""

from __future__ import annotations

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


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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


def test_bits_depend_neither_on_threads_nor_on_other_rows(threads: int) -> None:
    q, k, v = tensors()
    one = torch.get_num_threads()
    out, lse = attention(q, k, v, masked=mask())
    torch.set_num_threads(1)
    for got, wanted in zip((out, lse), attention(q, k, v, masked=mask())):
        assert torch.equal(got, wanted)
    torch.set_num_threads(one)
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
