"""recorded_cache: the bits of the model's own forward, after every change, and what is not recorded."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fusedops
from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations.transformers import apply, quantize, quantized_cache, recorded_cache
from fusedops.testing._in_threads import torch_threads

SIZES = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3},
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 6},
    "Phi3": {"pad_token_id": 0},
    "Gemma3": {"head_dim": 16, "sliding_window": 5},
    "Granite": {},
    "Mixtral": EXPERTS,
    "Qwen3Moe": {**EXPERTS, "head_dim": 16},
    "GptOss": {**EXPERTS, "head_dim": 16, "sliding_window": 4},
}


def model_of(kind: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    name = f"{kind}Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **KINDS[kind], **sizes})
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def steps(model: Any, cache: Any, ids: Tensor, padding: tuple[int, ...] = (), start: int = 9) -> list[Tensor]:
    """Return the logits of a prompt and of each token after it."""
    mask = (torch.arange(ids.shape[1]) >= torch.tensor(padding)[:, None]).long() if any(padding) else None
    results: list[Tensor] = []
    for at in range(start - 1, ids.shape[1]):
        part = slice(0 if at < start else at, at + 1)
        options: dict[str, Any] = {}
        if mask is not None:
            options["attention_mask"] = mask[:, : at + 1]
            options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, part]
        results.append(model(ids[:, part], past_key_values=cache, **options).logits[:, -1])
    return results


def unrecorded(cache: Any) -> Any:
    cache.reason = "of the test"
    return cache


def tokens(batch: int, count: int) -> Tensor:
    return torch.randint(1, 64, (batch, count), generator=torch.Generator().manual_seed(1))


# in 8 bits one kind of each attention: those of the others are Llama's, whatever is around it
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        *((None, kind) for kind in KINDS),
        *((torch.int8, kind) for kind in ("Llama", "Mistral", "Gemma3", "Granite", "GptOss")),
    ],
)
@torch.no_grad()
def test_the_bits_are_those_of_the_models_own_forward(kind: str, dtype: torch.dtype | None) -> None:
    """Past several windows, and past the first memory, padded or in 8 bits: a step is recorded again there."""
    model = model_of(kind)
    apply(model)
    for padding, long in (((), dtype is not None), ((3, 0), dtype is None)):
        count = 9 + 64 + 7 if long else 30
        ids = tokens(len(padding) or 1, count)
        cache = recorded_cache(model, dtype)
        got = steps(model, cache, ids, padding)
        want = steps(model, unrecorded(recorded_cache(model, dtype)), ids, padding)
        assert not cache.reason
        assert cache.replayed > count - 20
        assert all(map(torch.equal, got, want))
        if dtype is not None:
            assert torch.equal(got[-1], steps(model, quantized_cache(model, dtype), ids, padding)[-1])


@torch.no_grad()
def test_bfloat16_packed_weights_and_any_number_of_threads() -> None:
    model = model_of("Llama", hidden_size=256, intermediate_size=512).bfloat16()
    quantize(model, format="Q4_0")
    apply(model)
    ids = tokens(1, 40)
    want = steps(model, unrecorded(recorded_cache(model)), ids)
    for threads in (1, 2, 3):
        with torch_threads(threads):
            cache = recorded_cache(model)
            assert all(map(torch.equal, steps(model, cache, ids), want))
            assert cache.replayed == 40 - 9 - 2


def test_generate_resets_and_copies() -> None:
    model = model_of("Llama")
    applied = apply(model)
    ids, options = tokens(2, 12), {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    want = model.generate(ids, **options)
    cache = recorded_cache(model)
    assert torch.equal(model.generate(ids, past_key_values=cache, **options), want)
    assert cache.replayed == 17
    assert repr(apply(model)) == repr(applied)
    other = copy.deepcopy(cache)
    other.crop(-8)
    again = {**options, "max_new_tokens": 6, "attention_mask": torch.ones(2, 26, dtype=torch.int64)}
    assert torch.equal(model.generate(want[:, :26], past_key_values=other, **again), want)
    assert other.replayed == 17 + 3
    for prompt, replayed in ((ids, 36), (tokens(1, 5), 53), (ids, 70)):  # the recording of the same memory is kept
        cache.reset()
        assert torch.equal(model.generate(prompt, past_key_values=cache, **options), model.generate(prompt, **options))
        assert cache.replayed == replayed
    applied.remove()


class Scaled(torch.nn.Module):
    """A layer that multiplies by a number in a dict, as PEFT's do."""

    def __init__(self, own: torch.nn.Module) -> None:
        super().__init__()
        self.own, self.of_adapters = own, {"scaling": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) * self.of_adapters["scaling"]


def changes(model: Any) -> dict[str, Callable[[], Any]]:
    layer = model.model.layers[0]
    norm, square = layer.input_layernorm.weight, layer.self_attn.q_proj.weight
    layer.mlp.down_proj = Scaled(layer.mlp.down_proj)
    return {
        "weights in place": lambda: norm.data.mul_(1.5),
        "weights of other memory": lambda: setattr(norm, "data", norm.data * 0.5),
        "another parameter": lambda: setattr(
            layer.mlp.up_proj, "weight", torch.nn.Parameter(layer.mlp.gate_proj.weight * 2)
        ),
        "another layer": lambda: setattr(layer.mlp, "down_proj", copy.deepcopy(model.model.layers[1].mlp.down_proj)),
        "weights of other strides": lambda: setattr(square, "data", square.data.t()),
        "an attribute": lambda: setattr(layer.self_attn, "scaling", 0.1),
        "an attribute in a dict": lambda: layer.mlp.down_proj.of_adapters.update(scaling=0.5),
        "a forward of an instance": lambda: setattr(layer.mlp, "forward", lambda x: x * 0.5),
        "a policy": lambda: fusedops.set_policy("eager"),
        "a mode": lambda: model.train(),
        "a hook": lambda: layer.register_forward_hook(lambda module, args, out: out * 0.5),
    }


@pytest.mark.parametrize("name", list(changes(model_of("Llama"))))
@torch.no_grad()
def test_a_change_is_seen(name: str, request: pytest.FixtureRequest) -> None:
    request.addfinalizer(fusedops.set_policy)
    model, ids = model_of("Llama"), tokens(1, 40)
    apply(model)
    results: list[list[Tensor]] = []
    for own in (False, True):
        cache: Any = recorded_cache(model)
        state = copy.deepcopy(model.state_dict())
        changed = copy.deepcopy(model)
        if own:
            unrecorded(cache)
        every = changes(changed)
        logits = steps(changed, cache, ids[:, :20])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOpsWarning)
            every[name]()
            logits += [changed(ids[:, at : at + 1], past_key_values=cache).logits for at in range(20, 40)]
        fusedops.set_policy()
        model.load_state_dict(state)
        results.append(logits)
        assert own or cache.replayed >= 9
    assert all(map(torch.equal, *results))


@torch.no_grad()
def test_what_asks_for_more_is_computed_by_the_model() -> None:
    model, ids = model_of("Llama"), tokens(1, 30)
    apply(model)
    cache = recorded_cache(model)
    steps(model, cache, ids[:, :20])
    before = cache.replayed
    assert before == 9
    model(ids[:, 20:22], past_key_values=cache)
    assert len(model(ids[:, 22:23], past_key_values=cache, output_hidden_states=True).hidden_states) == 3
    with torch.autocast("cpu", torch.bfloat16):
        model(ids[:, 23:24], past_key_values=cache)
    model(inputs_embeds=model.get_input_embeddings()(ids[:, 24:25]), past_key_values=cache)
    assert cache.replayed == before
    for at in range(25, 30):  # transformers' hooks for hidden states stay: recorded and compared again
        model(ids[:, at : at + 1], past_key_values=cache)
    assert cache.replayed == before + 3
    assert cache.get_seq_length() == 30


@torch.no_grad()
def test_a_cache_is_of_one_model() -> None:
    model, ids = model_of("Llama"), tokens(1, 24)
    apply(model)
    cache = recorded_cache(model)
    other = copy.deepcopy(model)
    other.model.norm.weight.mul_(2)
    steps(model, cache, ids)
    cache.reset()
    assert all(map(torch.equal, steps(other, cache, ids), steps(other, unrecorded(recorded_cache(model)), ids)))


def test_inference_mode_and_steps_without_it() -> None:
    model, ids = model_of("Qwen3"), tokens(1, 60)
    apply(model)
    caches = recorded_cache(model), unrecorded(recorded_cache(model))
    for part, mode in (
        (ids[:, :20], torch.inference_mode),
        (ids[:, 20:40], torch.no_grad),
        (ids[:, 40:], torch.inference_mode),
    ):
        with mode():
            got, want = (steps(model, cache, part, start=9 if part is ids[:, :20] else 1) for cache in caches)
            assert all(map(torch.equal, got, want))
    assert caches[0].replayed >= 60 - 20 - 2


@torch.no_grad()
def test_a_decoder_that_is_called_by_position() -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    apply(model)
    cache, ids = recorded_cache(model), tokens(1, 30)
    assert all(map(torch.equal, steps(model, cache, ids), steps(model, unrecorded(recorded_cache(model)), ids)))
    assert cache.replayed == 30 - 9 - 2


@torch.no_grad()
def test_positions_that_a_model_takes_from_the_mask() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 64}
    model: Any = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, word_embed_proj_dim=32)).eval()
    apply(model)
    ids, mask = tokens(1, 20), torch.ones(1, 20, dtype=torch.int64)
    mask[0, :3] = 0
    results: list[list[Tensor]] = []
    for cache in (recorded_cache(model), unrecorded(recorded_cache(model))):
        parts = [slice(0, 9), *(slice(at, at + 1) for at in range(9, 20))]
        options = [{"attention_mask": mask[:, : part.stop], "past_key_values": cache} for part in parts]
        results.append([model(ids[:, part], **each).logits[:, -1] for part, each in zip(parts, options)])
    assert all(map(torch.equal, *results))


@torch.no_grad()
def test_an_exception_between_two_layers() -> None:
    model, ids = model_of("Llama"), tokens(1, 30)
    apply(model)
    results: list[list[Tensor]] = []
    for cache in (recorded_cache(model), unrecorded(recorded_cache(model))):
        steps(model, cache, ids[:, :14])
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *args: 1 / 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FusedOpsWarning)
            with pytest.raises(ZeroDivisionError):
                model(ids[:, 14:15], past_key_values=cache)
        hook.remove()
        results.append([model(ids[:, at : at + 1], past_key_values=cache).logits for at in range(15, 30)])
    assert all(map(torch.equal, *results))


@torch.no_grad()
def test_a_model_that_changes_in_each_step_is_given_up() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
    options = {
        "original_max_position_embeddings": 64,
        "rope_parameters": {**rope, "original_max_position_embeddings": 64},
    }
    model, ids = model_of("Phi3", **options), tokens(1, 40)
    apply(model)
    cache = recorded_cache(model)
    with pytest.warns(FusedOpsWarning, match="are others in each step") as seen:
        got = steps(model, cache, ids)
    assert len(seen) == 1
    assert all(map(torch.equal, got, steps(model, unrecorded(recorded_cache(model)), ids)))


@torch.no_grad()
def test_values_that_are_changed_after_they_are_stored_are_refused() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**sizes, vocab_size=64)).eval()
    model.set_attn_implementation("fusedops")
    with pytest.raises(InvalidInputError, match="values that the model changes after it has stored them"):
        model(tokens(1, 4), past_key_values=recorded_cache(model))


class OfPython(torch.nn.Module):
    """A layer's MLP that multiplies by a number of Python, from the values or from the step."""

    def __init__(self, own: Any, reads: bool) -> None:
        super().__init__()
        self.own, self.reads, self.calls = own, reads, itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) * (x.abs().max().item() if self.reads else 1 / next(self.calls))


@pytest.mark.parametrize(("reads", "reason"), [(True, "reads the values of a tensor"), (False, "numbers of Python")])
@torch.no_grad()
def test_a_model_that_cannot_be_recorded_says_so_once(reads: bool, reason: str) -> None:
    model, ids = model_of("Llama"), tokens(1, 30)
    apply(model)
    model.model.layers[1].mlp = OfPython(model.model.layers[1].mlp, reads)
    cache = recorded_cache(model)
    with pytest.warns(FusedOpsWarning, match="recorded_cache: got LlamaModel, expected") as seen:
        steps(model, cache, ids)
    assert len(seen) == 1
    assert reason in cache.reason
    assert cache.replayed == 0


def test_what_is_refused() -> None:
    model = model_of("Llama")
    with pytest.raises(InvalidInputError, match="expected 'fusedops', which reads the cache where it lies"):
        recorded_cache(model)
    apply(model)
    with pytest.raises(InvalidInputError, match=r"expected None, torch\.int8 or torch\.float8_e4m3fn"):
        recorded_cache(model, torch.float16)
    with pytest.raises(InvalidInputError, match="got a model on meta, expected one on a CPU"):
        recorded_cache(model.to("meta"))
