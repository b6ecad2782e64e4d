"""paged_attention on Triton in the interpreter: the parts of a row in one program, and in a program each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import fusedops


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.002)])
def test_a_row_has_the_same_bits_where_its_parts_are_joined_by_another_kernel(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bound: float
) -> None:
    from fusedops_triton.attention import _paged
    from fusedops_triton.launch import launcher

    numbers = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 16, generator=numbers).to(dtype)
    cache = torch.randint(-127, 128, (3, 400, 2, 16), generator=numbers).to(torch.int8)
    scale = torch.rand(3, 400, 2, generator=numbers) / 40
    args = (q, cache, cache, torch.tensor([0, 1, 3]), torch.tensor([[2, 0, 1], [1, 2, 0]]), torch.tensor([1130, 30]))
    options: dict[str, Any] = {"k_scale": scale, "v_scale": scale, "causal": "lower_right", "return_lse": True}
    launcher.clear_layout_caches()
    split = fusedops.paged_attention(*args, **options, backend="triton")
    monkeypatch.setattr(_paged, "_MOST_IN_PARTS", 0)
    launcher.clear_layout_caches()
    whole = fusedops.paged_attention(*args, **options, backend="triton")
    launcher.clear_layout_caches()
    assert all(map(torch.equal, split, whole))
    for computed, expected in zip(split, fusedops.paged_attention(*args, **options, backend="eager")):
        torch.testing.assert_close(computed, expected, rtol=bound, atol=bound)
