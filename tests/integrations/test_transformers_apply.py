"""apply: the table, twice, the way back, copies, pickles, wrappers, compile, meta devices."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from model_families import FAMILIES, counted
from torch import Tensor, nn

import fusedops
from fusedops.integrations._replacement import replacement_of
from fusedops.integrations.transformers import Applied, Row, apply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LLAMA = {"rms_norm": 5, "swiglu": 2, "rotary_embedding": 2, "cross_entropy": 1, "attention": 2}


@pytest.fixture
def llama() -> Any:
    return FAMILIES["Llama"].build()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**FAMILIES["Llama"].inputs()).logits


def test_the_table_of_a_llama(llama: Any) -> None:
    applied = apply(llama)
    assert applied.ops == LLAMA
    assert str(applied) == "\n".join(
        [
            "fusedops in LlamaForCausalLM: 1 cross_entropy, 2 rotary_embedding, 2 swiglu, 5 rms_norm, 2 attention",
            "  module            op                count  left, because",
            "  LlamaForCausalLM  cross_entropy     1",
            "  LlamaAttention    rotary_embedding  2",
            "  LlamaMLP          swiglu            2",
            "  LlamaRMSNorm      rms_norm          5",
            "  LlamaAttention    attention         2",
        ]
    )


def test_each_op_is_called(llama: Any) -> None:
    inputs = FAMILIES["Llama"].inputs()
    apply(llama)
    assert counted(lambda: llama(**inputs, labels=inputs["input_ids"])) == LLAMA


def test_twice_is_once(llama: Any) -> None:
    first = apply(llama)
    classes = [type(module) for module in llama.modules()]
    second = apply(llama)
    assert second.rows == first.rows
    assert [type(module) for module in llama.modules()] == classes
    first.remove()
    assert counted(lambda: logits(llama)) == {}
    first.remove()
    second.remove()
    assert apply(llama).ops == LLAMA


def test_the_chosen_ops_alone(llama: Any) -> None:
    applied = apply(llama, ops=["rms_norm"])
    assert applied.ops == {"rms_norm": 5}
    assert Row("LlamaMLP", "", 2, "ops has no swiglu") in applied.rows
    assert apply(llama, ops=["swiglu"]).ops == {"rms_norm": 5, "swiglu": 2}


def test_an_unknown_op_is_an_error(llama: Any) -> None:
    with pytest.raises(fusedops.InvalidInputError, match="got op in ops 'bias_dropout', expected one of attention"):
        apply(llama, ops=["rms_norm", "bias_dropout"])
    assert counted(lambda: logits(llama)) == {}


def test_an_unknown_model_is_left_with_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4))
    before = [type(module) for module in model.modules()]
    with pytest.warns(fusedops.FusedOpsWarning, match="nothing is replaced"):
        applied = apply(model)
    assert applied.ops == {}
    assert applied.rows == (Row("BatchNorm1d", "", 1, "it has buffers"),)
    assert [type(module) for module in model.modules()] == before
    with pytest.warns(fusedops.FusedOpsWarning, match="found no norm"):
        assert apply(nn.Linear(2, 2)).rows == ()


def test_names_state_and_classes_stay(llama: Any) -> None:
    parameters = {name: id(parameter) for name, parameter in llama.named_parameters()}
    keys, names = list(llama.state_dict()), [type(module).__qualname__ for module in llama.modules()]
    bases = [type(module) for module in llama.modules()]
    apply(llama)
    assert {name: id(parameter) for name, parameter in llama.named_parameters()} == parameters
    assert list(llama.state_dict()) == keys
    assert [type(module).__qualname__ for module in llama.modules()] == names
    assert all(isinstance(module, base) for module, base in zip(llama.modules(), bases))
    assert llama.load_state_dict(FAMILIES["Llama"].build().state_dict()).missing_keys == []


def test_a_model_saves_and_loads_as_before(llama: Any, tmp_path: Any) -> None:
    expected = logits(llama)
    apply(llama)
    llama.save_pretrained(tmp_path)
    loaded = type(llama).__mro__[0].from_pretrained(tmp_path)
    assert counted(lambda: torch.testing.assert_close(logits(loaded), expected)) == {}


def pickled(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize(
    ("name", "copied"),
    [("Llama", copy.deepcopy), ("T5 v1.1", copy.deepcopy), ("T5 v1.1", pickled), ("GPT-2", pickled)],
)
def test_a_copy_computes_with_its_own_weights(name: str, copied: Callable[[Any], Any]) -> None:
    family = FAMILIES[name]
    model = family.build()

    def run(model: Any) -> Tensor:
        with torch.no_grad():
            return model(**family.inputs()).logits

    applied = apply(model)
    other = copied(model)
    expected = run(model)
    assert counted(lambda: torch.testing.assert_close(run(other), expected, rtol=0, atol=0)) == counted(
        lambda: run(model)
    )
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    assert torch.equal(run(model), expected)
    assert not torch.equal(run(other), expected)
    applied.remove()
    assert counted(lambda: run(model)) == {}
    assert counted(lambda: run(other)) != {}, "a copy keeps its replacements"
    apply(other).remove()
    assert counted(lambda: run(other)) == {}


def test_the_replacement_of_rotary_embedding_is_pickled(llama: Any) -> None:
    apply(llama)
    settings = replacement_of(llama.model.layers[0].self_attn)
    again = pickle.loads(pickle.dumps(settings))
    assert again == settings
    x = torch.randn(1, 3, 32)
    angles = llama.model.rotary_emb(x, torch.arange(3)[None])
    attention = llama.model.layers[0].self_attn
    results = [each.forward(attention, x, position_embeddings=angles)[0] for each in (settings, again)]
    assert torch.equal(*results)


def test_a_replica_of_data_parallel_reads_its_own_weights(llama: Any) -> None:
    apply(llama)
    norm = llama.model.norm
    replica = norm._replicate_for_data_parallel()
    replica.weight = torch.zeros(32)
    assert not replica(torch.ones(1, 32)).any()


def renamed(forward: Any) -> Any:
    """Decorate a forward as transformers 5.24 does those of attention: an old keyword becomes the new one."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs["past_key_values"] = kwargs.pop("past_key_values", None)
        return forward(*args, **kwargs)

    return wrapped


def out_of_reach(forward: Any) -> Any:
    """Decorate a forward by a function that does not hold it."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapped.__wrapped__(*args, **kwargs)

    return wrapped


def test_a_decorated_forward_is_replaced_below_its_decorators(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, plain = type(llama.model.layers[0].self_attn), logits(llama)
    monkeypatch.setattr(kind, "forward", renamed(renamed(kind.forward)))
    applied = apply(llama)
    assert applied.ops == LLAMA
    counts = counted(lambda: torch.testing.assert_close(logits(llama), plain))
    assert (counts["rotary_embedding"], counts["attention"]) == (2, 2)
    applied.remove()
    assert torch.equal(logits(llama), plain)


def test_a_decorator_that_does_not_hold_the_forward_leaves_it(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(llama.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", out_of_reach(kind.forward))
    reason = "a decorator of its forward keeps it where it cannot be replaced"
    assert Row(kind.__name__, "", 2, reason, "rotary_embedding") in apply(llama).rows


def test_attention_that_no_module_calls_through_the_interface_has_a_row(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(llama.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", lambda *args, **kwargs: None)
    reason = "its attention does not go through transformers' AttentionInterface"
    assert Row("LlamaForCausalLM", "", 1, reason, "attention") in apply(llama).rows


def test_another_librarys_forward_is_left(llama: Any) -> None:
    norm, own = llama.model.norm, llama.model.norm.forward
    norm.forward = lambda x: own(x) * 2
    expected = logits(llama)
    applied = apply(llama)
    assert Row("LlamaRMSNorm", "", 1, "another library has replaced its forward") in applied.rows
    torch.testing.assert_close(logits(llama), expected)


def test_hooks_stay(llama: Any) -> None:
    seen: list[str] = []
    llama.model.norm.register_forward_hook(lambda *_: seen.append("hook"))
    applied = apply(llama)
    logits(llama)
    applied.remove()
    logits(llama)
    assert seen == ["hook", "hook"]


def test_the_weights_are_not_read(llama: Any) -> None:
    with torch.device("meta"):
        empty = FAMILIES["Llama"].build()
    assert apply(empty).ops == LLAMA
    loaded = empty.to_empty(device="cpu")
    loaded.load_state_dict(llama.state_dict())
    for mine, other in zip(loaded.modules(), llama.modules()):
        for name, buffer in other.named_buffers(recurse=False):
            getattr(mine, name).copy_(buffer)
    torch.testing.assert_close(logits(loaded), logits(llama), rtol=1e-4, atol=2e-5)


def test_random_numbers_and_modes_are_not_touched(llama: Any) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    llama.train()
    apply(llama)
    assert torch.equal(torch.rand(4), expected)
    assert all(module.training for module in llama.modules())


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrow_weights_give_narrow_results(narrow: torch.dtype) -> None:
    model = FAMILIES["Llama"].build().to(narrow)
    expected = logits(model)
    apply(model)
    results = logits(model)
    assert results.dtype == expected.dtype
    torch.testing.assert_close(results.float(), expected.float(), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("name", ["Llama", "Gemma", "T5 v1.1"])
def test_autocast_keeps_the_dtypes(name: str) -> None:
    """The dtype that each module returns under autocast is that of its own forward."""
    family = FAMILIES[name]
    model = family.build()
    dtypes: dict[str, Any] = {}

    def noted(name: str, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        dtypes[name] = getattr(first, "dtype", None)

    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: noted(name, output))
    runs: list[dict[str, Any]] = []
    for run in range(2):
        if run:
            apply(model)
        dtypes.clear()
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(**family.inputs())
        runs.append(dict(dtypes))
    before, after = runs
    assert {name.rpartition(".")[2] for name in before.keys() - after.keys()} <= {"act_fn", "activation_fn", "act"}
    assert {name: before[name] for name in after} == after


@pytest.mark.slow
@pytest.mark.parametrize("compiled_first", [False, True])
def test_torch_compile_before_and_after(compiled_first: bool) -> None:
    llama = dataclasses.replace(FAMILIES["Llama"], values={**FAMILIES["Llama"].values, "num_hidden_layers": 1}).build()
    expected, inputs = logits(llama), FAMILIES["Llama"].inputs()
    torch._dynamo.reset()
    if compiled_first:
        model = torch.compile(llama, backend="eager", fullgraph=True)
        with torch.no_grad():
            model(**inputs)
        applied = apply(model)
    else:
        applied = apply(llama)
        model = torch.compile(llama, backend="eager", fullgraph=True)
    assert applied.ops == {"rms_norm": 3, "swiglu": 1, "rotary_embedding": 1, "cross_entropy": 1, "attention": 1}

    def run() -> Tensor:
        with torch.no_grad():
            return model(**inputs).logits

    assert counted(lambda: torch.testing.assert_close(run(), expected, rtol=1e-4, atol=2e-5))["rms_norm"] == 3
    applied.remove()
    assert counted(lambda: torch.testing.assert_close(run(), expected, rtol=1e-4, atol=2e-5)) == {}


def test_it_displays_as_a_table() -> None:
    applied = Applied("Tiny", [Row("A<B>", "rms_norm", 2)], lambda: None)
    assert "<td>A&lt;B&gt;</td><td>rms_norm</td><td>2</td>" in applied._repr_html_()


def test_dropout_of_attention_is_noted() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=48))
    applied = apply(bert)
    assert [note.partition(":")[0] for note in applied.notes] == ["attention_probs_dropout_prob = 0.1"]
    assert " ".join(str(applied).split()).endswith("with attention_probs_dropout_prob = 0, by attention")
    rows = [row for row in applied.rows if row.module == "BertSelfAttention"]
    left = "in training, for its attention_probs_dropout_prob = 0.1"
    in_evaluation = Row("BertSelfAttention", "attention", 1, when="evaluation")
    assert rows == [in_evaluation, Row("BertSelfAttention", "", 1, left)]
    assert apply(bert).rows == applied.rows
    without = transformers.BertConfig(**sizes, intermediate_size=48, attention_probs_dropout_prob=0.0)
    assert apply(transformers.BertModel(without)).notes == ()
    ops = ["layer_norm"]  # the attention stays transformers', whose sdpa has dropout
    applied.remove()
    assert apply(transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=48)), ops=ops).notes == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_norm_without_an_eps_has_that_of_the_dtype(dtype: torch.dtype) -> None:
    norms = nn.Sequential(nn.RMSNorm(8), nn.RMSNorm(8, eps=1e-6)).to(dtype)
    x = (torch.randn(3, 8) * 3e-4).to(dtype)
    expected = norms(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of the dtypes that are compared
        assert apply(norms).ops == {"rms_norm": 2}
    torch.testing.assert_close(norms(x), expected)


def test_a_table_has_the_family_of_what_is_left_and_fits_100_columns() -> None:
    rows = [Row("OddNorm", "", 1, "it has buffers " * 20, "norm"), Row("TinyNorm", "rms_norm", 2)]
    lines = repr(Applied("Tiny", rows, lambda: None, notes=lambda: ["a note: " * 30])).splitlines()
    assert max(map(len, lines)) <= 102
    assert lines[2].startswith("  OddNorm   (norm)    1      it has buffers")
    assert " ".join("".join(lines).split()).count("buffers") == 20
    assert [line for line in lines if line.startswith("a note: ")]
