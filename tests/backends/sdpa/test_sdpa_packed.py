"""varlen_attention by torch's FlashAttention 2 for CUDA, on a stand-in: values, rows of no sequence, what it gets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_calls import KEYS, QUERIES, SAME, packed
from right import assert_right
from sdpa_standin import NAME, sdpa_on_cuda

import fusedops
from fusedops import varlen_attention
from fusedops.ops.attention import arguments


@pytest.mark.parametrize("window", [None, (2, 0), (1, 5), (7, 3), (2**62, 2), (3, 2**62)], ids=str)
@pytest.mark.parametrize("causal", [False, "lower_right"])
@pytest.mark.parametrize("blocks", [0, 2**14])
def test_values(blocks: int, causal: Any, window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "MOST_BLOCKS", blocks)
    options = {"causal": causal, "window": window}
    with sdpa_on_cuda() as log, fusedops.use(NAME, fallback="raise"):
        assert_right("varlen_attention", *packed(14, 14), SAME, **options)
        assert_right("varlen_attention", *packed(22, 27), QUERIES, KEYS, **options)
    lengths = [call.args[5:7] if call.function == "forward" else call.args[8:10] for call in log]
    assert lengths == ([(14, 14)] * 2 + [(22, 27)] * 2 if blocks else [(8, 8)] * 2 + [(7, 11)] * 2)


def test_one_query() -> None:
    with sdpa_on_cuda(), fusedops.use(NAME, fallback="raise"):
        assert_right("varlen_attention", *packed(1, 5), torch.tensor([0, 1]), torch.tensor([0, 5]))


def test_a_row_without_a_key_is_0_and_a_row_with_nan_is_nan() -> None:
    q, k, v = packed(22, 27)
    k[12] = math.nan  # of the fourth sequence
    with sdpa_on_cuda(), fusedops.use(NAME, fallback="raise"):
        out, lse = varlen_attention(q, k, v, QUERIES, KEYS, causal="lower_right", return_lse=True)
    dead = [0, 1, 2, 3, 7, 8, 19, 20, 21]
    assert (lse[:, 0] == -math.inf).nonzero().flatten().tolist() == dead
    assert not out[dead].count_nonzero()
    assert bool(lse[9:16].isnan().any())
    assert bool(lse[4:7].isfinite().all())
