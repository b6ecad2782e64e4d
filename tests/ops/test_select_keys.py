"""select_keys: brute force, ties, what is visible, special numbers, memory and threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.ops.attention import formulas

BACKENDS = pytest.mark.parametrize("backend", ["eager", "cpu"])


def integers(*shape: int, seed: int, low: int = -3, high: int = 4) -> Tensor:
    """Return small integers: sums of their products are exact in any order."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).float()


def brute_force(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Choose for each row, one key at a time."""
    rows: list[Tensor] = []
    for row, seen in zip(scores.flatten(0, -2), visible.expand(scores.shape).flatten(0, -2)):
        keys = [t for t in range(len(row)) if seen[t]]
        keys.sort(key=lambda t: (not row[t].isnan(), -float(row[t]) if not row[t].isnan() else 0.0, t))
        chosen = sorted(keys[:count])
        rows.append(torch.tensor(chosen + [-1] * (count - len(chosen)), dtype=torch.int32))
    return torch.stack(rows).view(*scores.shape[:-1], count)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, "upper_left", "lower_right"])
@pytest.mark.parametrize("count", [1, 7, 60, 400])
def test_the_keys_of_brute_force(backend: str, dtype: torch.dtype, causal: str | bool, count: int) -> None:
    q, k, weights = integers(2, 19, 3, 5, seed=0), integers(2, 333, 5, seed=1), integers(2, 19, 3, seed=2)
    mask = torch.rand(2, 19, 333, generator=torch.Generator().manual_seed(3)) < 0.4
    mask[:, 4] = True
    scores = (weights[..., None] * torch.relu(0.5 * (q @ k[:, None].mT))).sum(2)
    visible = ~mask
    if causal:
        band = torch.arange(333) - torch.arange(19)[:, None]
        visible = visible & (band <= (0 if causal == "upper_left" else 333 - 19))
    options = {"scale": 0.5, "causal": causal, "mask": mask, "backend": backend}
    got = fusedops.select_keys(q.to(dtype), k.to(dtype), weights.to(dtype), count, **options)
    assert torch.equal(got, brute_force(scores, visible, count))


@BACKENDS
def test_numbers_that_are_not_finite(backend: str) -> None:
    k = torch.tensor([[[1.0], [torch.nan], [torch.inf], [-torch.inf], [2.0], [-1.0]]])
    q, weights = torch.ones(1, 2, 1, 1), torch.tensor([[[1.0], [-1.0]]])
    scores = (weights[..., None] * torch.relu(q @ k[:, None].mT)).sum(2)
    for count in range(1, 7):
        want = brute_force(scores, torch.ones(1, 2, 6, dtype=torch.bool), count)
        assert torch.equal(fusedops.select_keys(q, k, weights, count, backend=backend), want)
    # a visible key of the lowest score comes before those that are masked
    mask = torch.tensor([True, False, False, True, True, True])
    got = fusedops.select_keys(q, k, weights, 4, mask=mask, backend=backend)
    assert torch.equal(got[0, 1], torch.tensor([1, 2, -1, -1], dtype=torch.int32))


@BACKENDS
def test_no_heads_no_keys_and_no_queries(backend: str) -> None:
    def chosen(s: int, t: int, h: int) -> list[list[int]]:
        zeros = torch.zeros(1, s, h, 4), torch.zeros(1, t, 4), torch.zeros(1, s, h)
        return fusedops.select_keys(*zeros, 3, backend=backend)[0].tolist()

    assert chosen(2, 5, 0) == [[0, 1, 2]] * 2
    assert chosen(2, 0, 3) == [[-1, -1, -1]] * 2
    assert chosen(0, 5, 3) == []


def test_a_prompt_in_parts_and_at_once_is_the_same_on_any_number_of_threads() -> None:
    q, k, weights = (torch.randn(s, generator=torch.Generator().manual_seed(n)) for n, s in enumerate(
        ((1, 300, 5, 64), (1, 300, 64), (1, 300, 5))))  # fmt: skip
    whole = fusedops.select_keys(q, k, weights, 40, causal=True, backend="cpu")
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert torch.equal(whole, fusedops.select_keys(q, k, weights, 40, causal=True, backend="cpu"))
            for start, end in ((0, 1), (1, 97), (97, 300)):
                rows = slice(start, end)
                part = fusedops.select_keys(
                    q[:, rows], k[:, :end], weights[:, rows], 40, causal="lower_right", backend="cpu"
                )
                assert torch.equal(part, whole[:, rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("keys", [5, 40_000])
def test_ranks_of_many_equal_and_close_scores(keys: int) -> None:
    k = (torch.arange(keys) % 7).float().view(1, keys, 1)
    k = k + torch.where(torch.arange(keys) % 3 == 0, torch.finfo(torch.float32).eps * 4, 0.0).view(1, keys, 1)
    q, weights = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    for count in (1, keys // 7, keys // 2, keys - 1):
        got = fusedops.select_keys(q, k, weights, max(count, 1), backend="cpu")
        assert torch.equal(got, formulas.best_keys(k.mT, None, max(count, 1)))
