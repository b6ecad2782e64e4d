"""quantized_cache: the logits of keys that are rounded, in every form of a call, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import fusedops
from benchmarks import context_time
from fusedops.integrations.transformers import apply, quantized_cache

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3},
}
OF_GPT_OSS = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
KINDS = {"Llama": {}, "Mistral": {"sliding_window": 6}, "GptOss": OF_GPT_OSS}
CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers with the precision of codes that have a scale for each token and head."""
    scale = x.abs().amax(-1, keepdim=True) / CODES[dtype]
    codes = (x / scale).round() if dtype == torch.int8 else (x / scale).to(dtype).float()
    return codes * scale


def rounding(kind: type[DynamicLayer], dtype: torch.dtype) -> Any:
    """Return a layer of transformers that keeps rounded numbers; a prompt sees its own."""

    class Rounding(kind):  # type: ignore[misc, valid-type]
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            is_prompt = self.get_seq_length() == 0
            every = super().update(rounded(key_states, dtype), rounded(value_states, dtype))
            return (key_states, value_states) if is_prompt else every

    return Rounding


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind]))
    for name, parameter in model.named_parameters():
        if "sinks" in name:
            torch.nn.init.normal_(parameter)
    return model.eval()


@pytest.mark.parametrize(
    ("kind", "dtype", "padding"),
    [
        ("Llama", torch.int8, (5, 0, 7)),
        ("Mistral", torch.int8, (5, 0, 7)),
        ("GptOss", torch.int8, (0, 0, 0)),
        ("GptOss", torch.float8_e4m3fn, (1, 6, 0)),
    ],
)
@torch.no_grad()
def test_the_logits_are_those_of_rounded_keys(kind: str, dtype: torch.dtype, padding: tuple[int, ...]) -> None:
    """A prompt, tokens, a few tokens and many after it; past several windows, and past the first memory."""
    model = model_of(kind)
    calls = [9, 1, 1, 3, 29, *([1] * 24), 9, 2]
    ids = torch.randint(1, 64, (3, sum(calls)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = transformers.DynamicCache(config=model.config)
    layers = [
        rounding(DynamicSlidingWindowLayer, dtype)(sliding_window=each.sliding_window)
        if isinstance(each, DynamicSlidingWindowLayer)
        else rounding(DynamicLayer, dtype)()
        for each in cache.layers
    ]
    cache.layers = layers
    results: list[Tensor] = []
    for implementation in ("eager", "fusedops"):
        model.set_attn_implementation(implementation)
        cache = cache if implementation == "eager" else quantized_cache(model, dtype)
        logits, at = [], 0
        for count in calls:
            part = slice(at, at + count)
            options = {"attention_mask": mask[:, : at + count], "position_ids": positions[:, part]}
            logits.append(model(ids[:, part], past_key_values=cache, **options).logits[mask[:, part].bool()])
            at += count
        results.append(torch.cat(logits))
    torch.testing.assert_close(results[1], results[0], rtol=2e-3, atol=2e-3)
    assert cache.get_seq_length() == sum(calls)
    kept = [layer.codes[0].shape[2] for layer in cache.layers]
    assert all(each.dtype == dtype for layer in cache.layers for each in layer.codes)
    assert max(kept) < 2 * sum(calls)
    assert all(layer.window is None or size < 90 for layer, size in zip(cache.layers, kept))


def test_generate_and_what_a_cache_reports() -> None:
    model = model_of("Llama")
    applied = apply(model)
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    fusedops.reset_stats()
    cache = quantized_cache(model)
    tokens = model.generate(ids, past_key_values=cache, **options)
    ops = {count.op for count in fusedops.stats().counts}
    assert {"store_kv", "paged_attention"} <= ops
    assert cache.get_seq_length() == 17
    capacity = cache.layers[0].capacity
    assert cache.nbytes == 2 * 2 * 2 * 2 * capacity * (8 + 4)  # layers, keys and values, sequences, heads
    cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), tokens)
    cache.crop(-4)
    assert cache.get_seq_length() == 13
    applied.remove()


@torch.no_grad()
def test_what_the_layers_share_follows_the_padding() -> None:
    """Another prompt after a reset may have the same sizes, and its tensors the same memory and identity."""
    model = model_of("Llama")
    model.set_attn_implementation("fusedops")
    cache = quantized_cache(model)
    model(torch.ones(2, 7, dtype=torch.int64), past_key_values=cache)
    layer: Any = cache.layers[0]
    slots: list[list[int]] = []
    for padding in ([0, 3], [3, 0]):
        layer.padding = padding
        layer.starts.copy_(torch.tensor(padding))
        slots.append((layer._shared.places(layer, 1).slots % layer.capacity).tolist())
    assert slots == [[7, 4], [4, 7]]


def test_the_benchmark_over_lengths_measures_each_cache(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda _: None)
        rows = context_time.measured([8, 200], list(context_time.CACHES), layers=1, rounds=1, threads=1)
    memory = {(row.cache, row.length): row.memory for row in rows}
    # the first room of 64 tokens, a token more, and a quarter of what is there
    assert memory["int8", 8] == memory["e4m3", 8] == pytest.approx(2 * 8 * (8 + 64) * (64 + 4) / 1e6, rel=0.01)
    assert memory["int8", 200] == pytest.approx(memory["bfloat16", 200] * (264 / 201) * 68 / 128, rel=0.01)
    assert all(row.rate > 0 for row in rows)
    context_time.write(rows, tmp_path / "lengths")
    assert (tmp_path / "lengths.png").stat().st_size > 10_000
    assert (tmp_path / "lengths.csv").read_text().count("\n") == 1 + len(rows)
