"""experts with packed weights beside the same call with unpacked ones: values, gradients, what is never read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from packed_weights import packed_weight
from torch import Tensor

import fusedops
from fusedops.quantization import FORMATS, SCALED, Packed, pack, unpack

EACH: dict[str, Callable[..., Packed]] = {
    **{format: partial(packed_weight, format) for format in (*SCALED, *FORMATS)},
    "FP8_BLOCK by powers": partial(packed_weight, "FP8_BLOCK", dtype=torch.uint8),
    "INT4_GROUP with zeros": partial(packed_weight, "INT4_GROUP", group=64, zeros=True),
}
GPT_OSS: dict[str, Any] = {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "interleaved": True}


def of_experts(name: str, experts: int, rows: int, columns: int) -> Packed:
    """Return a packed weight (E, N, K), whose scales differ from expert to expert."""
    each = [EACH[name](rows, columns) for _ in range(experts)]
    tensors = {
        key: torch.stack([one.tensors()[key].roll(e, 0) if one.tensors()[key].dim() else one.tensors()[key] + e
                          for e, one in enumerate(each)])
        for key in each[0].tensors()
    }  # fmt: skip
    if SCALED[each[0].format].e4m3 if each[0].format in SCALED else False:
        tensors["scales"] = tensors["scales"].view(torch.float8_e4m3fn)
    return Packed(each[0].format, **tensors, shape=(experts, rows, columns))


def a_call(tokens: int, width: int = 0, inner: int = 0, name: str = "MXFP4") -> dict[str, Any]:
    """Return a call with sentinels, an expert that no token has, and one that a token has twice."""
    torch.manual_seed(tokens)
    experts, block = 5, 256 if name.endswith("_K") else 64
    width, inner = width or block, inner or block
    index = torch.randint(experts - 1, (tokens, 3))
    index[::3, 1] = experts
    index[1::4, 0] = -1
    index[-1] = index[-1, :1]
    return {
        "x": torch.randn(tokens, width).requires_grad_(),
        "index": index,
        "weights": torch.rand(tokens, 3).requires_grad_(),
        "up": of_experts(name, experts, 2 * inner, width),
        "down": of_experts(name, experts, width, inner),
        "up_bias": torch.randn(experts, 2 * inner).requires_grad_(),
        "down_bias": torch.randn(experts, width).requires_grad_(),
    }


def with_gradients(call: dict[str, Any], **options: Any) -> list[Tensor]:
    y = fusedops.experts(**call, **options)
    inputs = [each for each in call.values() if isinstance(each, Tensor) and each.requires_grad]
    grad = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def unpacked(call: dict[str, Any]) -> dict[str, Any]:
    return {name: unpack(each).double() if isinstance(each, Packed) else each.detach().double().requires_grad_()
            if each.is_floating_point() else each for name, each in call.items()}  # fmt: skip


def near(got: list[Tensor], want: list[Tensor], share: float = 6e-6) -> None:
    """Compare with float64. Of float32, also unpacked, gradients are off by 3.5e-6 where weights are large (Q6_K)."""
    for number, (one, other) in enumerate(zip(got, want)):
        largest = other.abs().max().clamp(min=1e-30)
        assert (one.double() - other).abs().max() <= share * largest, number


@pytest.mark.parametrize("name", EACH)
def test_results_and_gradients_are_those_of_the_unpacked_weights(name: str, backend: str) -> None:
    call = a_call(9, name=name)
    near(with_gradients(call, **GPT_OSS), with_gradients(unpacked(call), **GPT_OSS, backend="eager"))


@pytest.mark.parametrize("tokens", [1, 30, 250])
def test_any_number_of_tokens(tokens: int, backend: str) -> None:
    """The rows of an expert are those of each kernel: one, few, those of a tile, and more."""
    call = a_call(tokens, width=1056, inner=32)
    near(with_gradients(call), with_gradients(unpacked(call), backend="eager"))


@pytest.mark.parametrize("activation", ["geglu", "geglu_tanh", "silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_each_activation(activation: str, backend: str) -> None:
    call = a_call(9)
    if not activation.startswith("geglu"):
        call["down"] = of_experts("MXFP4", 5, 64, 128)
    near(
        with_gradients(call, activation=activation),
        with_gradients(unpacked(call), activation=activation, backend="eager"),
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("options", [GPT_OSS, {"activation": "relu2"}])
def test_factors_of_lora_count_as_their_product_in_the_weight(
    packed: bool, options: dict[str, Any], backend: str
) -> None:
    call, rank = a_call(30, width=96, inner=64), 4
    if "activation" in options:
        call["down"] = of_experts("MXFP4", 5, 96, 128)
    inner = call["down"].shape[2]
    shapes = {"up_lora": (rank, 96), "up_lora_b": (128, rank), "down_lora": (rank, inner), "down_lora_b": (96, rank)}
    call |= {name: (0.3 * torch.randn(5, *shape)).requires_grad_() for name, shape in shapes.items()}
    wide = unpacked(call)
    merged = dict(wide)
    for name in ("up", "down"):
        a, b = merged.pop(f"{name}_lora"), merged.pop(f"{name}_lora_b")
        merged[name] = wide[name] + 0.7 * b @ a
    y = fusedops.experts(**merged, **options, backend="eager")
    inputs = [each for each in wide.values() if each.requires_grad]
    grad = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)
    want = [y.detach(), *torch.autograd.grad(y, inputs, grad)]
    if not packed:
        call |= {name: unpack(call[name]) for name in ("up", "down")}
    near(with_gradients(call, **options, lora_scale=0.7), want)


def test_an_expert_without_rows_is_never_read(backend: str) -> None:
    call = a_call(6, name="FP8_BLOCK")
    want = with_gradients(call)
    for name in ("up", "down"):
        packed: Packed = call[name]
        codes, scales = packed.codes.clone(), packed.scales
        assert scales is not None
        scales = scales.clone()
        codes[4], scales[4] = 0x7F, torch.nan
        call[name] = Packed("FP8_BLOCK", codes, scales, shape=packed.shape)
    for got, one in zip(with_gradients(call), want):
        assert torch.equal(got, one)


@pytest.mark.parametrize("tokens", [0, 3])
def test_no_rows(tokens: int, backend: str) -> None:
    call = a_call(max(tokens, 1))
    for name in ("x", "index", "weights"):
        call[name] = call[name].detach()[:tokens].requires_grad_(name != "index" and tokens > 0)
    call["index"] = torch.full_like(call["index"], 99)
    y, *gradients = with_gradients(call)
    assert y.shape == (tokens, 64)
    assert not any(each.any() for each in (y, *gradients))


def test_a_pickled_weight_of_experts_has_the_same_results() -> None:
    call = a_call(4, name="NVFP4")
    again = {**call, "up": pickle.loads(pickle.dumps(call["up"]))}
    assert torch.equal(fusedops.experts(**call), fusedops.experts(**again))


def test_compiled_and_explained() -> None:
    call = a_call(5)
    compiled = torch.compile(fusedops.experts, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**call), fusedops.experts(**call))
    assert fusedops.explain("quantized_experts", **call).backend in ("cpu", "eager")


def test_mixtures_of_two_formats() -> None:
    call = a_call(5)
    call["down"] = of_experts("NF4", 5, 64, 64)
    near([fusedops.experts(**call)], [fusedops.experts(**unpacked(call))])


@pytest.mark.parametrize("of", ["eager", "cpu"])
@pytest.mark.parametrize("name", ["up", "down"])
def test_one_packed_weight_beside_one_that_is_not(name: str, of: str) -> None:
    """The weight that is not packed has a gradient, of 0 for an expert without rows, whose codes are never read."""
    call = a_call(30, width=96, inner=64, name="FP8_ROW")
    other = "down" if name == "up" else "up"
    call[other] = unpack(call[other]).requires_grad_()
    shapes = {"up_lora": (4, 96), "up_lora_b": (128, 4), "down_lora": (4, 64), "down_lora_b": (96, 4)}
    call |= {key: (0.3 * torch.randn(5, *shape)).requires_grad_() for key, shape in shapes.items()}
    options: dict[str, Any] = {**GPT_OSS, "lora_scale": 0.7}
    want = with_gradients(unpacked(call), **options, backend="eager")
    call[name].codes[4] = 0x7F
    none = {**call, "index": torch.full_like(call["index"], -1)}
    with fusedops.use(of, fallback="silent"):  # cpu has no grouped_matmul
        got = with_gradients(call, **options)
        of_none = with_gradients(none, **options)
    near(got, want)
    assert not got[3][4].any()
    assert not any(each.any() for each in of_none)


def test_a_packed_layer_is_small() -> None:
    weight = torch.randn(4, 64, 64)
    assert pack(weight, "MXFP4").nbytes <= 0.27 * weight.bfloat16().nbytes + 1
