"""The fake torch_npu's attention: the vendor's schemas, what its documents exclude, and its numbers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

B, N, NK, SQ, SK, D = 2, 4, 2, 5, 9, 8


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype).to("npu")


def triangle() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu")


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="npu")


def arguments() -> dict[str, Any]:
    return {
        "query": tensor(B, N, SQ, D),
        "key": tensor(B, NK, SK, D),
        "value": tensor(B, NK, SK, D),
        "head_num": N,
        "input_layout": "BNSD",
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"query": lambda: tensor(B, N, SQ, D, dtype=torch.float64)}, "query must be float16, bfloat16 or float32"),
        (
            {"value": lambda: tensor(B, NK, SK, D, dtype=torch.float16)},
            "value must be float16, bfloat16 or float32, as",
        ),
        ({"query": lambda: tensor(N, SQ, D)}, "query must have 4 dimensions"),
        ({"value": lambda: tensor(B, NK, SK, 4)}, "key and value must have one shape"),
        ({"query": lambda: tensor(3, N, SQ, D)}, "B and D of key must be those of query"),
        ({"query": lambda: tensor(B, N, SQ, 4)}, "B and D of key must be those of query"),
        ({"head_num": lambda: 2}, "head_num 2 must be N of query, 4"),
        ({"query": lambda: tensor(B, 3, SQ, D), "head_num": lambda: 3}, "must be N of query, 3, a multiple of 2"),
        ({"query": lambda: tensor(B, 258, SQ, D), "head_num": lambda: 258}, r"N must be in \[1, 256\]; it is 258"),
        ({"query": lambda: tensor(B, N, 0, D)}, "Sq must be in"),
        ({"key": lambda: tensor(B, NK, 0, D), "value": lambda: tensor(B, NK, 0, D)}, "Skv must be in"),
        ({"input_layout": lambda: "BSND"}, "the layouts BNSD and TND"),
        ({"keep_prob": lambda: 0.9}, "keep_prob 1"),
        ({"pse": lambda: tensor(B, N, SQ, SK)}, "does not support pse"),
        ({"padding_mask": lambda: mask(B, SK)}, "does not support padding_mask"),
        ({"prefix": lambda: [1, 1]}, "does not support prefix"),
        ({"atten_mask": lambda: mask(B, 1, 1, SK)}, "atten_mask must be"),  # it does not broadcast
        ({"atten_mask": lambda: mask(1, N, SQ, SK)}, "atten_mask must be"),
        ({"atten_mask": lambda: mask(N, SQ, SK)}, "atten_mask must be"),
        ({"atten_mask": lambda: mask(SQ, SK, dtype=torch.float32)}, "atten_mask must be bool or uint8"),
        ({"atten_mask": lambda: mask(SQ, SK, dtype=torch.uint8) + 2}, "atten_mask must be 0 or 1"),
        ({"atten_mask": lambda: mask(SQ, SK), "next_tockens": lambda: 0}, "must be those of atten_mask"),
        ({"sparse_mode": lambda: 2}, "sparse_mode 2 needs its atten_mask"),
        ({"sparse_mode": lambda: 3, "atten_mask": lambda: mask(SQ, SK)}, "the triangle of 2048 x 2048"),
        ({"sparse_mode": lambda: 4, "atten_mask": lambda: mask(2048, 2048)}, "the triangle of 2048 x 2048"),
        ({"sparse_mode": lambda: 5, "atten_mask": lambda: mask(SQ, SK)}, "sparse_mode 0, 2, 3 and 4; got 5"),
        (
            {"sparse_mode": lambda: 4, "atten_mask": triangle, "pre_tockens": lambda: -2, "next_tockens": lambda: 1},
            "must intersect",
        ),
        (
            {"sparse_mode": lambda: 4, "atten_mask": triangle, "pre_tockens": lambda: 1, "next_tockens": lambda: -2},
            "must intersect",
        ),
    ],
)
def test_it_refuses(torch_npu: ModuleType, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        torch_npu.npu_fusion_attention(**{**arguments(), **{name: make() for name, make in changes.items()}})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dy": lambda: tensor(B, N, SQ, 4)}, "dy must have the shape and dtype of query"),
        ({"attention_in": lambda: tensor(B, N, SQ, D, dtype=torch.float16)}, "attention_in must have the shape and"),
        ({"softmax_max": lambda: tensor(B, N, SQ, 1)}, r"softmax_max must be float32 of \(2, 4, 5, 8\)"),
        ({"softmax_sum": lambda: tensor(B, N, SQ, 8)}, "softmax_sum must have each number 8 times"),
        ({"atten_mask": lambda: mask(B, 1, 1, SK)}, "atten_mask must be"),
    ],
)
def test_its_gradient_refuses(torch_npu: ModuleType, changes: dict[str, Any], text: str) -> None:
    given = arguments()
    out, top, total, *_ = torch_npu.npu_fusion_attention(**given)
    given |= {"dy": tensor(B, N, SQ, D), "softmax_max": top, "softmax_sum": total, "attention_in": out}
    assert len(torch_npu.npu_fusion_attention_grad(**given)) == 5
    with pytest.raises(RuntimeError, match=text):
        torch_npu.npu_fusion_attention_grad(**{**given, **{name: make() for name, make in changes.items()}})


def test_a_fully_masked_row_is_a_mean_unless_it_is_asked_for(torch_npu: ModuleType) -> None:
    masked = mask(SQ, SK)
    masked[2] = True
    given = {**arguments(), "atten_mask": masked}
    mean = given["value"].cpu().mean(2).repeat_interleave(2, 1)
    assert torch.allclose(torch_npu.npu_fusion_attention(**given)[0].cpu()[:, :, 2], mean, atol=1e-6)
    assert not torch_npu.npu_fusion_attention(**given, inner_precise=2)[0].cpu()[:, :, 2].any()


def test_nan_at_a_masked_key_reaches_the_row(torch_npu: ModuleType) -> None:
    """The deviation that the backend declares."""
    given = {**arguments(), "atten_mask": mask(SQ, SK)}
    given["atten_mask"][:, 3] = True
    given["value"][:, :, 3] = float("nan")
    assert bool(torch_npu.npu_fusion_attention(**given)[0].cpu().isnan().all())
