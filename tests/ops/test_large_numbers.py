"""Numbers near the ends of float32 and of 16 bits: right where the arithmetic of the contract is finite, else NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pairwise import pairwise
from torch import Tensor

import fusedops
from fusedops import attention

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def heads(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return q, k and v of two heads."""
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(1, 2, length, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    scores = q.double() @ k.double().mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -math.inf)
    return torch.softmax(scores, -1) @ v.double()


@pytest.mark.parametrize(
    ("backend", "causal", "scale", "dtype"),
    pairwise(
        ["eager", "sdpa", "sdpa forward, eager backward"], [False, True], [1e7, 1e10, 4.6e18, -4.6e18, 1e37], DTYPES
    ),
    ids=str,
)
def test_a_huge_scale(backend: str, causal: bool, scale: float, dtype: torch.dtype) -> None:
    if "sdpa" in backend and causal and scale < 0:
        pytest.skip("sdpa refuses it")
    tensors, both = heads(70, dtype), "," in backend
    policy = "sdpa,eager" if both else backend
    with fusedops.use(policy, fallback="silent" if both else "raise"), fusedops.verify("reference"):
        result = attention(*tensors, scale=scale, causal=causal, return_lse=both)
        out = result[0] if both else result
        gradients = torch.autograd.grad(out.sum(), tensors)
    torch.testing.assert_close(out.double(), formula(*tensors, scale, causal), atol=1e-2, rtol=1e-2)
    assert all(bool(each.isfinite().all()) for each in gradients)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [1, 5, 70])
@pytest.mark.parametrize("masked", ["none", "causal", "mask"])
def test_a_query_of_nan_is_a_row_of_nan(backend: str, length: int, masked: str) -> None:
    """torch's kernel has 0 there, with few keys."""
    q, k, v = heads(length)
    mask = torch.zeros(length, length) > 0 if masked == "mask" else None
    with torch.no_grad():
        clean = attention(q, k, v, mask, causal=masked == "causal", backend=backend)
        q[0, 1, 0, 3] = math.nan
    out = attention(q, k, v, mask, causal=masked == "causal", backend=backend)
    with torch.no_grad():
        _, lse = attention(q, k, v, mask, causal=masked == "causal", return_lse=True, backend=backend)
    assert bool(out[0, 1, 0].isnan().all())
    assert bool(lse[0, 1, 0].isnan())
    torch.testing.assert_close(out[:, :1], clean[:, :1])
    torch.testing.assert_close(out[:, 1, 1:], clean[:, 1, 1:])
    dq, *others = torch.autograd.grad(out.sum(), (q, k, v))
    assert bool(dq[0, 1, 0].isnan().all())
    assert all(bool(each[:, :1].isfinite().all()) for each in (dq, *others))


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_the_lowest_number_as_each_query(backend: str, dtype: torch.dtype, size: float) -> None:
    """A score beyond the largest number of the arithmetic is inf, and its row NaN; below it the result is exact."""
    _, k, v = heads(5, dtype)
    q, k = torch.full_like(k, torch.finfo(dtype).min).requires_grad_(), (k.detach() * size).requires_grad_()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    overflows = (q.to(wide) @ k.to(wide).mT).isfinite().logical_not().any(-1)
    assert bool(overflows.any()) == (size == 1.0 and dtype is not torch.float16)
    out = attention(q, k, v, backend=backend)
    assert torch.equal(out.isnan().any(-1), overflows)
    if not overflows.any():
        torch.testing.assert_close(out.double(), formula(q, k, v, 0.25, False), atol=1e-2, rtol=1e-2)
        assert all(bool(each.isfinite().all()) for each in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("chunk", [None, 1])
def test_logits_beyond_float16_on_a_cpu(chunk: int | None) -> None:
    torch.manual_seed(0)  # of 300 draws, one has no logit beyond 65504
    x, weight = torch.full((4, 8), 100.0).half(), torch.randn(10, 8).half() * 300
    target = torch.tensor([0, 1, 2, 3])
    given = [x.requires_grad_(), weight.requires_grad_()]
    wide = [each.detach().double().requires_grad_() for each in given]
    assert bool(((wide[0] @ wide[1].mT).abs() > 65504).any())
    loss = fusedops.linear_cross_entropy(*given, target, chunk=chunk)
    want = torch.nn.functional.cross_entropy(wide[0] @ wide[1].mT, target)
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=0.0)
    for one, other in zip(torch.autograd.grad(loss, given), torch.autograd.grad(want, wide)):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("linear", [False, True])
def test_the_z_loss_of_a_large_lse(backend: str, linear: bool) -> None:
    """lse**2 is beyond float32, z_loss * lse**2 is not."""
    logits, target = torch.randn(4, 10) * 1e20, torch.tensor([0, 1, 2, 3])
    want = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    want = want + 1e-4 * torch.logsumexp(logits.double(), -1).square()
    if linear:
        if backend == "cpu":
            pytest.skip("cpu has no kernel")
        got = fusedops.linear_cross_entropy(logits, torch.eye(10), target, z_loss=1e-4, reduction="none")
    else:
        got = fusedops.cross_entropy(logits, target, z_loss=1e-4, reduction="none", backend=backend)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("backend", ["cpu", "eager", "triton"])
@pytest.mark.parametrize("op", [fusedops.swiglu, fusedops.geglu])
def test_verify_knows_that_up_times_the_slope_overflows_where_the_gradient_is_small(op: Any, backend: str) -> None:
    gate = torch.ones(2, requires_grad=True)
    up = torch.full((2,), torch.finfo(torch.float32).max)
    with fusedops.use(backend), fusedops.verify("reference"):
        op(gate, up).backward(torch.tensor([0.5, 1e-3]))


def test_verify_knows_that_products_overflow_before_they_are_scaled() -> None:
    q, k = torch.full((1, 1, 2, 128), 4.0), torch.zeros(1, 1, 2, 128)
    k[0, 0, 1, 5] = torch.finfo(torch.float32).max
    v = torch.zeros_like(k).requires_grad_()
    with fusedops.use("eager"), fusedops.verify("reference"):
        attention(q, k, v).sum().backward()


def test_verify_knows_that_the_gradient_of_16_bit_logits_overflows() -> None:
    x = torch.zeros(1, 1, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [2.0]]).half()
    with fusedops.use("triton"), fusedops.verify("reference"):
        loss = fusedops.linear_cross_entropy(x, weight, torch.tensor([0]), z_loss=2.0**62)
        assert torch.autograd.grad(loss, x)[0].isnan().all()  # inf - inf of products
