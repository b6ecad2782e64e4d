"""apply beside torch.compile with graph breaks, libraries that keep a bound forward, and the hooks of a user."""

from __future__ import annotations

import copy
import gc
import inspect
from typing import Any

import pytest
import torch
import transformers
from model_families import FAMILIES
from torch import Tensor, nn
from transformers.generation.continuous_batching import ContinuousBatchingManager

from fusedops.integrations.transformers import Row, apply
from fusedops.integrations.transformers._attention import implementation as _implementation

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::fusedops.FusedOpsWarning"),
]

IDS = torch.arange(1, 9)[None]


def llama(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**sizes, **changes})
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")


@pytest.mark.slow
def test_a_graph_break_in_the_attention_of_two_layers() -> None:
    model = llama().eval()
    with torch.no_grad():
        expected = model(IDS, output_attentions=True)
        apply(model)
        result = torch.compile(model, backend="eager")(IDS, output_attentions=True)
    torch.testing.assert_close(result.logits, expected.logits)
    torch.testing.assert_close(result.attentions, expected.attentions)


@pytest.mark.parametrize("later", [True, False])
def test_output_attentions_in_the_config(later: bool) -> None:
    model = llama().eval()
    with torch.no_grad():
        expected = model(IDS, output_attentions=True)
        if later:
            apply(model)
        model.config.output_attentions = True
        apply(model)
        result = model(IDS)
        torch.testing.assert_close(result.logits, expected.logits)
        torch.testing.assert_close(result.attentions, expected.attentions)
        model.config.validate_output_attentions()
        copied = copy.deepcopy(model.config)
        assert copied.output_attentions
        assert type(model.config).from_dict(model.config.to_dict()).output_attentions
        model.config.output_attentions = False
        assert model(IDS).attentions is None


def test_output_attentions_in_the_config_of_other_implementations_is_refused_by_transformers() -> None:
    model = llama()
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="not supported when using the `attn_implementation` set to sdpa"):
        model.config.output_attentions = True


MEMBERS: dict[Any, tuple[str, ...]] = {
    transformers.PreTrainedConfig: ("output_attentions", "validate_output_attentions"),
    ContinuousBatchingManager: ("switch_to_cb_friendly_attn",),
}


def guards() -> list[Any]:
    return [vars(kind)[name] for kind, names in MEMBERS.items() for name in names]


@pytest.fixture
def own_guards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the checks of transformers, with no model of another test held."""
    _implementation._GUARDS._models.clear()
    _implementation._GUARDS.release(nn.Identity())
    own = guards()
    homes = {each.__module__ for each in own if not isinstance(each, property)}
    assert homes == {"transformers.configuration_utils", ContinuousBatchingManager.__module__}
    assert "fusedops" not in own[0].fset.__module__
    return own


def test_transformers_is_its_own_again_after_the_last_remove(own_guards: list[Any]) -> None:
    models = [llama(), llama(), llama()]
    applied = [apply(model) for model in models]
    assert not any(ours is own for ours, own in zip(guards(), own_guards))
    applied[0].remove()
    applied[0].remove()
    del models[2], applied[2]  # never removed, but gone
    gc.collect()
    models[1].config.output_attentions = True
    models[1].config.validate_output_attentions()
    assert not any(ours is own for ours, own in zip(guards(), own_guards))
    applied[1].remove()
    assert guards() == own_guards


def test_transformers_is_its_own_again_after_the_last_model_is_gone(own_guards: list[Any]) -> None:
    model = llama()
    apply(model)
    assert guards() != own_guards
    del model
    gc.collect()
    assert guards() == own_guards


def test_what_another_library_replaced_meanwhile_is_left(
    own_guards: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    applied = apply(model)
    ours, calls = transformers.PreTrainedConfig.validate_output_attentions, list[Any]()

    def theirs(config: Any) -> None:
        calls.append(config)
        ours(config)

    monkeypatch.setattr(transformers.PreTrainedConfig, "validate_output_attentions", theirs)
    applied.remove()
    assert guards() == [own_guards[0], theirs, own_guards[2]]
    model.config.validate_output_attentions()
    assert calls == [model.config]
    monkeypatch.undo()
    transformers.PreTrainedConfig.validate_output_attentions = own_guards[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_training_with_attention_dropout() -> None:
    model = llama(attention_dropout=0.1).train()
    apply(model)
    torch.compile(model, backend="eager")(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_a_replaced_and_a_plain_model_compile_in_one_process() -> None:
    for replaced in (False, True, False):
        model = llama(num_hidden_layers=1).eval()
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        with torch.no_grad():
            expected = model(IDS).logits
            if replaced:
                apply(model)
            torch.testing.assert_close(torch.compile(model, backend="eager")(IDS).logits, expected)


def test_equal_layers_share_their_replacement() -> None:
    model = llama()
    apply(model)
    first, second = (layer.self_attn._fusedops_replacement for layer in model.model.layers)
    assert first is second
    own = type(model.model.layers[0].self_attn).__mro__[2].forward
    assert inspect.unwrap(first.copied).__code__ is not inspect.unwrap(own).__code__


def hook(module: Any) -> None:
    """Keep the bound forward on the instance, as add_hook_to_module of accelerate does."""
    module._old_forward = module.forward
    module.forward = lambda *args, **kwargs: module._old_forward(*args, **kwargs)


def unhook(module: Any) -> None:
    """Set the kept bound forward on the instance, as remove_hook_from_module of accelerate does."""
    module.forward = module.__dict__.pop("_old_forward")


@pytest.mark.parametrize("unhooked", [False, True])
@pytest.mark.parametrize("family", ["Llama", "T5 v1.1", "Mixtral"])
def test_remove_after_a_library_has_kept_the_bound_forward(family: str, unhooked: bool) -> None:
    model, inputs = FAMILIES[family].build(), FAMILIES[family].inputs()
    with torch.no_grad():
        expected = model(**inputs).logits
        applied = apply(model)
        modules = list(model.modules())
        for module in modules:
            hook(module)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
        if unhooked:
            for module in modules:
                unhook(module)
        applied.remove()
        assert torch.equal(model(**inputs).logits, expected)


def test_apply_calls_no_hook_of_the_user() -> None:
    model = llama().eval()
    seen: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(name))
    assert Row("LlamaMLP", "", 2, "its act_fn has hooks") in apply(model).rows
    assert seen == []


class Recording(nn.Module):
    """SiLU that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.shapes: list[torch.Size] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(x.shape)
        return torch.nn.functional.silu(x)


class Held(Recording):
    """SiLU that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("held by a driver")


def test_apply_does_not_change_the_state_of_an_activation() -> None:
    model = llama().eval()
    activation = model.model.layers[0].mlp.act_fn = Recording()
    applied = apply(model)
    assert applied.ops["swiglu"] == 1
    assert Row("LlamaMLP", "", 1, "its forward stores calls") in applied.rows
    assert (activation.calls, activation.shapes) == (0, [])


def test_an_activation_that_cannot_be_copied_is_left_uncalled() -> None:
    model = llama().eval()
    activation = model.model.layers[0].mlp.act_fn = Held()
    applied = apply(model)
    assert Row("LlamaMLP", "", 1, "act_fn cannot be copied, and is not called itself") in applied.rows
    assert activation.calls == 0
