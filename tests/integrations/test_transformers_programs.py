"""Programs around a model that apply must not change in silence: its losses, hooks, wrappers and own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.loss import loss_utils
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import eager_attention_forward

from fusedops.integrations.transformers import apply, quantize

IDS = (torch.arange(16).view(2, 8) * 3 + 1) % 64
SEEN: list[Any] = []


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def step(model: Any, **given: Any) -> list[Tensor]:
    """The loss and the gradients of a step."""
    model.zero_grad()
    loss = model(IDS, labels=IDS, **given).loss
    loss.sum().backward()
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def left(model: Any, module: str) -> list[str]:
    return [row.left for row in apply(model).rows if row.module == module and row.left]


# ------------------------------------------------------------------------------------------------------------ losses


def limited(logits: Tensor, labels: Tensor, vocab_size: int, weight: float = 1.0, **rest: Any) -> Tensor:
    return weight * ForCausalLMLoss(logits.clamp(max=30.0), labels, vocab_size, **rest)  # more than a trial's logits


@pytest.mark.parametrize("fused_loss", [False, True])
def test_a_loss_of_the_users_is_kept(fused_loss: bool) -> None:
    model = llama()
    model.loss_function = limited
    model.lm_head.weight.data *= 100
    plain = step(model, weight=3.0, num_items_in_batch=5), step(model)
    assert f"its loss calls {__name__}'s function" in left(model, "LlamaForCausalLM")
    apply(model, fused_loss=fused_loss)
    assert model.loss_function is limited
    again = step(model, weight=3.0, num_items_in_batch=5), step(model)
    torch.testing.assert_close(again, plain, rtol=1e-3, atol=1e-3)


def test_a_function_that_transformers_loss_calls_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for holder, name in ((loss_utils, "fixed_cross_entropy"), (F, "cross_entropy")):
        own = getattr(holder, name)
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, lambda *args, own=own, **given: own(*args, **given).clamp(max=99))
            assert left(llama(), "LlamaForCausalLM") == [f"its loss calls {__name__}'s function"]


@pytest.mark.parametrize("fused_loss", [False, True])
def test_the_loss_has_the_shape_of_the_number_of_items(fused_loss: bool) -> None:
    model = llama()
    plain = step(model, num_items_in_batch=torch.tensor([5]))
    apply(model, fused_loss=fused_loss)
    torch.testing.assert_close(step(model, num_items_in_batch=torch.tensor([5])), plain)


# ------------------------------------------------------------------------------------- modules in or around a module


class Recorder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(x.shape)
        return x


class CountedSilu(nn.SiLU):
    def __call__(self, *args: Any) -> Any:
        SEEN.append(args[0].shape)
        return super().__call__(*args)


def recording_silu() -> nn.Module:
    silu = nn.SiLU()

    def forward(x: Tensor) -> Tensor:
        SEEN.append(x.shape)
        return F.silu(x)

    silu.forward = forward
    return silu


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "a module inside": lambda: nn.Sequential(nn.SiLU(), Recorder()),
    "a module two levels inside": lambda: nn.Sequential(nn.Sequential(nn.SiLU(), Recorder())),
    "a call of the class": CountedSilu,
    "a forward on an instance inside": lambda: nn.Sequential(recording_silu()),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_an_activation_does_inside_is_kept(name: str) -> None:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = ACTIVATIONS[name]()
    applied = apply(model)
    assert "swiglu" not in applied.ops
    assert [row.left != "" for row in applied.rows if row.module == "LlamaMLP"] == [True]
    SEEN.clear()
    model(IDS)
    assert len(SEEN) == 2


def test_a_scripted_activation_is_called() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.jit.script(nn.SiLU())
    plain = model(IDS).logits
    assert left(model, "LlamaMLP") == ["act_fn cannot be copied, and is not called itself"]
    torch.testing.assert_close(model(IDS).logits, plain)


class Halved(nn.Module):
    """A wrapper of a rotary module, whose cos has other entries in its halves."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.wrapped = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return halved(self.wrapped(x, position_ids))


def halved(result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = result
    return torch.cat((0.5 * cos[..., :4], cos[..., 4:]), -1), sin


def with_hook(model: Any) -> None:
    model.model.rotary_emb.register_forward_hook(lambda _, args, result: halved(result))


def with_wrapper(model: Any) -> None:
    model.model.rotary_emb = Halved(model.model.rotary_emb)


def with_forward(model: Any) -> None:
    rotary = model.model.rotary_emb
    own = rotary.forward
    rotary.forward = lambda x, position_ids: halved(own(x, position_ids))


@pytest.mark.parametrize("change", [with_hook, with_wrapper, with_forward])
def test_angles_that_something_around_the_rotary_module_changes(change: Callable[[Any], None]) -> None:
    model = llama()
    change(model)
    plain = step(model)
    reason = "the model has no rotary module that gives cos as apply_rotary_pos_emb takes it"
    assert left(model, "LlamaAttention") == [reason]
    torch.testing.assert_close(step(model), plain)


def test_a_rotary_function_with_a_hook_is_called() -> None:
    function = modeling_llama.apply_rotary_pos_emb
    if not isinstance(function, nn.Module):
        pytest.skip("needs the package kernels, which makes a module of it")
    model = llama()
    hook = function.register_forward_hook(lambda _, args, result: (result[0] * 1.5, result[1]))
    try:
        plain = model(IDS).logits
        assert left(model, "LlamaAttention") == ["another library has replaced apply_rotary_pos_emb, or it has hooks"]
        torch.testing.assert_close(model(IDS).logits, plain)
    finally:
        hook.remove()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class LimitedNorm(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x.clamp(-1e4, 1e4))


class FiniteNorm(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(torch.where(torch.isinf(x), torch.zeros_like(x), x))


class VideoNorm(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) if x.dim() < 5 else x


class InferenceNorm(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) * (2 if torch.is_inference_mode_enabled() else 1)


class AutocastNorm(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        y = self.normed(x)
        return y.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else y


class OldAutocastNorm(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) * (2 if torch.is_autocast_cpu_enabled() else 1)


@pytest.mark.filterwarnings("ignore:apply. fusedops in:fusedops.FusedOpsWarning")
@pytest.mark.parametrize("kind", [LimitedNorm, FiniteNorm, VideoNorm, InferenceNorm, AutocastNorm, OldAutocastNorm])
def test_a_norm_with_another_rule_for_some_calls_is_left(kind: Any) -> None:
    (row,) = apply(nn.Sequential(kind())).rows
    assert row.left != ""


# --------------------------------------------------------------------------------------------------------- attention


class OwnAttention(modeling_llama.LlamaAttention):
    """The parts that attention of the user's shares; without positions."""

    def heads(self, hidden_states: Tensor) -> list[Tensor]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        return [layer(hidden_states).view(shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)]


class WithSinks(OwnAttention):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(hidden_states)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = function(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0, s_aux=torch.ones(4))
        return self.o_proj(out.flatten(2)), weights


def asks(module: Any) -> bool:
    return module.config._attn_implementation in {"sdpa", "paged"}


class WithAnswer(OwnAttention):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(hidden_states)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = function(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(out.flatten(2)) * (2 if asks(self) else 1), weights


class WithProbabilities(OwnAttention):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        q, k, v = self.heads(hidden_states)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, weights = function(self, q, k, v, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(out.flatten(2)) * (1 if weights is None else weights.amax()), weights


class Around(nn.Module):
    def __init__(self, config: Any, at: int) -> None:
        super().__init__()
        self.inner = modeling_llama.LlamaAttention(config, at)

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out, weights = self.inner(*args, **kwargs)
        return (out if weights is None else 2 * out), weights


def with_attention(kind: Any, implementation: str, **changes: Any) -> Any:
    model = llama(attn_implementation=implementation, **changes)
    for at, layer in enumerate(model.model.layers):
        own = kind(model.config, at)
        own.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = own
    return model.eval()


PROBABILITIES = ' gets the probabilities of eager; to fix: set_attn_implementation("sdpa") before'


@pytest.mark.parametrize(
    ("kind", "implementation", "reason"),
    [
        (WithSinks, "sdpa", "its implementation sdpa leaves out the s_aux that WithSinks passes"),
        (WithAnswer, "sdpa", "code of its own asks for its implementation sdpa"),
        (WithProbabilities, "eager", "WithProbabilities" + PROBABILITIES),
        (Around, "eager", "Around" + PROBABILITIES),
        (WithAnswer, "eager", "WithAnswer" + PROBABILITIES),
        (WithProbabilities, "sdpa", None),
        (Around, "sdpa", None),
    ],
)
def test_code_of_the_users_around_attention(kind: Any, implementation: str, reason: str | None) -> None:
    model = with_attention(kind, implementation)
    plain = model(IDS).logits
    inner = "LlamaAttention" if kind is Around else kind.__name__
    assert [row.left for row in apply(model).rows if row.module == inner and "attention" in (row.op, row.family)] == [
        reason or ""
    ]
    torch.testing.assert_close(model(IDS).logits, plain)


def test_probabilities_that_a_hook_reads() -> None:
    model = llama(attn_implementation="eager")
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, args, result: SEEN.append(result[1]))
    SEEN.clear()
    model(IDS)
    assert apply(model).ops["scaled_masked_softmax"] == 2
    model(IDS)
    torch.testing.assert_close(SEEN[2:], SEEN[:2])


# ---------------------------------------------------------------------------------------------------- packed weights


@pytest.mark.parametrize("function", [F.relu, F.dropout, F.leaky_relu])
def test_a_function_in_place_does_not_lose_its_write(function: Callable[..., Tensor]) -> None:
    layer = nn.Linear(32, 4)
    quantize(nn.ModuleList([layer]))
    with pytest.raises(ValueError, match="as a write to the weight of a packed layer"):
        function(layer.weight, inplace=True)


def test_embeddings_of_inference_mode_go_into_a_step() -> None:
    model = llama()
    with torch.inference_mode():
        embeddings = model.get_input_embeddings()(IDS)

    def trained() -> list[Tensor]:
        model.zero_grad()
        model(inputs_embeds=embeddings, labels=IDS).loss.backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    plain = trained()
    apply(model)
    for each, right in zip(trained(), plain, strict=True):
        torch.testing.assert_close(each, right, rtol=1e-4, atol=1e-6)
