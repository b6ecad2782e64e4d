"""quantized_linear with the formats of the Hub: values on eager, cpu and triton, rows that stand alone, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from packed_weights import assert_rows_stand_alone, packed_weight

import fusedops
from fusedops.ops import quantized_linear
from fusedops.quantization import SCALED, Packed, unpack

EACH: dict[str, Callable[..., Packed]] = {
    **{format: partial(packed_weight, format) for format in (*SCALED, "MXFP4_GGUF", "NVFP4_GGUF")},
    "FP8_BLOCK by powers": partial(packed_weight, "FP8_BLOCK", dtype=torch.uint8),
    "FP4_GROUP32 by powers": partial(packed_weight, "FP4_GROUP32", dtype=torch.uint8),
    "FP8_ROW in bfloat16": partial(packed_weight, "FP8_ROW", dtype=torch.bfloat16),
    "INT4_GROUP of 32": partial(packed_weight, "INT4_GROUP", group=32, dtype=torch.float16),
    "INT4_GROUP with zeros": partial(packed_weight, "INT4_GROUP", group=64, zeros=True),
}
every_weight = pytest.mark.parametrize("name", EACH)
on_each_backend = pytest.mark.parametrize(
    ("name", "backend"),
    [
        (name, backend)
        for name in EACH
        for backend in ("eager", "cpu", "triton")
        if backend != "triton" or not name.endswith("GGUF")
    ],
    indirect=["backend"],
)


def with_odd_scales(packed: Packed) -> Packed:
    """Give some rows a scale that is tiny, 0, large, or NaN, and FP8 codes that are subnormal or NaN."""
    if packed.scales is None:
        return packed
    scales, codes = packed.scales.clone(), packed.codes.clone()
    if scales.dtype is torch.uint8:
        odd = (0x01, 0x00, 0x7E, 0x7F, 0x88) if packed.format == "NVFP4" else (0, 1, 240, 255)
        values = torch.tensor(odd, dtype=torch.uint8)
    else:
        values = torch.tensor([1e-37, 0.0, -3e4, torch.nan, torch.inf]).to(scales.dtype)
    for row, value in enumerate(values[: scales.shape[0]]):
        scales[row, -1] = value
    if SCALED[packed.format].bits == 8:
        codes[6, :8] = torch.tensor([0x7F, 0xFF, 0x80, 0x01, 0x81, 0x07, 0x00, 0x7E], dtype=torch.uint8)
    return Packed(packed.format, codes, scales, packed.global_scale, packed.zeros, shape=packed.shape)


@on_each_backend
def test_each_weight_has_its_value(name: str, backend: str) -> None:
    """A row of x with one 1 gives a column of the weight, exactly. The numbers of rows are those of other kernels."""
    packed = with_odd_scales(EACH[name](36, 256))
    weight = unpack(packed)
    finite = weight.isfinite().all(1)
    for rows in (slice(256), slice(5, 6), slice(5, 7), slice(5, 9), slice(5, 13)):
        got = quantized_linear(torch.eye(256)[rows], packed).t()
        assert torch.equal(got[finite], weight[:, rows][finite])
        assert not got[~finite].isfinite().all(1).any()


@on_each_backend
def test_the_gradient_of_x_has_each_weight(name: str, backend: str) -> None:
    packed = with_odd_scales(EACH[name](36, 320))
    weight = unpack(packed)
    x = torch.zeros(36, weight.shape[1], requires_grad=True)
    got = torch.autograd.grad(quantized_linear(x, packed), x, torch.eye(36))[0]
    finite = weight.isfinite().all(0)  # 0 times a weight that is not finite is NaN, in the column of that weight alone
    assert torch.equal(got[:, finite], weight[:, finite])
    assert got[:, ~finite].isnan().any(0).all()


@every_weight
def test_the_bits_of_a_row_depend_on_it_alone(name: str) -> None:
    assert_rows_stand_alone(EACH[name](70, 2304), torch.bfloat16)


@every_weight
def test_results_are_those_of_the_unpacked_weight(name: str, backend: str) -> None:
    packed = EACH[name](300, 1088)
    weight = unpack(packed, torch.float64)
    for rows in (1, 3, 50):
        x = torch.randn(rows, weight.shape[1])
        want = x.double() @ weight.t()
        scale = (x.abs().double() @ weight.t().abs()).max()
        assert (quantized_linear(x, packed).double() - want).abs().max() <= 1e-6 * scale
        assert quantized_linear(x[:, :0], _without_columns(packed)).eq(0).all()


def _without_columns(packed: Packed) -> Packed:
    return fusedops.quantization.pack(torch.zeros(packed.shape[0], 0), "Q8_0")


def test_calls_beside_the_blocks_of_cpu_are_left_with_the_reason() -> None:
    x = torch.randn(2, 200)
    for packed, text in (
        (packed_weight("FP8_ROW", 5, 200), "a multiple of 32"),
        (packed_weight("INT4_GROUP", 5, 192, group=24), "groups of 24 columns, expected a multiple of 32"),
    ):
        decision = fusedops.explain("quantized_linear", x[:, : packed.shape[1]], packed)
        assert decision.backend == "eager"
        assert text in str(decision)


def test_codes_that_lie_apart_are_read_where_they_are() -> None:
    wide = packed_weight("MXFP4", 12, 512)
    codes = torch.stack([wide.codes, wide.codes], 1)[:, 0]
    x = torch.randn(3, 512)
    apart = quantized_linear(x, codes, format="MXFP4", scales=wide.scales)
    assert torch.equal(apart, quantized_linear(x, wide))
