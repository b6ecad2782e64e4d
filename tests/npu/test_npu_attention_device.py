"""Assumptions about the vendor's attention; ``make npu`` checks them on the device, as ``test_npu_device.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from npu_vendor import DTYPES, REAL, npu_alone
from right import assert_right
from torch import Tensor

from fusedops import attention, testing
from fusedops.testing._expected import expected_forward

OP = testing.OPS["attention"]


@pytest.fixture(autouse=True)
def torch_npu() -> Iterator[Any]:
    """The vendor's module; every call is served by the npu backend, or fails."""
    with npu_alone() as module:
        yield module


def heads(sq: int, sk: int, dtype: torch.dtype = torch.float32, size: int = 64) -> list[Tensor]:
    shapes = ((2, 4, sq, size), (2, 2, sk, size), (2, 2, sk, size))
    return [torch.randn(shape).to(dtype).npu() for shape in shapes]


def check(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None, **more: Any) -> None:
    """Compare out and lse, and the gradients of q, k and v, with float64."""
    assert_right("attention", q, k, v, mask, scale, **more, device="npu")
    given = {"causal": "none", "window": None, **more, "return_lse": True}
    want = expected_forward(OP, (q, k, v, mask, scale, *given.values()))
    with torch.no_grad():
        _, lse = attention(q, k, v, mask, scale, **given)
    testing.assert_within(lse, want.outputs[1], want.limits["output lse"], "lse")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [(40, 40), (40, 100), (100, 40), (1, 100)], ids=str)
@pytest.mark.parametrize("causal", ["none", "upper_left", "lower_right"])
@pytest.mark.parametrize("window", [None, (7, 3)], ids=str)
def test_alignments_and_windows(lengths: tuple[int, int], causal: str, window: Any, dtype: torch.dtype) -> None:
    if causal != "none" or window is None or lengths[0] == lengths[1]:
        check(*heads(*lengths, dtype), causal=causal, window=window)


@pytest.mark.parametrize("options", [{"causal": "lower_right"}, {"causal": "lower_right", "window": (70, 0)}], ids=str)
def test_the_triangle_of_2048_serves_longer_calls(options: dict[str, Any]) -> None:
    q, k, v = heads(2060 if REAL else 100, 2100, size=16)
    check(q[:1, :1], k[:1, :1], v[:1, :1], **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(100,), (40, 100), (2, 1, 1, 100), (1, 4, 40, 100), (2, 4, 40, 100)], ids=str)
def test_masks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = torch.rand(shape) < 0.3
    check(*heads(40, 100, dtype), mask.npu())
    check(*heads(40, 100, dtype), mask.to(torch.uint8).npu(), causal="lower_right")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fully_masked_rows(dtype: torch.dtype) -> None:
    mask = torch.rand(2, 1, 40, 100) < 0.3
    mask[:, :, ::3] = True
    check(*heads(40, 100, dtype), mask.npu())
    check(*heads(40, 100, dtype), torch.ones_like(mask).npu())


@pytest.mark.parametrize("scale", [0.0, -0.5, 2.0])
def test_the_mask_is_applied_after_the_scale(scale: float) -> None:
    check(*heads(40, 40), (torch.rand(40, 40) < 0.3).npu(), scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrower_values(dtype: torch.dtype) -> None:
    q, k, v = heads(40, 100, dtype, 192)
    check(q, k, v[..., :128], causal="lower_right")


def test_views_of_models() -> None:
    check(*(each.transpose(1, 2).contiguous().transpose(1, 2) for each in heads(40, 40)), causal="upper_left")


# ----------------------------------------------------------------- read in the vendor's sources, never seen on a device


def test_the_max_and_the_sum_have_eight_copies_and_give_lse(torch_npu: Any) -> None:
    q, k, v = heads(40, 100)
    _, top, total, *_ = torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=0.125)
    assert top.shape == total.shape == (2, 4, 40, 8)
    assert torch.equal(top.cpu(), top.cpu()[..., :1].expand(2, 4, 40, 8))
    scores = 0.125 * q.cpu() @ k.cpu().repeat_interleave(2, 1).transpose(-2, -1)
    torch.testing.assert_close((top + total.log()).cpu()[..., 0], torch.logsumexp(scores, -1))


def test_the_gradient_takes_lse_and_1_for_the_max_and_the_sum(torch_npu: Any) -> None:
    q, k, v = heads(40, 100)
    out, top, total, *_ = torch_npu.npu_fusion_attention(q, k, v, 4, "BNSD", scale=0.125)
    grad = torch.randn(out.shape).npu()
    options = {"scale_value": 0.125, "attention_in": out}
    given = torch_npu.npu_fusion_attention_grad(q, k, v, grad, 4, "BNSD", softmax_max=top, softmax_sum=total, **options)
    top = top + total.log()
    joined = torch_npu.npu_fusion_attention_grad(
        q, k, v, grad, 4, "BNSD", softmax_max=top, softmax_sum=torch.ones_like(top), **options
    )
    for one, other in zip(given[:3], joined[:3]):
        torch.testing.assert_close(one.cpu(), other.cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, (7, 3)], ids=str)
@pytest.mark.parametrize("causal", ["none", "lower_right"])
def test_packed_sequences(causal: str, window: Any, dtype: torch.dtype) -> None:
    """One without keys, one without queries, more queries than keys, more keys than queries; rows of none."""
    bounds_q, bounds_k = torch.tensor([1, 41, 141, 151, 151]).npu(), torch.tensor([0, 100, 140, 140, 147]).npu()
    shapes = ((152, 4, 64), (150, 2, 64), (150, 2, 64))
    tensors = [torch.randn(shape).to(dtype).npu() for shape in shapes]
    assert_right("varlen_attention", *tensors, bounds_q, bounds_k, causal=causal, window=window, device="npu")
