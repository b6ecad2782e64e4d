"""Small mixtures of transformers, and those whose experts have the values of a format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from fusedops.quantization import pack, unpack

IDS = torch.arange(3, 25).view(2, 11)
OTHERS = ["*_proj", "lm_head", "*embed_tokens"]  # no experts
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, intermediate_size=96, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


def qwen3(**sizes: int) -> Any:
    defaults = {**SIZES, "intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 8}
    config = transformers.Qwen3MoeConfig(**{**defaults, **sizes})
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(**sizes: int) -> Any:
    defaults = {**SIZES, "intermediate_size": 64, "num_local_experts": 4, "rope_parameters": {"rope_type": "default"}}
    config = transformers.GptOssConfig(**{**defaults, **sizes})
    model = transformers.GptOssForCausalLM(config)
    for each in model.model.layers:
        each.mlp.experts.gate_up_proj_bias.data.normal_()
        each.mlp.experts.down_proj_bias.data.normal_()
    return model


MODELS: dict[str, Callable[[], Any]] = {"Mixtral": mixtral, "Qwen3Moe": qwen3, "GptOss": gpt_oss}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return MODELS[name]().eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def experts_of(model: Any) -> list[Any]:
    return [each for each in model.modules() if type(each).__name__.endswith("Experts")]


def rounded(model: Any, format: str) -> Any:
    """Round the experts of a plain model to the values of a format."""
    for each in experts_of(model):
        for weight in (each.gate_up_proj, each.down_proj):
            as_packed = weight.data.mT if each.is_transposed else weight.data
            columns = as_packed.shape[2]
            values = unpack(pack(as_packed, format, group=columns if columns % 128 else 128))
            weight.data = values.mT.contiguous() if each.is_transposed else values
    return model
