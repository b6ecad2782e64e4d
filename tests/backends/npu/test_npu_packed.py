"""varlen_attention on the stand-in device: what the vendor gets, what is left out, and waits for the device."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import candidate
from attention_calls import KEYS, QUERIES, SAME, packed
from right import assert_right
from standin import npu_device
from torch import Tensor

import fusedops
from fusedops import TensorSpec, varlen_attention

FORWARD, BACKWARD = "npu_fusion_attention", "npu_fusion_attention_grad"
F32 = torch.float32
OPEN = 2**31 - 1
ALL = ([5, 6, 14], [5, 6, 14])


@pytest.mark.parametrize(
    ("bounds", "options", "mode", "ends"),
    [
        ((SAME,), {}, (0, OPEN, OPEN), ALL),
        ((SAME,), {"causal": True}, (2, OPEN, OPEN), ALL),
        ((SAME,), {"causal": "lower_right"}, (2, OPEN, OPEN), ALL),
        ((SAME,), {"window": (2, 1)}, (4, 2, 1), ALL),
        ((SAME,), {"causal": True, "window": (2**40, 1)}, (4, OPEN, 0), ALL),
        ((SAME, SAME.clone()), {"causal": "lower_right"}, (3, OPEN, OPEN), ALL),
        # sequences with queries and keys: 5 and 3, 7 and 11, 3 and 4; the others and what is in none are left out
        ((QUERIES, KEYS), {}, (0, OPEN, OPEN), ([5, 12, 15], [3, 14, 18])),
        ((QUERIES, KEYS), {"causal": "lower_right"}, (3, OPEN, OPEN), ([3, 10, 13], [3, 14, 18])),  # two see no key
        ((QUERIES, KEYS), {"causal": "lower_right", "window": (1, 5)}, (4, 1, 0), ([3, 10, 13], [3, 11, 15])),
        ((QUERIES, KEYS), {"window": (1, 1)}, (4, 1, 1), ([4, 11, 14], [3, 11, 15])),  # nor do queries see all keys
    ],
    ids=str,
)
def test_an_alignment_or_a_window_is_a_mode(
    torch_npu: ModuleType, bounds: tuple[Tensor, ...], options: dict[str, Any], mode: Any, ends: Any
) -> None:
    tensors = packed(14, 14, F32) if len(bounds) == 1 or bounds[0] is SAME else packed(22, 27, F32)
    with fusedops.use("npu", fallback="raise"):
        assert_right("varlen_attention", *tensors, *bounds, **options, device="npu")
    assert [made.name for made in torch_npu.calls] == [FORWARD, BACKWARD]
    for made in torch_npu.calls:
        assert tuple(made.options[name] for name in ("sparse_mode", "pre_tockens", "next_tockens")) == mode
        assert made.options["ends"] == ends
        given = [shape for shape, kind in zip(made.shapes, made.dtypes) if kind == torch.bool]
        assert given == ([(2048, 2048)] if mode[0] else [])


@pytest.mark.usefixtures("torch_npu")
def test_a_row_without_a_key_is_0_whatever_its_gradient() -> None:
    tensors = [each.to("npu").requires_grad_() for each in packed(22, 27, F32)]
    call = (*tensors, QUERIES.to("npu"), KEYS.to("npu"))
    dead = [0, 1, 2, 3, 7, 8, 19, 20, 21]
    with fusedops.use("npu", fallback="raise"):
        with torch.no_grad():
            out, lse = (x.cpu() for x in varlen_attention(*call, causal="lower_right", return_lse=True))
        ys = varlen_attention(*call, causal="lower_right")
        grad = torch.randn(out.shape)
        clean = torch.autograd.grad(ys, tensors, grad.to("npu"), retain_graph=True)
        grad[dead] = math.nan
        other = torch.autograd.grad(ys, tensors, grad.to("npu"))
    assert (lse[:, 0] == -math.inf).nonzero().flatten().tolist() == dead
    assert not out[dead].count_nonzero()
    for one, two in zip(clean, other):
        assert torch.equal(one.cpu(), two.cpu())


@pytest.mark.parametrize("width", [16, 11])
def test_narrower_values_are_padded(torch_npu: ModuleType, width: int) -> None:
    q, k, v = packed(14, 14)
    with fusedops.use("npu", fallback="raise"):
        assert_right("varlen_attention", q, k, v[..., :width], SAME, causal=True, device="npu")
    assert torch_npu.calls[0].shapes[:3] == ((14, 4, 16), (14, 2, 16), (14, 2, 16))


def test_the_bounds_are_read_once_in_a_block_and_never_stale(torch_npu: ModuleType) -> None:
    tensors, bounds = [each.to("npu") for each in packed(14, 14, F32)], SAME.to("npu")
    with fusedops.use("npu", fallback="raise"):
        with fusedops.tensor_cache.reuse():
            varlen_attention(*tensors, bounds)
            npu_device.reset()
            varlen_attention(*tensors, bounds)
            assert npu_device.synchronisations() == 0
            bounds[1] = 0
            varlen_attention(*tensors, bounds)
            assert torch_npu.calls[-1].options["ends"][0] == [5, 6, 14]
            bounds[3] = 9
            changed = varlen_attention(*tensors, bounds)
            assert torch_npu.calls[-1].options["ends"][0] == [5, 9, 14]
        npu_device.reset()
        assert torch.equal(changed.cpu(), varlen_attention(*tensors, bounds).cpu())
    assert npu_device.synchronisations() == 3  # of the bounds and of two results


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": (8, 4, 769), "k": (9, 2, 769), "v": (9, 2, 769)}, "a size of at most 768"),
        ({"q": (8, 258, 16)}, "a size of at most 256"),
        ({"q": (1_000_001, 4, 16)}, "a size of at most 1000000"),
        ({"k": (1_000_001, 2, 16), "v": (1_000_001, 2, 16)}, "dim 0 of k = 1000001"),
        ({"v": (9, 2, 17)}, "at most that of k, 16"),
        ({"cu_seqlens_q": (1026,), "cu_seqlens_k": (1026,)}, "a size of at most 1025"),
        ({"causal": "upper_left"}, "leave the upper left to another backend"),
    ],
    ids=str,
)
def test_a_limit(changes: dict[str, Any], text: str) -> None:
    shapes = {"q": (8, 4, 16), "k": (9, 2, 16), "v": (9, 2, 16), "cu_seqlens_q": (3,), "cu_seqlens_k": (3,), **changes}
    kinds = {name: torch.int32 if "cu" in name else torch.bfloat16 for name in shapes}
    specs = {n: TensorSpec(x, kinds[n], "npu") if isinstance(x, tuple) else x for n, x in shapes.items()}
    assert text in " ".join(map(str, candidate(varlen_attention, **specs).reasons))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"actual_seq_qlen": None}, "the size of actual_seq_qlen and actual_seq_kvlen must be the same"),
        ({"actual_seq_kvlen": [4]}, "the size of actual_seq_qlen and actual_seq_kvlen must be the same"),
        ({"actual_seq_qlen": [0, 2]}, "a sequence of queries without keys"),
        ({"actual_seq_qlen": [2, 6]}, "sums of lengths, of 5 rows"),
        ({"actual_seq_qlen": [2] * 1025, "actual_seq_kvlen": [2] * 1025}, "at most 1024 numbers"),
        ({"softmax_layout": ""}, "softmax_layout TND"),
        ({"sparse_mode": 3, "atten_mask": 2048}, "must not mask all of a row"),
        ({"atten_mask": 5}, "atten_mask must be|no atten_mask of sparse_mode 0"),
        ({"query": (5, 4, 2, 8)}, "query must have 3 dimensions"),
    ],
    ids=str,
)
def test_the_stand_in_refuses(torch_npu: ModuleType, changes: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"query": (5, 4, 8), "key": (4, 2, 8), "value": (4, 2, 8), "head_num": 4}
    given |= {"input_layout": "TND", "softmax_layout": "TND", "actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 4]}
    given |= changes
    given |= {name: torch.randn(given[name]).to("npu") for name in ("query", "key", "value")}
    if "atten_mask" in given:
        side = given["atten_mask"]
        given["atten_mask"] = torch.ones(side, side, dtype=torch.bool).triu(1).to("npu")
    with pytest.raises(RuntimeError, match=text):
        torch_npu.npu_fusion_attention(**given)


def test_rows_after_the_last_end_are_not_written(torch_npu: ModuleType) -> None:
    x = torch.randn(5, 2, 8).to("npu")
    out = torch_npu.npu_fusion_attention(
        x, x, x, 2, "TND", actual_seq_qlen=[2, 4], actual_seq_kvlen=[2, 4], softmax_layout="TND"
    )[0]
    assert bool(out.cpu()[4].isnan().all())
    assert bool(out.cpu()[:4].isfinite().all())
