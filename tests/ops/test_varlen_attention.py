"""varlen_attention: each sequence has the bits that it has alone, and no number of another one; bounds; memory."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from calls import has_kernels
from eager_memory import peak
from torch import Tensor

import fusedops

LENGTHS = [5, 0, 1, 40, 3, 17]
BACKENDS = [name for name in ("eager", "sdpa", "cpu") if has_kernels(name, "varlen_attention")]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_form = pytest.mark.parametrize("causal", [False, True])


def bounds_of(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(dtype)


def qkv(rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    shapes = ((rows, 4, 16), (rows, 2, 16), (rows, 2, 16))
    return [torch.randn(shape, generator=numbers).to(dtype).requires_grad_() for shape in shapes]


def results(tensors: list[Tensor], bounds: Tensor, **options: Any) -> list[Tensor]:
    """Return out, lse and the gradients of q, k and v."""
    with torch.no_grad():
        out, lse = fusedops.varlen_attention(*tensors, bounds, return_lse=True, **options)
    plain = fusedops.varlen_attention(*tensors, bounds, **options)
    grad = torch.randn((4096, *out.shape[1:]), generator=torch.Generator().manual_seed(9))
    gradients = torch.autograd.grad((plain * grad[: len(out)].to(out.dtype)).sum(), tensors)
    return [out, lse, *gradients]


@every_backend
@every_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequence_has_the_bits_that_it_has_alone(dtype: torch.dtype, causal: bool, backend: str) -> None:
    lengths = [9, 0, 1, 9, 16]
    tensors, bounds = qkv(sum(lengths), dtype), bounds_of(lengths)
    packed = fusedops.varlen_attention(*tensors, bounds, causal=causal, backend=backend)
    grad = torch.randn(packed.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    of_packed = torch.autograd.grad(packed, tensors, grad)
    for start, end in pairwise(bounds.tolist()):
        own = [each[start:end].detach().clone().requires_grad_() for each in tensors]
        alone = fusedops.varlen_attention(*own, bounds_of([end - start]), causal=causal, backend=backend)
        assert torch.equal(packed[start:end], alone)
        for whole, part in zip(of_packed, torch.autograd.grad(alone, own, grad[start:end])):
            assert torch.equal(whole[start:end], part)


@every_backend
@every_form
def test_no_bit_depends_on_another_sequence(causal: bool, backend: str) -> None:
    lengths = [9, 4, 16]
    tensors, bounds = qkv(29), bounds_of(lengths)
    before = results(tensors, bounds, causal=causal, backend=backend)
    with torch.no_grad():
        for each in tensors:
            each[9:13] = math.nan
    after = results(tensors, bounds, causal=causal, backend=backend)
    for one, other in zip(before, after):
        assert torch.equal(one[:9], other[:9])
        assert torch.equal(one[13:], other[13:])
    assert after[0][9:13].isnan().all()


def test_sequences_of_other_lengths_of_keys() -> None:
    """Each by attention, with every alignment and window; a sequence without keys, rows of no sequence."""
    q, k, v = qkv(30)[0], *qkv(44, seed=1)[1:]
    of_q, of_k = torch.tensor([2, 7, 9, 9, 20, 28]), torch.tensor([1, 4, 4, 10, 31, 40])
    for causal in ("upper_left", "lower_right", False):
        for window in (None, (3, 1), (0, 2)):
            options: dict[str, Any] = {"causal": causal, "window": window, "return_lse": True, "backend": "eager"}
            out, lse = fusedops.varlen_attention(q, k, v, of_q, of_k, **options)
            for (start, end), (first, last) in zip(pairwise(of_q.tolist()), pairwise(of_k.tolist())):
                own = (each[None].transpose(1, 2) for each in (q[start:end], k[first:last], v[first:last]))
                want, want_lse = fusedops.attention(*own, **options)
                assert torch.equal(out[start:end], want[0].transpose(0, 1))
                assert torch.equal(lse[start:end], want_lse[0].transpose(0, 1))
            for rows in (slice(0, 2), slice(7, 9), slice(28, 30)):
                assert not out[rows].count_nonzero()
                assert bool((lse[rows] == -math.inf).all())


def test_bounds_that_are_one_tensor_are_the_same_bounds() -> None:
    tensors, bounds = qkv(29), bounds_of([9, 4, 16])
    want = fusedops.varlen_attention(*tensors, bounds, causal=True)
    assert torch.equal(fusedops.varlen_attention(*tensors, bounds, bounds, causal=True), want)
    with pytest.raises(fusedops.InvalidInputError, match="causal = True, expected 'none', 'upper_left' or 'lower_rig"):
        fusedops.varlen_attention(*tensors, bounds, bounds.clone(), causal=True)


@every_backend
@pytest.mark.parametrize(("bounds", "text"), [
    ([0, 5, 4], "cu_seqlens_q[2] = 4 after 5, expected the start of a sequence from 5 to 9, the rows of q"),
    ([0, 10], "cu_seqlens_q[1] = 10 after 0, expected the start of a sequence from 0 to 9"),
    ([-1, 9], "cu_seqlens_q[0] = -1, expected"),
], ids=str)  # fmt: skip
def test_bounds_that_are_refused(bounds: list[int], text: str, backend: str) -> None:
    with pytest.raises(fusedops.InvalidInputError) as error:
        fusedops.varlen_attention(*qkv(9), torch.tensor(bounds), backend=backend)
    assert text in str(error.value)


@every_backend
def test_memory_grows_with_tokens_not_with_their_square(backend: str) -> None:
    rows = 8 * 256
    tensors = [each.detach() for each in qkv(rows)]
    bounds = bounds_of([256] * 8)
    with fusedops.use(f"{backend},eager", fallback="silent"):
        most = peak(lambda: fusedops.varlen_attention(*tensors, bounds, causal=True), tensors[0].nbytes)
    assert most < 10  # times q; the scores of the whole call are 128 times q


def test_the_padded_call_and_the_packed_one_agree() -> None:
    tensors, bounds = qkv(sum(LENGTHS)), bounds_of(LENGTHS, torch.int64)
    contract = fusedops.testing.OPS["varlen_attention"]
    want, _ = contract.evidence.unfused(*tensors, bounds, None, None, "upper_left", None, False)
    torch.testing.assert_close(fusedops.varlen_attention(*tensors, bounds, causal=True), want, rtol=1e-5, atol=1e-5)
