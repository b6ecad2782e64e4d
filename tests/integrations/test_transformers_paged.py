"""Continuous batching of transformers by "fusedops": the same tokens as by transformers' own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import PagedAttentionCache

import fusedops
from fusedops.integrations.transformers import apply, attention_forward

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # so that the tokens depend on each key
}
OF_GPT_OSS = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
PROMPTS = [[5, 6, 7, 8, 9, 1, 2, 3], [3], [11, 12, 13], [*range(20, 45)]]


def tokens(model: Any) -> list[list[int]]:
    """Return what is generated for each prompt. In a step 12 tokens are computed: a long prompt is cut into parts."""
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    cache = ContinuousBatchingConfig(num_blocks=32, page_size=32, max_batch_tokens=12)
    requests = model.generate_batch(PROMPTS, generation_config=settings, continuous_batching_config=cache)
    return [requests[name].generated_tokens for name in sorted(requests)]


@pytest.mark.parametrize(("kind", "sizes", "windows"), [("Llama", {}, {None}), ("GptOss", OF_GPT_OSS, {None, (3, 0)})])
def test_the_tokens_are_those_of_transformers(
    kind: str, sizes: dict[str, Any], windows: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped heads; in the second one sinks, and a window in each other layer."""
    seen: set[Any] = set()  # the windows of calls whose keys are in pages

    def paged_attention(*args: Any, **options: Any) -> Any:
        seen.add(options["window"])
        return fusedops.paged_attention(*args, **options)

    monkeypatch.setattr(fusedops.ops, "paged_attention", paged_attention)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    model.set_attn_implementation("paged|eager")
    want = tokens(model)
    model.set_attn_implementation("eager")
    applied = apply(model, ops=["attention"])
    fusedops.reset_stats()
    assert tokens(model) == want
    assert {count.op for count in fusedops.stats().counts} == {"varlen_attention", "store_kv", "paged_attention"}
    assert model.config._attn_implementation == "fusedops"
    assert seen == windows
    applied.remove()
    model.set_attn_implementation("fusedops")
    with pytest.raises(ValueError, match="fusedops is not supported for continuous batching"):
        tokens(model)


OF_A_CALL = {"a cache to update": {"cache": object.__new__(PagedAttentionCache)}, "what was read": {"read_index": []}}


@pytest.mark.parametrize("paged", OF_A_CALL.values(), ids=OF_A_CALL)
def test_what_varlen_attention_has_no_parameter_for_is_refused(paged: dict[str, Any]) -> None:
    q = torch.zeros(1, 2, 4, 8)
    refused: dict[str, Any] = {
        "a block table": {"block_table": q},
        "dropout = 0.1": {"dropout": 0.1},
        "softcap = 30": {"softcap": 30.0},
        "is_causal = False": {"is_causal": False},
    }
    for text, options in refused.items():
        with pytest.raises(fusedops.InvalidInputError, match=rf"paged cache with {text} \(cache\), expected"):
            attention_forward(torch.nn.Identity(), q, q, q, None, **paged, **options)
