"""Checkpoints of the Hub with packed weights, as the packages of the formats write them, and the unpacked models."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf_files import llama
from mixtures import gpt_oss, qwen3
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
E4M3_MAX = 448.0
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word, from its low bits
GROUP = 32


class Kind(NamedTuple):
    """A kind of checkpoints: its quantization_config, and the tensors and the numbers of a weight."""

    config: dict[str, Any]
    pack: Callable[[Tensor], tuple[Tensors, Tensor]]


def groups(weight: Tensor, size: int = GROUP) -> Tensor:
    return weight.reshape(*weight.shape[:-1], -1, size)


def in_words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Return codes (..., 8 * n) of 4 bits in int32 words (..., n): bits 4 * i have code order[i]."""
    parts = groups(codes.long(), 8)[..., list(order)] << (4 * torch.arange(8))
    return parts.sum(-1).to(torch.int32)


def fp8_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    scale = padded.reshape(padded.shape[0] // 128, 128, -1, 128).abs().amax((1, 3)) / E4M3_MAX
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale, "input_scale": torch.ones(1)}, codes.float() * wide


def fp8_tensor(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax() / E4M3_MAX
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale, "activation_scale": torch.ones(())}, codes.float() * scale


def fp8_rows(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / E4M3_MAX
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def scheme(**weights: Any) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compressed_floats(weight: Tensor) -> tuple[Tensors, Tensor]:
    from compressed_tensors.compressors import FloatQuantizationCompressor as Compressor

    kind = scheme(num_bits=8, type="float", strategy="channel")
    scale = weight.abs().amax(1, keepdim=True) / E4M3_MAX
    tensors = Compressor.compress({"weight": weight, "weight_scale": scale}, kind)
    return tensors, Compressor.decompress(tensors, kind)["weight"]


def compressed_ints(symmetric: bool) -> Any:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor

        kind = scheme(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=symmetric)
        low, high = groups(weight).amin(-1), groups(weight).amax(-1)
        scale = torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15
        zero = torch.zeros_like(scale) if symmetric else (-8 - low / scale).round().clamp(-8, 7)
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        tensors = Compressor.compress(given, kind)
        return tensors, Compressor.decompress(tensors, kind)["weight"]

    return pack


def compressed_fp4(weight: Tensor, largest: float = 0.0) -> tuple[Tensors, Tensor]:
    """Pack by NVFP4; largest: from which the divisor follows, 0 for the largest weight."""
    from compressed_tensors.compressors import NVFP4PackedCompressor as Compressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    kind = scheme(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    divisor = (E4M3_MAX * 6 / (largest or weight.abs().amax())) * torch.ones(1)
    scale = (groups(weight, 16).abs().amax(-1) / 6 * divisor).to(torch.float8_e4m3fn).float()
    tensors = Compressor.compress({"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}, kind)
    numbers = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
    wide = tensors["weight_scale"].float() / divisor
    return tensors, (groups(numbers, 16) * wide[..., None]).flatten(-2)


def compressed_mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    from compressed_tensors.compressors import MXFP4PackedCompressor as Compressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    kind = scheme(num_bits=4, type="float", strategy="group", group_size=32)
    scale = torch.exp2((groups(weight).abs().amax(-1) / 6).log2().ceil())
    tensors = Compressor.compress({"weight": weight, "weight_scale": scale}, kind)
    numbers = unpack_fp4_from_uint8(tensors["weight_packed"], *weight.shape, dtype=torch.float32)
    return tensors, (groups(numbers) * scale[..., None]).flatten(-2)


def integers(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes (N, K), scales and zeros (N, G) of 4 bits, and the numbers that they stand for."""
    low, high = groups(weight).amin(-1), groups(weight).amax(-1)
    scale = ((high - low) / 15).half()
    zero = (-low / scale).round().clamp(1, 15)
    codes = ((groups(weight) / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.flatten(-2), scale, zero, ((codes - zero[..., None]) * scale[..., None].float()).flatten(-2)


def gptq(before: int) -> Any:
    """Return how a weight is packed by GPTQ, in words along K; before: how far a stored zero is below the zero."""

    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scale, zero, numbers = integers(weight)
        return {
            "qweight": in_words(codes).t().contiguous(),
            "qzeros": in_words(zero.t() - before),
            "scales": scale.t().contiguous(),
            "g_idx": (torch.arange(weight.shape[1]) // GROUP).to(torch.int32),
            "bias": torch.zeros(weight.shape[0]),
        }, numbers

    return pack


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zero, numbers = integers(weight)
    return {
        "qweight": in_words(codes.t(), AWQ_ORDER),
        "qzeros": in_words(zero.t(), AWQ_ORDER),
        "scales": scale.t().contiguous(),
    }, numbers


def nf4(nested: bool) -> Any:
    def pack(weight: Tensor) -> tuple[Tensors, Tensor]:
        from bitsandbytes import functional as bitsandbytes

        codes, state = bitsandbytes.quantize_4bit(weight, compress_statistics=nested, quant_type="nf4", blocksize=64)
        more = {f"weight.{name}": each for name, each in state.as_dict(packed=True).items()}
        return {"weight": codes, **more}, bitsandbytes.dequantize_4bit(codes, state)

    return pack


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    config = {"config_groups": {"group_0": group}, "format": format, "ignore": ["lm_head"]}
    return {**config, "quantization_status": "compressed", "quant_method": "compressed-tensors"}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
KINDS = {
    "fp8": Kind(FP8, fp8_blocks),
    "fp8 tensors": Kind({**FP8, "weight_block_size": None, "activation_scheme": "static"}, fp8_tensor),
    "fbgemm_fp8": Kind({"quant_method": "fbgemm_fp8"}, fp8_rows),
    "float-quantized": Kind(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"), compressed_floats
    ),
    "pack-quantized": Kind(compressed("pack-quantized", **INTS), compressed_ints(True)),
    "pack-quantized with zeros": Kind(compressed("pack-quantized", **INTS, symmetric=False), compressed_ints(False)),
    "nvfp4-pack-quantized": Kind(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        compressed_fp4,
    ),
    "mxfp4-pack-quantized": Kind(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), compressed_mxfp4
    ),
    "gptq": Kind(GPTQ, gptq(1)),
    "gptq_v2": Kind({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(0)),
    "awq": Kind({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "bitsandbytes": Kind(BITSANDBYTES, nf4(False)),
    "bitsandbytes, nested": Kind({**BITSANDBYTES, "bnb_4bit_use_double_quant": True}, nf4(True)),
}


def write_packed(
    folder: Path, kind: str, change: Callable[[Tensors, dict[str, Any]], None] | None = None, **sizes: int
) -> Any:
    """Write a model of Llama whose linear layers but the last are packed; return it with the unpacked weights.

    change: is given the tensors and the config before they are written, in two files.
    """
    folder.mkdir(exist_ok=True)
    changes: dict[str, Any] = {**SIZES, **sizes}
    model, (config, pack) = llama(**changes), KINDS[kind]
    tensors: Tensors = model.state_dict()
    for name, layer in model.named_modules():
        if type(layer) is torch.nn.Linear and name != "lm_head":
            packed, numbers = pack(layer.weight.detach())
            layer.weight.data = numbers
            del tensors[f"{name}.weight"]
            tensors.update({f"{name}.{leaf}": each for leaf, each in packed.items() if f"{name}.{leaf}" not in tensors})
    _write(folder, model, tensors, config, change)
    return model


def share_of_a_load(folder: Path) -> float:
    """Return the most memory of a load, beyond that of the model in ``small``, as a share of the size of the files."""
    program = """
import re, sys
from fusedops.integrations.transformers import from_packed
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
from_packed(sys.argv[1] + "/small")  # what is imported, and allocated once
open("/proc/self/clear_refs", "w").write("5")
before = most()
model = from_packed(sys.argv[1])
print(most() - before)
"""
    done = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True, check=True)
    size = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    return int(done.stdout) / size


def write_mixture(
    folder: Path, kind: str | Kind, change: Callable[[Tensors, dict[str, Any]], None] | None = None, **sizes: int
) -> Any:
    """Write a mixture whose experts and linear layers are packed, as Qwen3-MoE, or as gpt-oss for "mxfp4"."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model = (gpt_oss if kind == "mxfp4" else qwen3)(**sizes).eval()
    tensors: Tensors = model.state_dict()
    if kind == "mxfp4":
        _pack_gpt_oss(model, tensors)
        _write(folder, model, tensors, {"quant_method": "mxfp4"}, change)
        return model
    config, pack = KINDS[kind] if isinstance(kind, str) else kind

    def packed(name: str, weight: Tensor) -> Tensor:
        parts, numbers = pack(weight.detach().clone())
        tensors.update({f"{name}.{leaf}": each for leaf, each in parts.items() if leaf != "bias"})
        return numbers

    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            del tensors[f"{name}.weight"]
            module.weight.data = packed(name, module.weight)
        elif type(module).__name__ == "Qwen3MoeExperts":
            del tensors[f"{name}.gate_up_proj"], tensors[f"{name}.down_proj"]
            for e in range(module.num_experts):
                for layer, rows in zip(("gate_proj", "up_proj"), module.gate_up_proj.data[e].chunk(2)):
                    rows.copy_(packed(f"{name}.{e}.{layer}", rows))
                module.down_proj.data[e] = packed(f"{name}.{e}.down_proj", module.down_proj[e])
    _write(folder, model, tensors, config, change)
    return model


def _pack_gpt_oss(model: Any, tensors: Tensors) -> None:
    """Give each experts the numbers of random codes and scales, as transformers unpacks them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for name, module in model.named_modules():
        if type(module).__name__ != "GptOssExperts":
            continue
        for weight in ("gate_up_proj", "down_proj"):
            experts, columns, outputs = tensors.pop(f"{name}.{weight}").shape
            blocks = torch.randint(256, (experts, outputs, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8)
            tensors |= {f"{name}.{weight}_blocks": blocks, f"{name}.{weight}_scales": scales}
            getattr(module, weight).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()


def _write(
    folder: Path,
    model: Any,
    tensors: Tensors,
    config: dict[str, Any],
    change: Callable[[Tensors, dict[str, Any]], None] | None,
) -> None:
    values = {**model.config.to_dict(), "architectures": [type(model).__name__], "quantization_config": dict(config)}
    if change is not None:
        change(tensors, values)
    names = sorted(tensors)
    places = {name: f"model-0000{1 + (2 * at >= len(names))}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(places.values()):
        own = {name: tensors[name].contiguous() for name in names if places[name] == file}
        save_file(own, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(values))
