"""Models that choose the keys of each query: their choice is computed by sparse_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fusedops
from fusedops.integrations.transformers import apply

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_local_experts": 4,
}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "index_topk": 5,
    "index_n_heads": 8,
    "index_head_dim": 16,
}
BLOCKS = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 8,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 2,
    "index_topk_blocks": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV32": LATENT,
    "GlmMoeDsa": LATENT,
    "AXK2": LATENT,
    "HYV4": LATENT,
    "MistralLarge4": LATENT,
    "MiniMaxM3VL": BLOCKS,
}
IDS = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[0, :7] = 0
pytestmark = pytest.mark.parametrize("family", FAMILIES)


def model_of(family: str) -> Any:
    """Return a small random model; of two that are multimodal the text model, with a head."""
    torch.manual_seed(0)
    text = getattr(transformers, f"{family}TextConfig", None)
    if text is None:
        config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
        return getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return getattr(transformers, f"{family}TextModel")(text(**FAMILIES[family])).eval()


def outcome(model: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the first result of a call, and the gradients of all parameters."""
    model.zero_grad()
    y = model(IDS, attention_mask=PADDED)[0]
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))[PADDED.bool()].sum().backward()
    return y.detach()[PADDED.bool()], [p.grad.clone() for p in model.parameters() if p.grad is not None]


def calls() -> set[tuple[str, str]]:
    return {(count.op, count.backend) for count in fusedops.stats().counts}


def test_results_gradients_and_remove(family: str) -> None:
    model = model_of(family)
    want, gradients = outcome(model)
    applied = apply(model)
    fusedops.reset_stats()
    got, others = outcome(model)
    assert ("sparse_attention", "cpu") in calls()
    assert (("select_keys", "cpu") in calls()) == (FAMILIES[family] is LATENT)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert len(gradients) == len(others)
    for one, other in zip(others, gradients):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5 + 1e-4 * float(other.abs().max()))
    applied.remove()
    after, _ = outcome(model)
    assert torch.equal(after, want)
    planned = fusedops.plan(model, {"input_ids": IDS}, device="cuda")
    assert ("select_keys" in {row.op for row in planned.rows}) == (FAMILIES[family] is LATENT)


def test_generate_token_for_token(family: str) -> None:
    model = model_of(family)

    def tokens() -> list[int]:
        if hasattr(model, "generate"):
            options = {"do_sample": False, "max_new_tokens": 24, "min_new_tokens": 24, "attention_mask": PADDED}
            return model.generate(IDS, **options)[:, IDS.shape[1] :].tolist()
        ids, cache, found = IDS, None, []
        for _ in range(24):  # a text model has no head: the largest element is the next token
            with torch.no_grad():
                step = model(ids, past_key_values=cache, use_cache=True)
            cache, ids = step.past_key_values, step.last_hidden_state[:, -1:].argmax(-1)
            found.append(ids.flatten().tolist())
        return found

    want = tokens()
    applied = apply(model)
    fusedops.reset_stats()
    assert tokens() == want
    assert ("sparse_attention", "cpu") in calls()
    applied.remove()
    assert tokens() == want
