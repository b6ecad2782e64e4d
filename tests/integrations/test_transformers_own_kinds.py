"""What transformers' own tests of a model ask of it, by kinds, of a Llama as it is and of one with ``apply``.

Both pass the same kinds, but those in :data:`DIFFERENT`. The source distribution of transformers has its common tests
without the folders of its models, so the kinds are written here, but for those that test_transformers_apply,
test_transformers_recognition and test_transformers_other_libraries have: copies, files, checkpoints, narrow weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import FAMILIES, VOCABULARY
from torch import Tensor

from fusedops.integrations.transformers import apply

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

LLAMA = FAMILIES["Llama"]
Make = Callable[..., Any]
Kind = Callable[[Make, Path], None]
KINDS: dict[str, Kind] = {}
#: Kinds that a model with ``apply`` does not pass, and why.
DIFFERENT = {"name of the implementation": "apply selects the implementation of attention that calls the op"}


def kind(function: Kind) -> Kind:
    KINDS[function.__name__.strip("_").replace("_", " ")] = function
    return function


def plain(*, attention: str = "eager", stem: str = "LlamaForCausalLM", **values: Any) -> Any:
    """Return a model as it is; ``values`` are of the config."""
    family = dataclasses.replace(LLAMA, model=stem, values={**LLAMA.values, **values})
    return family.build(attn_implementation=attention)


def with_apply(**values: Any) -> Any:
    model = plain(**values)
    assert apply(model).ops
    return model


def inputs() -> dict[str, Tensor]:
    return LLAMA.inputs()


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(3))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def trained(model: Any, **options: Any) -> dict[str, Tensor]:
    """Return the gradients of a step, one for each parameter."""
    model.train()
    model(ids(), labels=ids(), **options).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(bool(each.isfinite().all()) for each in gradients.values())
    return gradients


@kind
def _batching(make: Make, folder: Path) -> None:
    model = make()
    whole = model(ids()).logits
    for row, each in zip(ids(), whole):
        close(model(row[None]).logits[0], each)


@kind
def _accumulated_gradients(make: Make, folder: Path) -> None:
    once, twice = make(), make()
    trained(once)
    trained(twice)
    for name, gradient in trained(twice).items():
        close(gradient, 2 * dict(once.named_parameters())[name].grad)


@kind
def _attentions_in_the_call(make: Make, folder: Path) -> None:
    attentions = make()(ids(), output_attentions=True).attentions
    assert [tuple(each.shape) for each in attentions] == [(2, 4, 7, 7)] * 2
    for each in attentions:
        close(each.sum(-1), torch.ones(2, 4, 7))


@kind
def _hidden_states(make: Make, folder: Path) -> None:
    model = make()
    states = model(ids(), output_hidden_states=True).hidden_states
    assert [tuple(each.shape) for each in states] == [(2, 7, 32)] * 3
    close(model.lm_head(states[-1]), model(ids()).logits)


@kind
def _gradients_of_states_and_attentions(make: Make, folder: Path) -> None:
    out = make()(ids(), output_hidden_states=True, output_attentions=True)
    kept = [out.hidden_states[0], out.attentions[0]]
    for each in kept:
        each.retain_grad()
    out.logits.square().sum().backward()
    assert all(each.grad is not None and bool(each.grad.any()) for each in kept)


@kind
def _outputs_as_a_tuple(make: Make, folder: Path) -> None:
    model = make()
    named = model(ids(), output_hidden_states=True)
    first, _, states = model(ids(), output_hidden_states=True, return_dict=False)
    assert torch.equal(first, named.logits)
    assert all(torch.equal(one, other) for one, other in zip(states, named.hidden_states, strict=True))


@kind
def _embeddings_as_inputs(make: Make, folder: Path) -> None:
    model = make()
    close(model(inputs_embeds=model.get_input_embeddings()(ids())).logits, model(ids()).logits)


@kind
def _embeddings_got_and_set(make: Make, folder: Path) -> None:
    model, other = make(), torch.nn.Embedding(VOCABULARY, 32)
    model.set_input_embeddings(other)
    assert model.get_input_embeddings() is other
    assert isinstance(model.get_output_embeddings(), torch.nn.Linear)
    assert model(ids()).logits.shape == (2, 7, VOCABULARY)


@kind
def _resized_embeddings(make: Make, folder: Path) -> None:
    for tied in (False, True):
        model = make(tie_word_embeddings=tied)
        before = model(ids()).logits
        model.resize_token_embeddings(VOCABULARY + 10)
        close(model(ids()).logits[..., :VOCABULARY], before)
        model.resize_token_embeddings(VOCABULARY)
        close(model(ids()).logits, before)


@kind
def _tied_weights(make: Make, folder: Path) -> None:
    model = make(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    trained(model)


@kind
def _loss_of_shifted_labels(make: Make, folder: Path) -> None:
    model, labels = make(), ids()
    labels[:, :3] = -100
    out = model(ids(), labels=labels)
    shifted = labels[:, 1:].flatten()
    close(out.loss, torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), shifted))
    close(model(ids(), labels=labels, num_items_in_batch=16).loss, out.loss * (shifted != -100).sum() / 16)


@kind
def _eager_as_sdpa(make: Make, folder: Path) -> None:
    one, other = make(attention="eager"), make(attention="sdpa")
    seen = inputs()["attention_mask"].bool()
    close(one(**inputs()).logits[seen], other(**inputs()).logits[seen])


@kind
def _implementation_set_later(make: Make, folder: Path) -> None:
    model = make()
    before = model(**inputs()).logits[inputs()["attention_mask"].bool()]
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        close(model(**inputs()).logits[inputs()["attention_mask"].bool()], before)


@kind
def _name_of_the_implementation(make: Make, folder: Path) -> None:
    for name in ("eager", "sdpa"):
        assert make(attention=name).config._attn_implementation == name


@kind
def _rope_scaling(make: Make, folder: Path) -> None:
    before = make()(ids()).logits
    for rope in ("linear", "dynamic", "yarn"):
        parameters = {"rope_type": rope, "factor": 4.0, "rope_theta": 10000.0}
        out = make(rope_parameters=parameters, max_position_embeddings=64)(ids()).logits
        assert torch.allclose(out, before, atol=1e-5) == (rope == "dynamic")


@kind
def _meta_device(make: Make, folder: Path) -> None:
    assert make().to("meta")(ids().to("meta")).logits.shape == (2, 7, VOCABULARY)


@kind
def _sequence_classification(make: Make, folder: Path) -> None:
    for problem, labels in (
        ("single_label_classification", torch.tensor([0, 2])),
        ("multi_label_classification", torch.eye(2, 3)),
        ("regression", torch.randn(2, 3)),
    ):
        model = make(stem="LlamaForSequenceClassification", num_labels=3, problem_type=problem)
        model(**inputs(), labels=labels).loss.backward()
        assert bool(model.score.weight.grad.isfinite().all())


@kind
def _compiled_training(make: Make, folder: Path) -> None:
    want, model = trained(make()), make().train()
    torch.compile(model, backend="aot_eager")(ids(), labels=ids()).loss.backward()
    for name, parameter in model.named_parameters():
        close(parameter.grad, want[name])
    torch._dynamo.reset()


@kind
def _cache_of_keys(make: Make, folder: Path) -> None:
    model = make()
    whole = model(ids()).logits
    first = model(ids()[:, :4], use_cache=True)
    close(model(ids()[:, 4:], past_key_values=first.past_key_values).logits, whole[:, 4:])


def generated(model: Any, **options: Any) -> Tensor:
    torch.manual_seed(0)
    return model.generate(**inputs(), max_new_tokens=5, min_new_tokens=5, **options)


@kind
def _generation(make: Make, folder: Path) -> None:
    model, reference = make(), plain()
    for options in (
        {"do_sample": False},
        {"do_sample": False, "use_cache": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "top_k": 5},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
        {"do_sample": False, "cache_implementation": "static"},
    ):
        assert torch.equal(generated(model, **options), generated(reference, **options)), options


@kind
def _scores_of_a_generation(make: Make, folder: Path) -> None:
    options = {"output_scores": True, "output_attentions": True, "output_hidden_states": True}
    out = generated(make(), return_dict_in_generate=True, do_sample=False, **options)
    assert len(out.scores) == len(out.attentions) == len(out.hidden_states) == 5


@kind
def _left_padding(make: Make, folder: Path) -> None:
    model = make()
    alone = model(inputs()["input_ids"][1:, 3:]).logits
    position = (inputs()["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    close(model(**inputs(), position_ids=position).logits[1, 3:], alone[0])


def outcome(check: Kind, make: Make, folder: Path) -> str:
    """Return "passed", or the error."""
    folder.mkdir()
    try:
        check(make, folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "passed"


@pytest.fixture(autouse=True)
def own_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_passes_as_before(name: str, tmp_path: Path) -> None:
    outcomes = [outcome(KINDS[name], make, tmp_path / make.__name__) for make in (plain, with_apply)]
    assert outcomes[0] == "passed"
    assert (outcomes[1] == "passed") == (name not in DIFFERENT), outcomes[1]


def test_what_differs_is_a_kind() -> None:
    assert DIFFERENT.keys() <= KINDS.keys()
