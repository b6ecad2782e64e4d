"""select_keys and sparse_attention on Triton in the interpreter: what the kit has not, and parts of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import fusedops
from fusedops.ops.attention.formulas import chosen_mask


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("count", [1, 700, 2300, 2999])
def test_ties_and_close_scores_of_several_blocks(count: int) -> None:
    """Numbers of which most are equal, and others differ in the last digit of 8 bits."""
    keys = torch.arange(3000)
    k = ((keys % 7).float() + torch.where(keys % 3 == 0, 2.0**-19, 0.0)).view(1, 3000, 1)
    k[0, 5::100] = -1.0
    k[0, 2500] = torch.nan
    q, weights = torch.ones(1, 2, 1, 1), torch.tensor([[[1.0], [-1.0]]])
    hidden = (keys % 11 == 0).view(1, 1, 3000)
    results = [fusedops.select_keys(q, k, weights, count, mask=hidden, backend=each) for each in ("triton", "eager")]
    assert torch.equal(*results)


def test_a_chunk_of_queries_has_the_scores_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops_triton.attention import _select

    q, k, weights = random((2, 11, 40, 16), (2, 90, 16), (2, 11, 40))
    mask = torch.rand(2, 11, 90, generator=torch.Generator().manual_seed(1)) < 0.2
    options: dict[str, Any] = {"causal": "lower_right", "mask": mask, "backend": "triton"}
    whole = fusedops.select_keys(q, k, weights, 30, **options)
    assert torch.equal(whole, fusedops.select_keys(q, k, weights, 30, **{**options, "backend": "eager"}))
    monkeypatch.setattr(_select, "_SCORES", 90 * 4)
    assert torch.equal(whole, fusedops.select_keys(q, k, weights, 30, **options))


@pytest.mark.parametrize(("heads", "key_heads", "mask"), [(40, 1, "batch"), (6, 2, "heads"), (3, 3, "")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_more_heads_than_a_program_has_and_a_mask_for_each(
    heads: int, key_heads: int, mask: str, dtype: torch.dtype
) -> None:
    """A NaN at a key that one head of a group sees, and another one not, reaches the first alone."""
    q, k, v = (each.to(dtype) for each in random((1, heads, 2, 72), (1, key_heads, 50, 72), (1, key_heads, 50, 40)))
    indices = fusedops.testing.random_indices((1, 1, 2, 33), 50, torch.Generator().manual_seed(2))
    shape = {"batch": (1, 1, 1, 50), "heads": (1, heads, 2, 50)}.get(mask)
    own = None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.3
    if mask == "heads":
        v[0, 0, 7], own[..., 7], own[0, 1, :, 7] = torch.nan, True, False
    results: list[list[Tensor]] = []
    for backend in ("triton", "eager"):
        leaves = [each.clone().requires_grad_() for each in (q, k, v)]
        options: dict[str, Any] = {"causal": "lower_right", "return_lse": True, "backend": backend}
        if backend == "triton":
            out, lse = fusedops.attention(*leaves, own, indices=indices, **options)
        else:
            out, lse = fusedops.attention(*leaves, chosen_mask(indices, own, q, k), **options)
        grads = random(out.shape, lse.shape)
        torch.autograd.backward((out, lse), (grads[0].to(dtype), grads[1]))
        results.append([out, lse, *([] if mask == "heads" else [leaf.grad for leaf in leaves])])
    limit = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=limit, atol=limit, equal_nan=True)


def test_indices_that_are_no_keys_are_none_and_gradients_of_keys_that_no_query_sees_are_0() -> None:
    q, k, v = random((1, 2, 3, 16), (1, 1, 20, 16), (1, 1, 20, 16))
    indices = torch.tensor([[[3, 19, -1], [19, 4, 7], [-1, -1, -1]]])
    wrong = torch.where(indices < 0, 20, indices)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    out = fusedops.attention(*leaves, indices=wrong, backend="triton")
    assert torch.equal(out, fusedops.attention(q, k, v, indices=indices, backend="triton"))
    assert not out[:, :, 2].any()
    out.sum().backward()
    unseen = [key for key in range(20) if key not in (3, 4, 7, 19)]
    for leaf in leaves[1:]:
        assert not leaf.grad[:, :, unseen].any()
        assert leaf.grad[:, :, [3, 4, 7, 19]].any(-1).all() or leaf is leaves[1]
