"""varlen_attention by flash-attn's stand-in: values, rows of no sequence, and the lengths that the kernels get."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_calls import KEYS, QUERIES, SAME, packed
from flash_attn_standin import Call
from right import assert_right

import fusedops
from fusedops import varlen_attention
from fusedops.ops.attention import arguments
from fusedops.ops.attention.arguments import parts_of

BF16 = torch.bfloat16


def lengths(call: Call) -> tuple[int, int]:
    return call.kwargs["max_seqlen_q"], call.kwargs["max_seqlen_k"]


@pytest.fixture(params=["all rows", "longest"])
def read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True where the lengths are read."""
    if request.param == "longest":
        monkeypatch.setattr(arguments, "MOST_BLOCKS", 0)
    return request.param == "longest"


WINDOWS = [None, (0, 0), (2, 0), (1, 5), (7, 3), (2**62, 2), (3, 2**62)]
#: The mask does not depend on whether the lengths are read: that is varied with two of the windows.
MASKS = [(causal, window, "all rows") for causal in (False, "lower_right") for window in WINDOWS]
MASKS += [("lower_right", None, "longest"), (False, (7, 3), "longest")]


@pytest.mark.parametrize(("causal", "window", "read"), MASKS, ids=str, indirect=["read"])
def test_values(causal: Any, window: Any, read: bool, log: list[Call]) -> None:
    """Sequences without keys, without queries, of more queries than keys and of more keys; rows of no sequence."""
    options = {"causal": causal, "window": window}
    assert_right("varlen_attention", *packed(14, 14), SAME, **options)
    assert_right("varlen_attention", *packed(22, 27), QUERIES, KEYS, **options)
    assert [lengths(call) for call in log] == [(8, 8) if read else (14, 14)] * 2 + [(7, 11) if read else (22, 27)] * 2


def test_one_query(log: list[Call]) -> None:
    """With one query as the longest, the kernels of release 2 have as many rows as sequences."""
    assert_right("varlen_attention", *packed(1, 5), torch.tensor([0, 1]), torch.tensor([0, 5]))
    assert lengths(log[0]) == (2, 5)


def test_a_row_without_a_key_is_0_whatever_its_gradient(log: list[Call]) -> None:
    tensors = [each.requires_grad_() for each in packed(22, 27)]
    call = (*tensors, QUERIES, KEYS)
    with torch.no_grad():
        out, lse = varlen_attention(*call, causal="lower_right", return_lse=True)
    dead = [0, 1, 2, 3, 7, 8, 19, 20, 21]
    assert (lse[:, 0] == -math.inf).nonzero().flatten().tolist() == dead
    assert not out[dead].count_nonzero()
    assert bool((lse[dead] == -math.inf).all())
    assert lse.is_contiguous()
    grad = torch.randn(out.shape).to(BF16)
    ys = varlen_attention(*call, causal="lower_right")
    clean = torch.autograd.grad(ys, tensors, grad, retain_graph=True)
    grad[dead] = math.nan
    for one, other in zip(clean, torch.autograd.grad(ys, tensors, grad)):
        assert torch.equal(one, other)
    assert not clean[0][dead].count_nonzero()
    assert not clean[1][[0, 25, 26]].count_nonzero()


def test_nan_is_in_the_rows_of_its_sequence_alone(log: list[Call]) -> None:
    q, k, v = packed(14, 14)
    k[6] = math.nan
    tensors = [each.requires_grad_() for each in (q, k, v)]
    with torch.no_grad():
        out, lse = varlen_attention(*tensors, SAME, causal=True, return_lse=True)
    gradients = torch.autograd.grad(varlen_attention(*tensors, SAME, causal=True).sum(), tensors)
    for each in (out, lse, *gradients):
        assert bool(each[6:].isnan().any())
        assert bool(each[:6].isfinite().all())
    assert bool(lse[6:].isnan().all())


def test_bounds_that_fall_or_pass_the_end_are_moved(log: list[Call]) -> None:
    wrong, right = torch.tensor([0, 9, 7, 99]), torch.tensor([0, 9, 9, 14])
    assert torch.equal(varlen_attention(*packed(14, 14), wrong), varlen_attention(*packed(14, 14), right))
    assert all(each.dtype == torch.int32 for each in parts_of(right, right.int(), 14, 14, "none", (1, 1)))


def test_the_lengths_are_read_once_in_a_block_and_never_stale(log: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = arguments.longest_of
    monkeypatch.setattr(arguments, "MOST_BLOCKS", 0)
    monkeypatch.setattr(arguments, "longest_of", lambda *args: reads.append(1) or real(*args))
    tensors, bounds = packed(14, 14), SAME.clone()
    with fusedops.tensor_cache.reuse():
        for _ in range(3):
            varlen_attention(*tensors, bounds)
        assert len(reads) == 1
        bounds[1] = 0  # the second of its sequences is longer now
        assert_right("varlen_attention", *tensors, bounds)
    assert lengths(log[-1]) == (8, 8)
    varlen_attention(*tensors, bounds)
    varlen_attention(*tensors, bounds)
    assert len(reads) > 3


def test_layouts(log: list[Call]) -> None:
    """Heads first in memory, rows of an odd length, expanded heads: copied where the kernels cannot read them."""
    q, k, v = packed(14, 14)
    first = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in (q, k, v)]
    odd = [torch.cat((each, each[..., :1]), 2)[..., :16] for each in (q, k, v)]
    for tensors in (first, odd, [q, k[:, :1].expand(14, 2, 16), v]):
        assert_right("varlen_attention", *tensors, SAME, causal=True)
    varlen_attention(q, k, v, SAME)
    assert [arg.data_ptr() for arg in log[-1].args[:3]] == [each.data_ptr() for each in (q, k, v)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"causal": "upper_left"}, "leave the upper left to another backend"),
        ({"v": packed(22, 27)[2][..., :8]}, "got dim 2 of v = 8, expected that of q, 16"),
        ({"scale": 0.0}, "got scale = 0.0, expected a Python number of at least 1e-30"),
        ({"cu_seqlens_q": torch.zeros(32767).int(), "cu_seqlens_k": torch.zeros(32767).int()}, "at most 32766"),
    ],
    ids=["upper left", "values", "scale", "sequences"],
)
def test_what_the_package_does_not_take_is_refused(changes: dict[str, Any], text: str, log: list[Call]) -> None:
    q, k, v = packed(22, 27)
    with pytest.raises(fusedops.NoBackendError) as error:
        varlen_attention(**{"q": q, "k": k, "v": v, "cu_seqlens_q": QUERIES, "cu_seqlens_k": KEYS, **changes})
    assert text in str(error.value)
    assert not log
