"""The function of flash-attn on the page of attention is right; the benchmark of the page runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from repository import DOCS, ROOT

import fusedops


@pytest.mark.parametrize("window", [(3, 2), (-1, 2), (3, -1), (0, 0)], ids=str)
@pytest.mark.parametrize("queries", [4, 9, 12])
def test_the_function_of_flash_attn_aligns_windows_at_the_lower_right(window: tuple[int, int], queries: int) -> None:
    text = (DOCS / "attention.md").read_text("utf-8")
    names = {"fusedops": fusedops, "torch": torch}
    exec("def flash_attn_func(" + text.partition("\ndef flash_attn_func(")[2].partition("\n\n\n")[0], names)
    q, (k, v) = torch.randn(1, queries, 2, 8), torch.randn(2, 1, 9, 2, 8)
    left, right = (99 if side < 0 else side for side in window)
    away = torch.arange(9) - torch.arange(queries)[:, None] - (9 - queries)
    heads = [each.transpose(1, 2) for each in (q, k, v)]
    expected = fusedops.attention(*heads, (away < -left) | (away > right)).transpose(1, 2)
    torch.testing.assert_close(names["flash_attn_func"](q, k, v, window_size=window), expected)


@pytest.mark.slow
def test_the_benchmark_runs(program: Any) -> None:
    shape = ("--shape", 1, 2, 64, 32, "--turns", 1)
    done = program("-m", "benchmarks.attention", *shape, path=[ROOT], folder=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + 5 * 2 * 2 + 1  # the forms, two dtypes, two directions; choosing
    assert lines[-1].startswith("choosing [2, 2, 4, 8]: fusedops ")
    assert torch.__version__ in lines[0]
