"""The formats of the Hub: the values of their own packages, bit for bit, and errors for tensors that do not fit."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedops.errors import InvalidInputError
from fusedops.quantization import FORMATS, SCALED, Packed, pack, unpack

every_scaled = pytest.mark.parametrize("format", SCALED)
of_both_ranks = pytest.mark.parametrize("shape", [(24, 256), (3, 24, 256)])


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def random_words(*shape: int, seed: int = 0) -> Tensor:
    return random_bytes(*shape[:-1], 4 * shape[-1], seed=seed).view(torch.int32)


def random_scales(*shape: int) -> Tensor:
    """Return numbers of many sizes, subnormal ones and 0 among them."""
    scales = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 0.02
    flat = scales.view(-1)
    flat[1::7], flat[2::7], flat[3::7] = 1e-41, 0.0, -0.03
    return scales


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.masked_fill(nan, 0).view(torch.int32), want.masked_fill(nan, 0).float().view(torch.int32))


@of_both_ranks
def test_mxfp4_is_that_of_transformers(shape: tuple[int, ...]) -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, powers = random_bytes(*shape[:-1], shape[-1] // 32, 16), random_bytes(*shape[:-1], shape[-1] // 32, seed=1)
    powers.view(-1)[:3] = torch.tensor([0, 1, 254], dtype=torch.uint8)
    powers[powers == 255] = 7
    lead = blocks if len(shape) == 3 else blocks[None]
    theirs = module._convert_moe_packed_tensors(lead, powers.view(*lead.shape[:-1]), dtype=torch.float32)
    want = theirs.transpose(1, 2).reshape(shape)
    assert_same_bits(unpack(Packed("MXFP4", blocks, powers, shape=shape)), want)
    flat = Packed("MXFP4", blocks.flatten(-2), powers, shape=shape)
    assert_same_bits(unpack(flat), want)


def test_scales_that_are_not_numbers() -> None:
    codes = torch.full((1, 16), 0x21, dtype=torch.uint8)
    for power, want in ((255, torch.nan), (0, 2.0**-127), (254, 2.0**127)):
        scales = torch.tensor([[power]], dtype=torch.uint8)
        assert_same_bits(unpack(Packed("MXFP4", codes, scales, shape=(1, 32)))[0, 1:2], torch.tensor([want]))
    numbers = torch.tensor([[0x7F, 0xFF, 0x80, 0x01]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = unpack(Packed("FP8_TENSOR", numbers, torch.tensor(2.0), shape=(1, 4)))[0]
    assert got[:2].isnan().all()
    assert got[2].item() == 0
    assert got[2].signbit()
    assert got[3].item() == 2.0**-8


def compressed_args(**options: Any) -> Any:
    module = pytest.importorskip("compressed_tensors.quantization")
    return module.QuantizationArgs(**options)


@of_both_ranks
def test_nvfp4_is_that_of_compressed_tensors(shape: tuple[int, ...]) -> None:
    args = compressed_args(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    codes = random_bytes(*shape[:-1], shape[-1] // 2)
    scales = random_bytes(*shape[:-1], shape[-1] // 16, seed=1).view(torch.float8_e4m3fn)
    divisor = torch.tensor([113.7, 5.1, 2000.3])[: shape[0]] if len(shape) == 3 else torch.tensor([113.7])
    want: list[Tensor] = []
    for e in range(len(divisor)):
        own = (codes[e], scales[e]) if len(shape) == 3 else (codes, scales)
        numbers = unpack_fp4_from_uint8(own[0], *shape[-2:], dtype=torch.float32)
        want.append(dequantize(numbers, own[1].float(), args=args, global_scale=divisor[e], dtype=torch.float32))
    assert_same_bits(unpack(Packed("NVFP4", codes, scales, divisor, shape=shape)), torch.stack(want).view(shape))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 64, 256])
@of_both_ranks
def test_int4_is_that_of_compressed_tensors(shape: tuple[int, ...], group: int, symmetric: bool) -> None:
    args = compressed_args(num_bits=4, type="int", strategy="group", group_size=group, symmetric=symmetric)
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    *lead, outputs, columns = shape
    words, scales = random_words(*lead, outputs, columns // 8), random_scales(*lead, outputs, columns // group)
    plain = random_bytes(*lead, outputs, columns // group, seed=3).view(torch.int8) // 16
    zeros = None if symmetric else pack_to_int32(plain, 4, packed_dim=0)
    numbers = unpack_from_int32(words, 4, torch.Size(shape))
    flat = numbers.view(-1, columns), scales.view(-1, columns // group), plain.view(-1, columns // group)
    want = dequantize(flat[0], flat[1], None if symmetric else flat[2], args=args, dtype=torch.float32)
    assert_same_bits(unpack(Packed("INT4_GROUP", words, scales, zeros=zeros, shape=shape)), want.view(shape))


@pytest.mark.parametrize(
    ("format", "powers"),
    [("FP8_BLOCK", False), ("FP8_BLOCK", True), ("FP8_ROW", False), ("FP8_TENSOR", False), ("FP4_GROUP32", False),
     ("FP4_GROUP32", True)],
)  # fmt: skip
def test_fp8_and_fp4_are_those_of_transformers(format: str, powers: bool) -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    shape = (256, 384)
    of_scales = {"FP8_BLOCK": (2, 3), "FP8_ROW": (256, 1), "FP8_TENSOR": (1, 1), "FP4_GROUP32": (256, 12)}[format]
    scales = random_bytes(*of_scales, seed=5).clamp(1, 254) if powers else random_scales(*of_scales)
    four = format == "FP4_GROUP32"
    codes = random_bytes(256, 192).view(torch.int8) if four else random_bytes(*shape).view(torch.float8_e4m3fn)
    want = module.Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    assert_same_bits(unpack(Packed(format, codes, scales, shape=shape)), want)


@pytest.mark.parametrize("shape", [(1, 1), (128, 129), (130, 127), (200, 300), (5, 256)])
def test_fp8_blocks_may_be_partial(shape: tuple[int, int]) -> None:
    codes, scales = random_bytes(*shape), random_scales(-(-shape[0] // 128), -(-shape[1] // 128))
    got = unpack(Packed("FP8_BLOCK", codes, scales, shape=shape))
    want = codes.view(torch.float8_e4m3fn).float()
    for n in range(shape[0]):
        for k in range(0, shape[1], 128):
            want[n, k : k + 128] *= scales[n // 128, k // 128]
    assert_same_bits(got, want)


def test_nf4_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
    weight[3, :64] = 0
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    mine = pack(weight, "NF4")
    assert torch.equal(mine.codes.view(-1), codes.view(-1))
    assert torch.equal(mine.scales.view(-1), state.absmax)  # pyright: ignore[reportOptionalMemberAccess]
    packed = Packed("NF4", codes, state.absmax, shape=(24, 256))
    assert_same_bits(unpack(packed), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("format", ["GPTQ", "GPTQ_V2", "AWQ"])
@pytest.mark.parametrize("group", [32, 64])
def test_gptq_and_awq_by_their_definition(format: str, group: int) -> None:
    """A loop over the weights, written from the layout: AWQ keeps outputs 0 2 4 6 1 3 5 7 of a word, low bits first."""
    outputs, columns = 24, 64
    words = random_words(columns, outputs // 8) if format == "AWQ" else random_words(columns // 8, outputs)
    zeros, scales = (
        random_words(columns // group, outputs // 8, seed=1),
        random_scales(columns // group, outputs).half(),
    )
    packed = Packed(format, words, scales, zeros=zeros, shape=(outputs, columns))
    want = torch.empty(outputs, columns)
    for n in range(outputs):
        place = [0, 2, 4, 6, 1, 3, 5, 7].index(n % 8) if format == "AWQ" else n % 8
        for k in range(columns):
            of_zero = int(zeros[k // group, n // 8]) >> (4 * place) & 15
            zero = of_zero + 1 if format == "GPTQ" else of_zero
            word = int(words[k, n // 8]) >> (4 * place) if format == "AWQ" else int(words[k // 8, n]) >> (4 * (k % 8))
            want[n, k] = (torch.tensor(float((word & 15) - zero)) * scales[k // group, n].float()).item()
    assert packed.format == "INT4_GROUP"
    assert_same_bits(unpack(packed), want)


@every_scaled
@of_both_ranks
def test_packed_weights_are_near(format: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 0.02
    bound = 0.13 if SCALED[format].bits == 4 else 0.04
    for dtype in (torch.float32, torch.bfloat16):
        packed = pack(weight.to(dtype), format)
        error = float((unpack(packed) - weight).square().sum() / weight.square().sum()) ** 0.5
        assert bound / 5 < error < bound
        assert packed.nbytes <= weight.numel() * SCALED[format].bits / 8 * 1.26 + 8
    assert unpack(pack(torch.zeros(shape), format)).eq(0).all()


@pytest.mark.parametrize("format", [*FORMATS, *SCALED])
def test_a_packed_weight_is_a_value(format: str) -> None:
    weight = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(4))
    packed = pack(weight, format)
    whole = unpack(packed)
    assert packed.shape == (2, 16, 256)
    turned = pack(weight.mT.contiguous().mT, format)  # of gpt-oss: the tensors are by row, or each call copies them
    assert all(each.is_contiguous() for each in turned.tensors().values())
    assert torch.equal(unpack(turned), whole)
    assert torch.equal(unpack(packed[1]), whole[1])
    assert torch.equal(unpack(pickle.loads(pickle.dumps(packed))), whole)
    buffer = io.BytesIO()
    torch.save(packed.tensors(), buffer)
    buffer.seek(0)
    again = Packed(format, **torch.load(buffer), shape=packed.shape)
    assert torch.equal(unpack(again, torch.bfloat16), whole.to(torch.bfloat16))
    assert packed.to("meta").device.type == "meta"
    assert repr(packed).startswith(f"Packed({format}, shape=(2, 16, 256)")


@every_scaled
def test_tensors_that_do_not_fit_are_refused(format: str) -> None:
    packed = pack(torch.randn(16, 256), format)
    tensors = packed.tensors()
    for name, tensor in tensors.items():
        wrong = {"codes": torch.ones(3), "scales": torch.ones(3, 3, 3), "global_scale": torch.ones(3)}[name]
        with pytest.raises(InvalidInputError, match=f"got {name}"):
            Packed(format, **{**tensors, name: wrong}, shape=packed.shape)
        other: Any = tensor.double() if name == "codes" else None
        with pytest.raises(InvalidInputError, match=f"got {name} of float64" if name == "codes" else f"got {name}"):
            Packed(format, **{**tensors, name: other}, shape=packed.shape)
    extra = "zeros" if format != "INT4_GROUP" else "global_scale"
    with pytest.raises(InvalidInputError, match="expected None"):
        Packed(format, **tensors, **{extra: torch.ones(1)}, shape=packed.shape)
    with pytest.raises(InvalidInputError, match=r"\(N, K\)"):
        Packed(format, **tensors, shape=(256,))
    if SCALED[format].multiple > 1:
        with pytest.raises(InvalidInputError, match="multiple of"):
            Packed(format, **tensors, shape=(16, 255))
