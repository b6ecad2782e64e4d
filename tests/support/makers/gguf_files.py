"""Small models of Llama, and GGUF files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fusedops.quantization import quantize


def llama(tied: bool = False, **changes: Any) -> Any:
    """Return a model with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 96, "num_hidden_layers": 2, "tie_word_embeddings": tied, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes})).eval()


def write(
    path: Path,
    model: Any,
    format: str,
    *,
    without: str = "",
    more: int = 0,
    tokens: int = 0,
    architecture: str = "llama",
) -> Path:
    """Write a model of Llama as llama.cpp does: rows of q and k in another order, norms in float32."""
    # without: a parameter that the file lacks; more: rows that its vocabulary has beyond the weights; tokens: their
    # number, where the file has a tokenizer, and its vocabulary no other size
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    if tokens:
        writer.add_token_list([f"token {i}" for i in range(tokens)])
        writer.add_token_scores([float(-i) for i in range(tokens)])
        writer.add_eos_token_id(2)
    else:
        writer.add_vocab_size(config.vocab_size + more)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if name == without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        stored = f"{names.get_name(stem)}.{leaf}"
        if tensor.dim() == 1:
            writer.add_tensor(stored, tensor.numpy())
        else:
            kind, array = gguf.GGMLQuantizationType[format.removesuffix("_GGUF")], tensor.numpy()
            plain = {"F16": "float16", "F64": "float64"}
            data = array.astype(plain[format]) if format in plain else quantize(tensor, format).numpy()
            writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_mapped(path: Path, architecture: str, model: Any, values: dict[str, Any]) -> Path:
    """Write a model by the names that transformers reads its tensors from, with a vocabulary and float32."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_token_list([f"token {i}" for i in range(model.config.vocab_size)])
    processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)()
    tensors = dict(model.named_parameters())
    for stored, name in get_gguf_hf_weights_map(model, processor).items():
        if name in tensors:
            tensor = tensors[name].detach().numpy()
            tensor = tensor.squeeze(1) if tensor.ndim == 3 else tensor  # of a convolution
            swapped = processor.process(tensor, stored).weights  # the weights of GPT-2 are its only change
            writer.add_tensor(stored, (swapped if architecture == "gpt2" else tensor).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
