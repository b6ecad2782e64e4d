"""The kernels of quantized_linear in Triton's interpreter: each of the three, at the edges of a program; bytes read."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from packed_weights import odd_scales, packed_rows
from right import assert_right
from triton_cases import needs_loops
from triton_traffic import Traffic

import fusedops
from fusedops import testing
from fusedops.ops import quantized_linear
from fusedops.quantization import SCALED, dequantize, pack

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), needs_loops]  # NaN is wanted in some tests
SERVED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
OP = testing.OPS["quantized_linear"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", SERVED)
def test_each_weight_has_its_value(format: str, dtype: torch.dtype) -> None:
    """A row of x with one 1 gives a column of the weight, rounded once: also where its scale is subnormal or 0."""
    packed = odd_scales(packed_rows(format, 35, 32), format)
    weight = dequantize(packed, format)
    finite = weight.isfinite().all(1)
    # one by one, four at a time with a rest, and as a tile or by torch
    for rows in (slice(7, 8), slice(11, 17), slice(32)):
        got = quantized_linear(torch.eye(32, dtype=dtype)[rows], packed, format=format, backend="triton").t()
        assert torch.equal(got[finite], weight[:, rows][finite].to(dtype))
        assert not got[~finite].isfinite().all()


# of vectors and of tiles, in turn: the test above has the weights of each format in every kernel
SHAPES = {
    "vectors": ((1, 1056, torch.float32), (6, 1056, torch.bfloat16)),
    "tiles": ((131, 96, torch.bfloat16), (17, 96, torch.float32)),
}


@pytest.mark.parametrize(
    ("format", "rows", "columns", "dtype"),
    [(format, *shapes[turn % 2]) for turn, format in enumerate(SERVED) for shapes in SHAPES.values()],
)
def test_values_and_gradients(format: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    """Columns beyond a step of words, and outputs and rows beyond a program."""
    packed = packed_rows(format, 69, columns)
    with fusedops.use("triton", fallback="raise"):
        assert_right("quantized_linear", torch.randn(rows, columns).to(dtype), packed, torch.randn(69), format=format)


def test_the_weight_is_unpacked_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops_triton.quantized import _quantized

    x, packed = torch.randn(20, 64, requires_grad=True), packed_rows("Q4_1", 23, 64)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        y = quantized_linear(x, packed, format="Q4_1", backend="triton")
        return y.detach(), torch.autograd.grad(y, x, torch.ones_like(y))[0]

    whole = both()
    monkeypatch.setattr(_quantized, "_CHUNK", 64 * 5)
    for part, want in zip(both(), whole):
        torch.testing.assert_close(part, want)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("format", "numbers", "data"), [("Q8_0", 1, 16), ("Q4_1", 2, 8)])
def test_a_few_rows_read_each_word_of_the_weight_once(
    format: str, numbers: int, data: int, rows: int, traffic: Traffic
) -> None:
    words = packed_rows(format, 9, 320).view(torch.int16)
    quantized_linear(torch.randn(rows, 320), words.view(torch.uint8), format=format, backend="triton")
    assert traffic.distinct(words) == 2 * words.numel()
    # beside each word of data, the numbers of its block, from the cache
    assert traffic.asked(words) == 2 * 90 * data * (1 + numbers)


def test_a_packed_weight_at_an_odd_address() -> None:
    packed = packed_rows("Q4_0", 5, 64)
    moved = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].view(packed.shape).copy_(packed)
    x = torch.randn(3, 64)
    assert torch.equal(*(quantized_linear(x, each, format="Q4_0", backend="triton") for each in (packed, moved)))


# ------------------------------------------------------------------------------------------------- a tensor of scales


@pytest.mark.parametrize(
    ("rows", "outputs", "columns", "dtype"), [(6, 9, 1088, torch.bfloat16), (131, 133, 64, torch.float16)]
)
@pytest.mark.parametrize("format", SCALED)
def test_values_and_gradients_with_a_tensor_of_scales(
    format: str, rows: int, outputs: int, columns: int, dtype: torch.dtype
) -> None:
    """Columns beyond a step of words, and rows and outputs beyond a tile."""
    packed = pack(torch.randn(outputs, columns), format, group=32, symmetric=False)
    with fusedops.use("triton", fallback="raise"):
        assert_right("quantized_linear", torch.randn(rows, columns).to(dtype), packed, torch.randn(outputs))


@pytest.mark.parametrize(("format", "columns"), [("FP8_BLOCK", 131), ("FP8_ROW", 37), ("INT4_GROUP", 40)])
@pytest.mark.parametrize("rows", [3, 20])
def test_rows_of_no_whole_steps(format: str, columns: int, rows: int) -> None:
    packed = pack(torch.randn(130, columns), format, group=8)
    with fusedops.use("triton", fallback="raise"):
        assert_right("quantized_linear", torch.randn(rows, columns).half(), packed, None)


def test_chunks_begin_within_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops_triton.quantized import _quantized

    x, packed = torch.randn(20, 64), pack(torch.randn(300, 64), "FP8_BLOCK")
    monkeypatch.setattr(_quantized, "_CHUNK", 64 * 100)
    with fusedops.use("triton", fallback="raise"):
        assert_right("quantized_linear", x, packed, None)


def test_a_few_rows_read_each_code_and_scale_once(traffic: Traffic) -> None:
    packed = pack(torch.randn(9, 320), "MXFP4")
    words = packed.codes.view(torch.int32)
    quantized_linear(
        torch.randn(4, 320), words.view(torch.uint8), format="MXFP4", scales=packed.scales, backend="triton"
    )
    assert traffic.distinct(words) == traffic.asked(words) == words.nbytes
