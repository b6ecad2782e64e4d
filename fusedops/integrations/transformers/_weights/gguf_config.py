"""The values of a GGUF file: which are wrong, and which are missing in the config that transformers makes of them."""

from __future__ import annotations

import math
import re
from typing import Any, cast

from fusedops.integrations.transformers._weights.gguf_header import OTHER, Header, invalid

_FIX = f"download the file again, or {OTHER}"
#: Values that llama.cpp needs; without one, a config has the number of another model.
_NEEDED = ("block_count", "embedding_length", "attention.head_count", "expert_used_count")
_EPS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
#: Values that are no size of a tensor.
_NO_SIZE = {
    *_EPS,
    "attention.relative_buckets_count",
    "attention.sliding_window",
    "context_length",
    "decoder_start_token_id",
    "expert_gating_func",
    "rope.freq_base",
    "sliding_window",
    "vocab_size",
}
#: Values without effect on numbers, or whose effect is in the shapes of tensors, which are compared.
_IN_SHAPES = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "block_count",
    "context_length",
    "decoder_start_token_id",
    "embedding_length",
    "expert_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "feed_forward_length",
    "nextn_predict_layers",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "tensor_data_layout",
    "vocab_size",
}
#: Values that change nothing, besides 0.
_NEUTRAL = {
    "attention.causal": True,
    "minimax-m2.expert_gating_func": 2,  # sigmoid, as transformers' router
    "rope.scaling.factor": 1.0,
    "rope.scaling.type": "none",
}
#: The names that a config has for values which transformers does not read, or gives a name that the config lacks.
_NAMES = {
    "attention.head_count_kv": ("num_kv_heads",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "context_length": ("n_positions",),
    "expert_used_count": ("num_experts_per_tok",),
    "feed_forward_length": ("n_inner", "ffn_hidden_size"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logit_scale",),
    "use_parallel_residual": ("use_parallel_residual",),
}
_BLOCK = re.compile(r"(?:^|\.)blk\.(\d+)\.")


def check_values(header: Header, mapping: dict[str, Any]) -> None:
    """Raise unless the values that transformers reads are numbers that the tensors of the file can have.

    Args:
        header: of the file.
        mapping: the values that transformers reads, as of its ``GGUF_CONFIG_MAPPING``.
    """
    values = _values_of_model(header)
    for key in _NEEDED:
        if key in mapping and key not in values:
            raise invalid(header.name, f"which has no {header.architecture}.{key}", "a number", _FIX)
    if mapping.keys() & set(_EPS) and not values.keys() & set(_EPS):
        raise invalid(header.name, f"which has no {header.architecture}.{_EPS[0]}", "a number", _FIX)
    largest = max((max(tensor.shape) for tensor in header.tensors), default=0)
    blocks = len({each[1] for tensor in header.tensors if (each := _BLOCK.search(tensor.name))})
    for key in mapping.keys() & values.keys():
        value = values[key]
        got = f"whose {header.architecture}.{key} is {value!r}"
        several = isinstance(value, list)
        numbers = cast("list[Any]", value) if several else [value]
        for number in numbers:
            if type(number) not in (int, float) or not 0 <= number < math.inf:
                raise invalid(header.name, got, "a number", _FIX)
            if not (number or several or key in _NO_SIZE):
                raise invalid(header.name, got, "a number above 0", _FIX)
            if key == "block_count" and number > blocks:
                raise invalid(header.name, got, f"at most {blocks}, the blocks of its tensors", _FIX)
            if key not in _NO_SIZE and number > largest:
                raise invalid(header.name, got, f"at most {largest}, the largest dim of its tensors", _FIX)


def set_values(header: Header, mapping: dict[str, Any], config: Any) -> None:
    """Give a config the values that transformers gives a name which the class of the config does not have."""
    known = type(config)()
    for key, value in _values_of_model(header).items():
        name = next((name for name in _NAMES.get(key, ()) if hasattr(known, name)), None)
        if name and mapping.get(key) is not None and not hasattr(known, mapping[key]) and type(value) in (int, float):
            setattr(config, name, value)


def dropped_values(header: Header, mapping: dict[str, Any], config: Any) -> list[str]:
    """Return the values that change a model's numbers and that its config does not have, each as a text."""
    dropped: list[str] = []
    known = type(config)()  # a config takes any name, its class reads its own
    for key, value in _values_of_model(header).items():
        names = [name for name in _NAMES.get(key, ()) if hasattr(known, name)]
        if key in _IN_SHAPES or (mapping.get(key) is not None and hasattr(known, mapping[key])):
            continue
        if key in ("rope.freq_base", "rope.dimension_count"):
            same = _equal(_rope(config)[key], value)
        elif names:
            same = any(_equal(getattr(config, name), value) for name in names)
        else:
            neutral = _NEUTRAL.get(key, _NEUTRAL.get(f"{header.architecture}.{key}"))
            same = neutral == value or (value == 0 and type(value) is not bool)
        if not same:
            dropped.append(f"{header.architecture}.{key} = {value!r}")
    return dropped


def _values_of_model(header: Header) -> dict[str, Any]:
    prefix = f"{header.architecture}."
    return {key[len(prefix) :]: value for key, value in header.values.items() if key.startswith(prefix)}


def _rope(config: Any) -> dict[str, Any]:
    """Return the values of a config's rotary embedding by their key in a file."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    heads = getattr(config, "num_attention_heads", None)
    own = cast("dict[str, Any]", vars(config))  # Gemma 4's head_dim, one for each layer, cannot be read as an attribute
    size: Any = own.get("head_dim") or (config.hidden_size // heads if heads else 0)
    rotated = int(size * (parameters.get("partial_rotary_factor") or 1))
    return {"rope.freq_base": parameters.get("rope_theta"), "rope.dimension_count": rotated}


def _equal(left: Any, right: Any) -> bool:
    """Return whether two numbers are equal in float32; None is 0."""
    return isinstance(right, (int, float)) and math.isclose(left or 0, right, rel_tol=1e-6)
