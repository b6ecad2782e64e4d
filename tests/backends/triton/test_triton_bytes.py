"""The bytes that the Triton kernels ask of memory, counted in Triton's interpreter, against the fewest that would do.

A memory-bound kernel is as fast as its bytes allow: one that asks for too many is slow on every GPU, and that can be
seen without one. Two counts: what is *asked* for (every lane whose mask is on), and what is *distinct* (how much of a
tensor was touched at all; what is asked twice in quick succession comes from a cache).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
from triton_cases import needs_loops
from triton_traffic import Traffic, total

from fusedops.testing import OPS
from fusedops_triton.bias._bias_dropout import dropout_backward, dropout_forward
from fusedops_triton.bias._bias_gelu import gelu_backward, gelu_forward
from fusedops_triton.launch import launcher, settings
from fusedops_triton.norms import _norm_settings
from fusedops_triton.norms._norm import norm_forward
from fusedops_triton.norms._norm_backward import norm_backward
from fusedops_triton.routing._routing import Routing, routing_forward
from fusedops_triton.softmax._softmax import softmax_backward, softmax_forward

SHAPES = [(2, 3, 4, 64), (2, 3, 5, 100), (2, 2, 3, 2048)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_reads_and_writes_once(shape: tuple[int, ...], dtype: torch.dtype, traffic: Traffic) -> None:
    x = torch.randn(shape).to(dtype)
    y = softmax_forward(x, None, 0.3, False)
    assert total(traffic) == 2 * x.nbytes
    assert traffic.asked(x) == traffic.distinct(x) == x.nbytes
    assert traffic.asked(y, "stores") == traffic.distinct(y, "stores") == y.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward_reads_two_and_writes_one(shape: tuple[int, ...], dtype: torch.dtype, traffic: Traffic) -> None:
    y, grad = torch.rand(shape).to(dtype), torch.randn(shape).to(dtype)
    softmax_backward(grad, y, 0.3, False)
    assert total(traffic) == 3 * y.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [128, 256])
def test_causal_leaves_out_what_is_above_the_diagonal(size: int, dtype: torch.dtype, traffic: Traffic) -> None:
    x = torch.randn(1, 1, size, size).to(dtype)
    below = x.element_size() * size * (size + 1) // 2
    y = softmax_forward(x, None, 0.3, True)
    forward = total(traffic)
    assert forward == pytest.approx(x.nbytes + below, rel=0.1)  # 0.75 of a copy
    assert forward < 0.8 * 2 * x.nbytes
    softmax_backward(x, y, 0.3, True)
    assert total(traffic) - forward == pytest.approx(x.nbytes + 2 * below, rel=0.1)  # one copy


@needs_loops
def test_causal_long_rows_leave_out_whole_blocks(traffic: Traffic) -> None:
    x = torch.randn(1, 1, 2, 33000)
    y = softmax_forward(x, None, 0.3, True)
    softmax_backward(x, y, 0.3, True)
    assert traffic.sizes["stores"] == 2 * x.nbytes
    assert traffic.sizes["loads"] == (2 + 4) * 2 * 32  # a sector of each row, twice over


@pytest.mark.parametrize("size_k", [48, 2048])
@pytest.mark.parametrize(
    "mask_shape", [(2, 3, 4, -1), (2, 1, 4, -1), (1, 1, 4, -1), (2, 1, 1, -1), (4, -1), (-1,)], ids=str
)
def test_a_mask_is_read_where_it_lies(mask_shape: tuple[int, ...], size_k: int, traffic: Traffic) -> None:
    x = torch.randn(2, 3, 4, size_k).to(torch.bfloat16)
    mask = torch.rand([size_k if size < 0 else size for size in mask_shape]) < 0.3
    y = softmax_forward(x, mask, 0.3, False)
    assert traffic.distinct(mask) == mask.nbytes  # from memory: 1 / h bytes an element
    assert traffic.asked(mask) == x.numel()  # from a cache: one
    assert traffic.asked(x) + traffic.asked(y, "stores") == 2 * x.nbytes
    assert total(traffic) == 2 * x.nbytes + x.numel()  # and nothing was read from a tensor made on the way


def test_an_expanded_mask_is_not_copied_but_a_copy_would_be_seen(traffic: Traffic) -> None:
    x = torch.randn(2, 3, 4, 2048)
    mask = torch.rand(2, 1, 4, 2048) < 0.3
    softmax_forward(x, mask.expand(2, 3, 4, 2048), 0.3, False)
    assert traffic.distinct(mask) == mask.nbytes
    copy = mask.expand(2, 3, 4, 2048).contiguous()
    softmax_forward(x, copy, 0.3, False)
    assert traffic.distinct(copy) == 3 * mask.nbytes


def test_heads_that_share_a_mask_follow_each_other(traffic: Traffic) -> None:
    x = torch.randn(2, 3, 4, 2048)
    mask = torch.rand(2, 1, 4, 2048) < 0.3
    softmax_forward(x, mask, 0.3, False)
    rows = [int(a[0] - mask.data_ptr()) // 2048 for a in traffic.of(mask, "loads")]
    assert rows == [row for row in range(8) for _ in range(3)]


@needs_loops
def test_rows_that_do_not_fit_are_read_twice(traffic: Traffic) -> None:
    x = torch.randn(1, 66000).to(torch.bfloat16)
    softmax_forward(x, None, 0.3, False)
    assert traffic.asked(x) == 2 * x.nbytes
    assert traffic.distinct(x) == x.nbytes
    assert traffic.sizes["stores"] == x.nbytes


def test_rows_with_gaps_are_copied_first(traffic: Traffic) -> None:
    # each element of such a row lies in another 32-byte sector: 16 times the bytes in bfloat16, and no count shows it
    x = torch.randn(1, 2, 64, 8).to(torch.bfloat16).transpose(-1, -2)
    softmax_backward(x, softmax_forward(x, None, 0.3, False), 0.3, False)
    assert traffic.asked(x) == 0
    assert total(traffic) == 5 * x.nbytes


# --------------------------------------------------------------------------------------------------------- with a bias

BIAS_OPS = ("bias_gelu", "bias_dropout", "bias_dropout_add")
SEED = 8  # bytes, read by every program


def run_forward(op: str, x: Tensor, bias: Tensor | None, seed: Tensor) -> tuple[Tensor, int]:
    """y, and the fewest bytes."""
    if op == "bias_gelu":
        return gelu_forward(x, bias, "tanh"), OPS[op].evidence.min_bytes(x, bias, "tanh")["forward"]
    if op == "bias_dropout":
        return dropout_forward(x, bias, None, 0.3, True, seed), OPS[op].evidence.min_bytes(x, bias, 0.3, True, seed)[
            "forward"
        ]
    return dropout_forward(x, bias, x, 0.3, True, seed), OPS[op].evidence.min_bytes(x, bias, x, 0.3, True, seed)[
        "forward"
    ]


def run_backward(op: str, x: Tensor, bias: Tensor | None, seed: Tensor) -> int:
    """The fewest bytes."""
    needs = (True, bias is not None)
    if op == "bias_gelu":
        gelu_backward(x.clone(), x, bias, "tanh", needs)
        return OPS[op].evidence.min_bytes(x, bias, "tanh")["backward"]
    dropout_backward(x, seed, bias, 0.3, True, x.dtype, needs)
    return OPS["bias_dropout"].evidence.min_bytes(x, bias, 0.3, True, seed)["backward"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias_shape", [None, (1000,), (5, 1000)], ids=str)
@pytest.mark.parametrize("op", BIAS_OPS)
def test_forward_with_a_bias_moves_the_fewest_bytes(
    op: str, bias_shape: tuple[int, ...] | None, dtype: torch.dtype, traffic: Traffic
) -> None:
    x, seed = torch.randn(5, 1000).to(dtype), torch.tensor([3])
    bias = None if bias_shape is None else torch.randn(bias_shape).to(dtype)
    y, fewest = run_forward(op, x, bias, seed)
    again = 0 if bias is None else traffic.asked(bias) - traffic.distinct(bias)  # from a cache
    assert fewest <= total(traffic) - again <= fewest + 5 * SEED
    assert traffic.asked(y, "stores") == y.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", BIAS_OPS[:2])  # the third has the backward of the second
def test_backward_with_a_bias_moves_hardly_more(
    op: str, dtype: torch.dtype, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "chip", settings.chip._replace(processors=1))  # as if x were larger
    launcher.clear_layout_caches()
    x, bias, seed = torch.randn(256, 64).to(dtype), torch.randn(64).to(dtype), torch.tensor([3])
    fewest = run_backward(op, x, bias, seed)
    launcher.clear_layout_caches()
    again = traffic.asked(bias) - traffic.distinct(bias)
    assert fewest < total(traffic) - again < 1.05 * fewest
    # what is more is 4 rows of sums, written and read
    assert total(traffic) - again <= fewest + 2 * 4 * 64 * 4 + 64 * SEED


@pytest.mark.parametrize("op", BIAS_OPS[:2])
@pytest.mark.parametrize("bias_shape", [None, (5, 1000)], ids=str)
def test_backward_in_flat_tiles_moves_the_fewest_bytes(
    op: str, bias_shape: tuple[int, ...] | None, traffic: Traffic
) -> None:
    x, seed = torch.randn(5, 1000), torch.tensor([3])
    fewest = run_backward(op, x, None if bias_shape is None else torch.randn(bias_shape), seed)
    assert fewest <= total(traffic) <= fewest + 5 * SEED


def test_a_gradient_that_is_not_wanted_is_not_written(traffic: Traffic) -> None:
    x, bias = torch.randn(64, 64), torch.randn(64)
    gelu_backward(x.clone(), x, bias, "tanh", (False, True))
    assert traffic.sizes["stores"] < 0.1 * x.nbytes


# --------------------------------------------------------------------------------------------------------------- norms


def norm_call(name: str, x: Tensor) -> tuple[dict[str, Tensor | None], int, int]:
    """Return the tensors of a call, and the fewest bytes forward and backward."""
    weight = torch.randn(x.shape[-1]).to(x.dtype)
    call: dict[str, Any] = {"x": x, "residual": x.clone(), "weight": weight, "bias": weight.clone()}
    fewest = OPS[name].evidence.min_bytes(
        *OPS[name].bind((), {key: call[key] for key in call if key in OPS[name].parameters})
    )
    tensors = {key: value if key in OPS[name].parameters else None for key, value in call.items()}
    return tensors, fewest["forward"], fewest["backward"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("rms_norm", torch.bfloat16),
        ("add_rms_norm", torch.float32),
        ("layer_norm", torch.float32),
        ("add_layer_norm", torch.bfloat16),
    ],
)
def test_a_norm_moves_the_fewest_bytes(
    name: str, dtype: torch.dtype, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_norm_settings, "NORM_PART_ROWS", 256)  # as if x were larger
    monkeypatch.setattr(settings, "chip", settings.chip._replace(processors=64))
    launcher.clear_layout_caches()
    x, centered = torch.randn(256, 200).to(dtype), name.endswith("layer_norm")
    tensors, forward, backward = norm_call(name, x)
    weight, bias, residual = tensors["weight"], tensors["bias"], tensors["residual"]
    values = 256 * 4 * (1 + centered)  # mean and rstd
    _, s, mean, rstd = norm_forward(x, residual, weight, bias, 1e-6, 0.0, centered, True)
    assert rstd is not None
    again = sum(traffic.asked(v) - traffic.distinct(v) for v in (weight, bias) if v is not None)  # from a cache
    assert total(traffic) == forward + values + again
    before, asked = total(traffic), traffic.asked(weight)
    dtypes = (dtype,) if residual is None else (dtype, None)  # autograd gives it to both
    norm_backward(x.clone(), residual, x if s is None else s, mean, rstd, weight, 0.0, dtypes, (weight, bias))
    launcher.clear_layout_caches()
    again = traffic.asked(weight) - asked - weight.nbytes
    assert backward + values <= total(traffic) - before - again <= backward + values + 200 * 4 * 16


@needs_loops
def test_rows_of_a_norm_that_do_not_fit_are_read_twice(traffic: Traffic) -> None:
    x = torch.randn(2, 33000).to(torch.bfloat16)
    norm_forward(x, None, None, None, 1e-6, 0.0, False, False)
    assert traffic.asked(x) == 2 * x.nbytes
    assert traffic.sizes["stores"] == x.nbytes


@needs_loops
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "topk_softmax"])
def test_routing_reads_the_logits_once(score: str, traffic: Traffic) -> None:
    x = torch.randn(7, 40).to(torch.bfloat16)
    routing_forward(x, None, None, Routing(3, score, 1, 1, "top2", True, 1e-20, 1.0))
    assert traffic.asked(x) == x.nbytes
