"""What a family of models of transformers is for tests: a small random model, its inputs, its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import fusedops

VOCABULARY = 64
DECODER = {
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
ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "eos_token_id": None,
}
BART = {
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


def decoder_inputs() -> dict[str, Tensor]:
    """Return a batch padded on the left."""
    return _padded(left=True)


def encoder_inputs() -> dict[str, Tensor]:
    """Return a batch padded on the right."""
    return _padded(left=False)


def seq2seq_inputs() -> dict[str, Tensor]:
    """Return a padded batch, and what is generated from it."""
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(2))
    return {**_padded(left=False), "decoder_input_ids": ids}


def image_inputs() -> dict[str, Tensor]:
    """Return two images."""
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))}


def audio_inputs() -> dict[str, Tensor]:
    """Return two spectrograms, and what is generated from them."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=generator)
    return {"input_features": torch.randn(2, 8, 40, generator=generator), "decoder_input_ids": ids}


def wave_inputs() -> dict[str, Tensor]:
    """Return two pieces of sound."""
    return {"input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(3))}


def speech_inputs() -> dict[str, Tensor]:
    """Return two pieces of sound, and what is generated from them."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (2, 5), generator=generator)
    return {"input_values": torch.randn(2, 2000, generator=generator), "decoder_input_ids": ids}


@dataclass(frozen=True)
class Family:
    """A family: the classes of its model and config, the config's values, its inputs."""

    name: str
    model: str
    config: str
    values: Mapping[str, Any]
    inputs: Callable[[], dict[str, Tensor]] = decoder_inputs

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
    def has_vocabulary(self) -> bool:
        """Return True where the results are logits, of tokens or classes."""
        return "For" in self.model or "LMHead" in self.model

    @property
    def chooses(self) -> bool:
        """Return True for a router of experts or an indexer of keys: of two nearly equal ones it may take either."""
        return any("expert" in name or name.startswith("index_") for name in self.values)

    @property
    def generates(self) -> bool:
        """Return True where generate gives tokens."""
        return "CausalLM" in self.model or "LMHead" in self.model or "ConditionalGeneration" in self.model


def decoder(name: str, stem: str, /, config: str | None = None, **values: Any) -> Family:
    """Return a family of decoders, with the values of their config beside the common ones."""
    return Family(name, f"{stem}ForCausalLM", config or f"{stem}Config", {**DECODER, **values})


def encoder(name: str, stem: str, /, head: str = "ForMaskedLM", inputs: Any = encoder_inputs, **values: Any) -> Family:
    """Return a family of encoders; ``head`` is the end of the name of the model's class."""
    return Family(name, f"{stem}{head}", f"{stem}Config", {**ENCODER, "pad_token_id": 0, **values}, inputs)


def vision(name: str, stem: str, /, **values: Any) -> Family:
    """Return a family of encoders of images of 4 patches."""
    return encoder(name, stem, head="Model", inputs=image_inputs, image_size=16, patch_size=8, **values)


def seq2seq(name: str, stem: str, common: Mapping[str, Any], /, **values: Any) -> Family:
    """Return a family of encoders and decoders."""
    model = f"{stem}ForConditionalGeneration"
    return Family(name, model, f"{stem}Config", {**common, **values}, seq2seq_inputs)


def result(model: Any, family: Family) -> Tensor:
    """Return the logits of the family's batch, or the last hidden states of a model that has none, without padding."""
    inputs = family.inputs()
    dtype = next(model.parameters()).dtype
    values = model(**{name: each.to(dtype) if each.is_floating_point() else each for name, each in inputs.items()})
    found: Tensor = values.logits if "logits" in values else values.last_hidden_state
    if "attention_mask" in inputs and "decoder_input_ids" not in inputs:
        found = found[inputs["attention_mask"].bool()]
    return found


def narrowed(model: Any) -> None:
    """Turn a model to bfloat16, as from_pretrained would load it."""
    for module in model.modules():
        if "rotary" not in type(module).__name__.lower():  # from_pretrained leaves what they compute in float32 too
            module._apply(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor, recurse=False)


class Accuracy(NamedTuple):
    """The largest differences of log probabilities, or of hidden states where a model has no vocabulary.

    Attributes:
        float32: with an op in the place of each module, from the model alone, in float32.
        bfloat16: the same in bfloat16.
        plain: of the model alone, in bfloat16 from float32.
        size: the largest logit or hidden state.
    """

    float32: float
    bfloat16: float
    plain: float
    size: float


def accuracy(
    model: Any,
    family: Family,
    apply: Callable[[Any], Any],
    *,
    wide: tuple[Tensor, Tensor] | None = None,
    largest: Callable[[Tensor], Tensor] = torch.amax,
) -> Accuracy:
    """Return what ``apply`` changes in the results of a model, which it leaves replaced and in bfloat16.

    Args:
        model: as ``Family.build`` makes it.
        family: of the model.
        apply: that of fusedops.
        wide: the results in float32, of the model alone and after ``apply``, where they are known.
        largest: another measure of many differences.
    """

    def run() -> Tensor:
        with torch.no_grad():
            return result(model, family)

    if wide is None:
        plain, applied = run(), apply(model)
        wide = plain, run()
        applied.remove()
    narrowed(model)
    narrow = run()
    apply(model)
    plain, applied, plain_narrow, applied_narrow = (
        each.float().log_softmax(-1) if family.has_vocabulary else each.float() for each in (*wide, narrow, run())
    )
    pairs = (applied, plain), (applied_narrow, plain_narrow), (plain_narrow, plain)
    return Accuracy(*(float(largest((one - other).abs())) for one, other in pairs), float(wide[0].abs().max()))


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """Return the forward calls of each op in a run."""
    fusedops.reset_stats()
    run()
    counts: dict[str, int] = {}
    for each in fusedops.stats().counts:
        if each.direction == "forward":
            counts[each.op] = counts.get(each.op, 0) + each.calls
    return counts
