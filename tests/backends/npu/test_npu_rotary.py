"""rotary_embedding on the stand-in device: what the vendor gets, each limit, and what the vendor refuses."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from ascend import candidate
from right import assert_right
from torch import Tensor

import fusedops
from fusedops import TensorSpec, testing

OP = testing.OPS["rotary_embedding"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def angles(*shape: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    angle = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def test_a_head_dim_of_angles_is_no_reason(torch_npu: ModuleType) -> None:
    q, *angle = (each.to("npu") for each in (torch.randn(64, 1, 64), *angles(1, 1, 32)))
    with fusedops.use("npu", fallback="raise"):
        fusedops.rotary_embedding(q, None, *angle, interleaved=True)
    assert [call.name for call in torch_npu.calls] == ["npu_rotary_mul"]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("seq_dim", [-2, -3])
@pytest.mark.parametrize("lead", [(), (2,)], ids=str)
def test_it_is_the_vendors(
    torch_npu: ModuleType, lead: tuple[int, ...], seq_dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    q, k = torch.randn(*lead, 4, 9, 64).to(dtype), torch.randn(*lead, 2, 9, 64).to(dtype)
    if seq_dim == -3:
        q, k = q.transpose(-2, -3), k.transpose(-2, -3)
    args = (q, k, *angles(9, 32, dtype=dtype), interleaved, seq_dim)
    with fusedops.use("npu", fallback="raise"):
        assert_right("rotary_embedding", *args[:4], interleaved=interleaved, seq_dim=seq_dim, device="npu")
    assert [call.name for call in torch_npu.calls] == ["npu_rotary_mul"] * 4  # q and k, each way
    assert {call.options["rotary_mode"] for call in torch_npu.calls} == {"interleave" if interleaved else "half"}
    table = (1, 1, 9, 64) if seq_dim == -2 else (1, 9, 1, 64)
    assert {call.shapes[1:] for call in torch_npu.calls} == {(table, table)}


def reasons(q: tuple[int, ...], cos: tuple[int, ...], dtype: Any = F32, of_cos: Any = None, **options: Any) -> str:
    """Return the reasons of a refusal, empty where npu takes the call."""
    x, angle = TensorSpec(q, dtype, "npu"), TensorSpec(cos, of_cos or dtype, "npu")
    return " ".join(map(str, candidate("rotary_embedding", x, None, angle, angle, **options).reasons))


@pytest.mark.usefixtures("torch_npu")
@pytest.mark.parametrize(
    ("inside", "outside", "options", "text"),
    [
        (((2, 4, 1, 64), (1, 32)), ((3, 3, 1, 64), (1, 32)), {}, "B * N at most 8 * S with seq_dim -2"),
        (
            ((8, 1, 1, 64), (1, 32)),
            ((9, 1, 1, 64), (1, 32)),
            {"seq_dim": -3},
            "B * N at most 8 * S with seq_dim -2, or N = S = 1",
        ),
        (((1, 999, 125, 64), (125, 32)), ((1, 1000, 125, 64), (125, 32)), {}, "B and N below 1000"),
        (((999, 1, 125, 64), (125, 32)), ((1000, 1, 125, 64), (125, 32)), {}, "B and N below 1000"),
        (((1, 1, 999, 64), (1, 32)), ((1, 1, 1000, 64), (1, 32)), {"seq_dim": -3}, "B and N below 1000"),
        (((3, 333, 1, 64), (1, 32)), ((4, 250, 1, 64), (1, 32)), {"interleaved": True}, "B * N below 1000"),
        (((1, 4, 9, 64), (9, 32)), ((1, 4, 9, 64), (9, 31)), {}, "half of the last dim of q"),
        (((1, 9, 4, 894), (9, 447)), ((1, 9, 4, 896), (9, 448)), {"seq_dim": -3}, "a size of at most 895"),
        (((1, 4, 9, 96), (9, 48)), ((1, 4, 9, 80), (9, 40)), {}, "a multiple of 32"),
        (((1, 9, 4, 80), (9, 40)), ((1, 4, 9, 80), (9, 40)), {}, "a multiple of 32"),
        (((2, 4, 9, 64), (9, 32)), ((2, 4, 9, 64), (2, 9, 32)), {"interleaved": True}, "expected 2 dimensions"),
        (((2, 4, 9, 64), (9, 32)), ((2, 2, 4, 9, 64), (9, 32)), {}, "expected 3 or 4 dimensions"),
    ],
)
def test_a_limit(inside: Any, outside: Any, options: dict[str, Any], text: str) -> None:
    taken = {**options, "seq_dim": -3} if inside[0] == (1, 9, 4, 80) else options
    assert reasons(*inside, **taken) == ""
    refused = reasons(*outside, **options)
    assert text in refused, refused
    assert "to fix: " in refused


@pytest.mark.usefixtures("torch_npu")
def test_dtypes_that_the_vendor_would_round_are_refused() -> None:
    assert "expected the dtype of q, bfloat16" in reasons((1, 4, 9, 64), (9, 32), BF16, F32)
    assert "float64" in reasons((1, 4, 9, 64), (9, 32), torch.float64)


@pytest.mark.usefixtures("torch_npu")
def test_decoding_runs_in_the_other_layout() -> None:
    """One position of many heads: refused with a fix, which is followed here."""
    q, (cos, sin) = torch.randn(4, 32, 1, 64), angles(1, 32)
    assert "pass seq_dim=-3" in reasons((4, 32, 1, 64), (1, 32))
    want = fusedops.rotary_embedding(q, None, cos, sin)[0]
    with fusedops.use("npu", fallback="raise"):
        got, _ = fusedops.rotary_embedding(q.transpose(1, 2).to("npu"), None, cos.to("npu"), sin.to("npu"), seq_dim=-3)
    torch.testing.assert_close(got.cpu().transpose(1, 2), want)


@pytest.mark.usefixtures("torch_npu")
def test_the_doubled_tables_are_stated_with_their_bytes() -> None:
    x, angle = TensorSpec((1, 4, 9, 64), BF16, "npu"), TensorSpec((9, 32), BF16, "npu")
    npu = candidate("rotary_embedding", x, None, angle, angle)
    assert {(each.name, each.bytes) for each in npu.adaptations} == {("doubled", 2 * 9 * 64 * 2)}


@pytest.mark.parametrize(
    ("x", "table", "mode", "text"),
    [
        ((3, 3, 1, 64), (1, 1, 1, 64), "half", r"B \* N must be at most 8 \* S; it is 9 for S = 1"),
        ((1, 1000, 125, 64), (1, 1, 125, 64), "half", "B and N must be below 1000"),
        ((4, 250, 9, 64), (1, 1, 9, 64), "interleave", r"tables of one batch, and B \* N below 1000"),
        ((2, 4, 9, 64), (2, 1, 9, 64), "interleave", "tables of one batch"),
        ((1, 4, 9, 896), (1, 1, 9, 896), "half", "even and below 896"),
        ((1, 4, 9, 64), (1, 1, 9, 32), "half", "that of r1 and r2"),
        ((1, 4, 9, 64), (1, 1, 8, 64), "half", "does not fit input"),
        ((1, 4, 9, 64), (1, 1, 9, 64), "other", "must be half or interleave"),
    ],
)
def test_the_stand_in_refuses(torch_npu: ModuleType, x: Any, table: Any, mode: str, text: str) -> None:
    r = torch.ones(table, device="npu")
    with pytest.raises(RuntimeError, match=text):
        torch_npu.npu_rotary_mul(torch.ones((), device="npu").expand(x).contiguous(), r, r, mode)
