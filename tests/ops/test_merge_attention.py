"""merge_attention: attention in parts is attention at once, forward and backward; parts without keys; memory."""

from __future__ import annotations

import math

import pytest
import torch
from calls import has_kernels
from torch import Tensor

import fusedops

BACKENDS = [name for name in ("eager", "cpu", "triton") if has_kernels(name, "merge_attention")]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def qkv(queries: int = 12, keys: int = 30, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    numbers = torch.Generator().manual_seed(3)
    shapes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16))
    return tuple(torch.randn(shape, generator=numbers).to(dtype).requires_grad_() for shape in shapes)


def in_parts(q: Tensor, k: Tensor, v: Tensor, cuts: list[int], mask: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return attention and its lse, part of the keys after part."""
    out, lse = None, None
    for start, end in zip([0, *cuts], [*cuts, k.shape[2]]):
        keys, values, hidden = k[:, :, start:end], v[:, :, start:end], mask[..., start:end]
        part = fusedops.attention(q, keys, values, hidden, return_lse=True, backend="eager")
        if out is None:
            out, lse = part
        else:
            out, lse = fusedops.merge_attention(out, lse, *part, backend=backend)
    assert out is not None
    assert lse is not None
    return out, lse


@every_backend
@pytest.mark.parametrize("cuts", [[10, 20], [0, 15], [29, 30], [1]], ids=str)
def test_attention_in_parts_is_attention_at_once(cuts: list[int], backend: str) -> None:
    """Also where a part has no key, and rows that see none of a part, or of all of them."""
    tensors = qkv()
    mask = torch.rand(12, 30, generator=torch.Generator().manual_seed(5)) < 0.4
    mask[3], mask[5, :15], mask[6, 15:] = True, True, True
    want, want_lse = fusedops.attention(*tensors, mask, return_lse=True, backend="eager")
    got, got_lse = in_parts(*tensors, cuts, mask, backend)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-6, atol=1e-6)
    alive = want_lse != -math.inf
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(6))
    losses = [(out * grad).sum() + lse[alive].square().sum() for out, lse in ((want, want_lse), (got, got_lse))]
    for one, other in zip(torch.autograd.grad(losses[1], tensors), torch.autograd.grad(losses[0], tensors)):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@every_backend
def test_a_part_without_keys_leaves_the_numbers_of_the_other_one(backend: str) -> None:
    out, lse = torch.randn(3, 5, 8), torch.randn(3, 5) * 40
    none, wild = torch.full((3, 5), -math.inf), torch.full((3, 5, 8), math.nan)
    for args in ((out, lse, wild, none), (wild, none, out, lse)):
        got = fusedops.merge_attention(*args, backend=backend)
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)
    both = [each.requires_grad_() for each in (wild.clone(), none.clone(), out.clone(), none.clone())]
    got_out, got_lse = fusedops.merge_attention(*both, backend=backend)
    assert not got_out.count_nonzero()
    assert torch.equal(got_lse, none)
    for gradient in torch.autograd.grad(got_out.sum() + got_lse.sum(), both):
        assert not gradient.count_nonzero()


@every_backend
def test_an_accumulator_in_float32_is_not_rounded_to_the_parts_dtype(backend: str) -> None:
    lse = torch.zeros(4)
    sums = torch.full((4, 8), 1.0)
    part = torch.full((4, 8), 1 + 2**-7, dtype=torch.bfloat16)
    with fusedops.use(f"{backend},eager", fallback="silent"):
        out, _ = fusedops.merge_attention(sums, lse, part, lse)
    assert out.dtype is torch.float32
    assert torch.equal(out, torch.full((4, 8), 1 + 2**-8))


@every_backend
def test_the_dims_in_memory_are_those_of_out_a(backend: str) -> None:
    """attention of transformers' views returns (B, S, N, D) in memory: nothing is copied to another order."""
    out, lse = torch.randn(2, 7, 4, 16).transpose(1, 2), torch.randn(2, 4, 7)
    merged, merged_lse = fusedops.merge_attention(out, lse, torch.randn(2, 4, 7, 16), lse + 1, backend=backend)
    assert merged.stride() == out.stride()
    assert merged_lse.is_contiguous()


@pytest.mark.parametrize(("change", "text"), [
    ({"lse_a": torch.zeros(3, 5, dtype=torch.bfloat16)}, "got lse_a of bfloat16, expected float32 or float64"),
    ({"lse_b": torch.zeros(5, 3)}, "got lse_b of shape (5, 3), expected the shape of out_a without its last dim"),
    ({"out_b": torch.zeros(3, 5, 9)}, "got out_b of shape (3, 5, 9), expected the shape of out_a, (3, 5, 8)"),
], ids=str)  # fmt: skip
def test_what_is_refused(change: dict[str, Tensor], text: str) -> None:
    call = {"out_a": torch.zeros(3, 5, 8), "lse_a": torch.zeros(3, 5), "out_b": torch.zeros(3, 5, 8)}
    with pytest.raises(fusedops.InvalidInputError) as error:
        fusedops.merge_attention(**{**call, "lse_b": torch.zeros(3, 5), **change})
    assert text in str(error.value)
