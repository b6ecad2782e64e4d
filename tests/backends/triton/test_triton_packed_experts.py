"""quantized_experts in Triton's interpreter: both products at the edges of a tile, and what is never read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from right import assert_right
from triton_cases import needs_loops

import fusedops
from fusedops.quantization import Packed, pack

pytestmark = needs_loops

#: H, I: columns beyond a step, outputs beyond a tile, last blocks and tiles that are partial.
CASES = {
    "MXFP4": (torch.bfloat16, 96, 32),
    "NVFP4": (torch.float32, 48, 16),
    "FP8_BLOCK": (torch.float16, 144, 16),
    "FP8_TENSOR": (torch.bfloat16, 16, 80),
    "INT4_GROUP": (torch.bfloat16, 64, 32),
    "NF4": (torch.float16, 64, 64),
}


def call_of(format: str) -> list[Any]:
    torch.manual_seed(0)
    dtype, width, inner = CASES[format]
    up, down = (
        pack(torch.randn(4, rows, columns) * columns**-0.5, format, group=32, symmetric=False)
        for rows, columns in ((2 * inner, width), (width, inner))
    )
    index = torch.tensor([[0, 2], [2, 0], [-1, 0]]).repeat(25, 1)  # rows beyond a tile; 1 and 3 have none
    x, weights = torch.randn(75, width).to(dtype), torch.rand(75, 2)
    return [x, index, weights, up, down, torch.randn(4, 2 * inner), torch.randn(4, width)]


@pytest.mark.parametrize("format", CASES)
def test_values_and_gradients(format: str) -> None:
    with fusedops.use("triton", fallback="raise"):
        assert_right("quantized_experts", *call_of(format))


def test_an_expert_without_rows_is_not_read() -> None:
    args = call_of("FP8_BLOCK")

    def both(args: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x = args[0].clone().requires_grad_()
        y = fusedops.experts(x, *args[1:], backend="triton")
        return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]

    want = both(args)
    for at in (3, 4):
        codes = args[at].codes.clone()
        codes[1::2] = 0x7F
        args[at] = Packed("FP8_BLOCK", codes, args[at].scales, shape=args[at].shape)
    for got, one in zip(both(args), want):
        assert torch.equal(got, one)
