"""Small random models of many families of transformers, with inputs, for tests and for the table in docs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

import fusedops

VOCABULARY = 64
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "eos_token_id": None,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def _padded(left: bool) -> dict[str, Tensor]:
    """Return a batch of two sequences of 9 and 6 tokens."""
    ids = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 9, dtype=torch.int64)
    padding = slice(0, 3) if left else slice(6, 9)
    ids[1, padding], mask[1, padding] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def _decoder_inputs() -> dict[str, Tensor]:
    return _padded(left=True)


def _encoder_inputs() -> dict[str, Tensor]:
    return _padded(left=False)


def _seq2seq_inputs() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))
    return {**_padded(left=False), "decoder_input_ids": ids}


def _image_inputs() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))}


def _audio_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=generator)
    return {"input_features": torch.randn(2, 8, 40, generator=generator), "decoder_input_ids": ids}


@dataclass(frozen=True)
class Family:
    """A family: the classes of its model and config, the config's values, its inputs."""

    name: str
    model: str
    config: str
    values: Mapping[str, Any]
    inputs: Callable[[], dict[str, Tensor]] = _decoder_inputs

    def build(self, **options: Any) -> Any:
        """Return a model in eval mode, the same each time, whose norms and biases are not 1 and 0."""
        config = getattr(transformers, self.config)(**self.values)
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, self.model)._from_config(config, **options).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        if model.can_generate():
            model.generation_config.eos_token_id = None
        return model

    @property
    def generates(self) -> bool:
        """Return True where generate gives tokens."""
        return "CausalLM" in self.model or "LMHead" in self.model or "ConditionalGeneration" in self.model


def _decoder(name: str, stem: str, /, config: str | None = None, **values: Any) -> Family:
    return Family(name, f"{stem}ForCausalLM", config or f"{stem}Config", {**_DECODER, **values})


FAMILIES = {
    family.name: family
    for family in [
        _decoder("Llama", "Llama"),
        _decoder("Qwen2", "Qwen2"),
        _decoder("Qwen3", "Qwen3", head_dim=8),
        _decoder("Qwen3-MoE", "Qwen3Moe", head_dim=8, num_experts=4, **_MOE),
        _decoder("Mistral", "Mistral", sliding_window=4),
        _decoder("Mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2),
        _decoder("Gemma", "Gemma", head_dim=8),
        _decoder("Gemma 2", "Gemma2", head_dim=8, sliding_window=4),
        _decoder("Gemma 3", "Gemma3", "Gemma3TextConfig", head_dim=8, sliding_window=4),
        _decoder("Phi", "Phi"),
        _decoder("Phi-3", "Phi3"),
        _decoder("OLMo", "Olmo"),
        _decoder("OLMo 2", "Olmo2"),
        _decoder("gpt-oss", "GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
        _decoder("GLM", "Glm", head_dim=8),
        _decoder("GLM-4", "Glm4", head_dim=8),
        _decoder("Cohere", "Cohere"),
        _decoder("Cohere 2", "Cohere2", sliding_window=4),
        _decoder("Granite", "Granite"),
        _decoder("SmolLM3", "SmolLM3"),
        _decoder("StarCoder2", "Starcoder2"),
        _decoder("StableLM", "StableLm"),
        _decoder("Nemotron", "Nemotron", head_dim=8),
        _decoder("Helium", "Helium", head_dim=8),
        _decoder("GPT-NeoX", "GPTNeoX"),
        _decoder("ERNIE 4.5", "Ernie4_5", head_dim=8),
        Family(
            "DeepSeek-V3",
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            {
                **_DECODER,
                **_MOE,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "q_lora_rank": 16,
                "kv_lora_rank": 16,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
            },
        ),
        Family(
            "GPT-2",
            "GPT2LMHeadModel",
            "GPT2Config",
            {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1},
        ),
        Family(
            "GPT-J",
            "GPTJForCausalLM",
            "GPTJConfig",
            {
                "vocab_size": VOCABULARY,
                "n_positions": 64,
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 4,
                "rotary_dim": 4,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
        Family(
            "OPT",
            "OPTForCausalLM",
            "OPTConfig",
            {**_DECODER, "ffn_dim": 48, "word_embed_proj_dim": 32},
        ),
        Family("BERT", "BertForMaskedLM", "BertConfig", _ENCODER, _encoder_inputs),
        Family("RoBERTa", "RobertaForMaskedLM", "RobertaConfig", {**_ENCODER, "pad_token_id": 0}, _encoder_inputs),
        Family(
            "ModernBERT",
            "ModernBertForMaskedLM",
            "ModernBertConfig",
            {
                **_ENCODER,
                "local_attention": 4,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "cls_token_id": 1,
                "eos_token_id": 2,
                "sep_token_id": 2,
            },
            _encoder_inputs,
        ),
        Family(
            "DistilBERT",
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
            _encoder_inputs,
        ),
        Family(
            "ViT",
            "ViTForImageClassification",
            "ViTConfig",
            {**_ENCODER, "image_size": 16, "patch_size": 8},
            _image_inputs,
        ),
        Family("T5", "T5ForConditionalGeneration", "T5Config", _T5, _seq2seq_inputs),
        Family(
            "T5 v1.1",
            "T5ForConditionalGeneration",
            "T5Config",
            {**_T5, "feed_forward_proj": "gated-gelu"},
            _seq2seq_inputs,
        ),
        Family("BART", "BartForConditionalGeneration", "BartConfig", _BART, _seq2seq_inputs),
        Family(
            "Whisper",
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {**_BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32, "suppress_tokens": []},
            _audio_inputs,
        ),
        Family(
            "Mamba",
            "MambaForCausalLM",
            "MambaConfig",
            {**_DECODER, "state_size": 4, "time_step_rank": 4},
        ),
    ]
}


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """Return the forward calls of each op in a run."""
    fusedops.reset_stats()
    run()
    counts: dict[str, int] = {}
    for each in fusedops.stats().counts:
        if each.direction == "forward":
            counts[each.op] = counts.get(each.op, 0) + each.calls
    return counts
