"""sparse_attention: the dense call with a mask, gradients, one latent head, what is never read, threads and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.ops.attention.formulas import chosen_mask

BACKENDS = pytest.mark.parametrize("backend", ["eager", "cpu"])


def call(
    heads: int = 4, key_heads: int = 2, of_indices: int = 1, queries: int = 23, keys: int = 310, seed: int = 0
) -> list[Tensor]:
    """Return q, k, v and indices."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((2, heads, queries, 40), (2, key_heads, keys, 40), (2, key_heads, keys, 24))
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    return [*tensors, fusedops.testing.random_indices((2, of_indices, queries, 270), keys, generator)]


def results(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Return out, lse and the gradients of q, k and v."""
    q, k, v, indices = tensors
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    out, lse = fusedops.attention(*leaves, indices=indices, return_lse=True, **options)
    numbers = torch.Generator().manual_seed(9)
    loss = sum((y * torch.randn(y.shape, generator=numbers)).nan_to_num(neginf=0.0).sum() for y in (out, lse))
    loss.backward()
    return [out.detach(), lse.detach(), *(leaf.grad for leaf in leaves)]


@BACKENDS
@pytest.mark.parametrize(("heads", "key_heads", "of_indices"), [(4, 2, 1), (4, 2, 2), (3, 3, 3), (40, 1, 1)])
@pytest.mark.parametrize("causal", [False, "lower_right"])
@pytest.mark.parametrize("mask", ["", "batch", "heads"])
def test_it_is_the_dense_call_with_the_other_keys_masked(
    backend: str, heads: int, key_heads: int, of_indices: int, causal: Any, mask: str
) -> None:
    tensors = call(heads, key_heads, of_indices)
    shape = {"batch": (2, 1, 1, 310), "heads": (2, heads, 23, 310)}.get(mask)
    own = None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.3
    if mask == "heads":
        own[:, :, 3] = True
    q, k, v, indices = tensors
    dense = [q, k, v, torch.arange(310).expand(2, 1, 23, 310)]
    whole = results(dense, mask=chosen_mask(indices, own, q, k), causal=causal, backend="eager")
    got = results(tensors, mask=own, causal=causal, backend=backend)
    for one, other in zip(got, whole):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@BACKENDS
def test_of_one_latent_head_the_values_are_a_part_of_the_keys(backend: str) -> None:
    q, k, _, indices = call(6, 1)
    latent = k.clone().requires_grad_()
    out = fusedops.attention(q, latent, latent[..., :24], indices=indices, causal="lower_right", backend=backend)
    out.square().sum().backward()
    keys, values = k.clone().requires_grad_(), k[..., :24].clone().requires_grad_()
    mask = chosen_mask(indices, None, q, k)
    want = fusedops.attention(q, keys, values, mask, causal="lower_right", backend="eager")
    want.square().sum().backward()
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    gradient = keys.grad.clone()
    gradient[..., :24] += values.grad
    torch.testing.assert_close(latent.grad, gradient, rtol=1e-4, atol=1e-4)


@BACKENDS
def test_numbers_of_other_keys_are_nan(backend: str) -> None:
    q, k, v, indices = call(keys=600)
    indices = torch.where(indices >= 0, indices % 300 * 2, -1).sort(-1).values
    indices[..., 1:] = torch.where(indices[..., 1:] == indices[..., :-1], -1, indices[..., 1:])
    poisoned = [each.clone() for each in (k, v)]
    for each in poisoned:
        each[:, :, 1::2] = torch.nan
    clean, other = results([q, k, v, indices], backend=backend), results([q, *poisoned, indices], backend=backend)
    for one, two in zip(clean, other):
        assert torch.equal(one, two)


@BACKENDS
def test_a_query_without_keys_is_0(backend: str) -> None:
    q, k, v, indices = call()
    indices[:, :, 5] = -1
    indices[:, :, 6] = torch.where(indices[:, :, 6] > 6, indices[:, :, 6], -1)  # hidden by the diagonal
    out, lse, dq, dk, dv = results([q, k, v, indices], causal="upper_left", backend=backend)
    for rows in (out[:, :, 5:7], dq[:, :, 5:7]):
        assert not rows.any()
    assert (lse[:, :, 5:7] == -torch.inf).all()
    assert all(each.isfinite().all() for each in (dk, dv))


@BACKENDS
def test_indices_of_three_dims_of_int32_and_in_any_order(backend: str) -> None:
    q, k, v, indices = call()
    want = results([q, k, v, indices], backend=backend)
    for other in (indices[:, 0], indices.to(torch.int32), indices.flip(-1), indices.mT.contiguous().mT):
        for one, two in zip(results([q, k, v, other], backend=backend), want):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (16, 1), (3, 3)])
def test_the_bits_do_not_depend_on_threads_nor_on_other_queries(heads: int, key_heads: int) -> None:
    tensors = call(heads, key_heads, queries=70)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = results(tensors, causal="lower_right", backend="cpu")
        for threads in (2, 5):
            torch.set_num_threads(threads)
            for one, two in zip(results(tensors, causal="lower_right", backend="cpu"), want):
                assert torch.equal(one, two)
    finally:
        torch.set_num_threads(before)
    q, k, v, indices = tensors
    part = fusedops.attention(q[:, :, 40:], k, v, indices=indices[:, :, 40:], causal="lower_right", backend="cpu")
    assert torch.equal(part, want[0][:, :, 40:])


@BACKENDS
def test_errors_of_indices(backend: str) -> None:
    q, k, v, indices = call()
    for wrong in (310, -2):
        indices[1, 0, 7, 3] = wrong
        with pytest.raises(fusedops.InvalidInputError, match=r"got (indices from|indices of which one is no key)"):
            fusedops.attention(q, k, v, indices=indices, backend=backend)
    indices[1, 0, 7, :2] = 9
    indices[1, 0, 7, 3] = -1
    if backend == "eager":
        with pytest.raises(fusedops.InvalidInputError, match="got key 9 twice in a row of indices"):
            fusedops.attention(q, k, v, indices=indices, backend=backend)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(backend: str, dtype: torch.dtype) -> None:
    tensors = call(8, 2)
    wide = [*(each.to(dtype).float() for each in tensors[:3]), tensors[3]]
    narrow = [*(each.to(dtype) for each in tensors[:3]), tensors[3]]
    for one, two in zip(results(narrow, backend=backend), results(wide, backend="eager")):
        torch.testing.assert_close(one.float(), two, rtol=0.03, atol=0.03)


def test_compiled_under_vmap_and_of_second_derivatives() -> None:
    q, k, v, _ = (each.double() for each in call(2, 1, queries=3, keys=7))
    indices = torch.tensor([[0, 3, -1, 5, 6], [-1] * 5, [2, 1, 6, -1, 0]])[None].expand(2, 3, 5)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fusedops.attention(q, k, v, indices=indices, causal="lower_right")

    want = run(q, k, v)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v), want)
    torch.testing.assert_close(torch.vmap(run)(q[None], k[None], v[None])[0], want)
    leaves = [each[..., :2].clone().requires_grad_() for each in (q, k, v)]
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)
