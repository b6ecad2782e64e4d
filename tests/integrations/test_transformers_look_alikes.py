"""Each known kind of module with one thing added: apply leaves it with a reason, or keeps what was added."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import fusedops
from fusedops.integrations.transformers import apply
from fusedops.integrations.transformers._mixers.recognition import recognised_mixer
from fusedops.integrations.transformers._rotary.functions import recognised_function

pytestmark = pytest.mark.filterwarnings(
    "ignore:apply. fusedops in:fusedops.FusedOpsWarning", "ignore:CUDA is not available:UserWarning"
)

H = 16
FLAG, step, factor = True, 0, 1.0
GPUS = ("cuda", "xpu")
CALLS: list[Any] = []


class Added(nn.Module):
    """What look-alikes have in common: one function, called at one place of the forward."""

    inputs = 1

    def __init__(self, place: str, added: Any) -> None:
        super().__init__()
        self.place, self.added, self.seen, self.count, self.log = place, added, None, 0, []
        self.logs = (self.log,)

    def at(self, place: str, x: Tensor) -> Tensor:
        return self.added(self, x) if place == self.place else x


class TinyRMSNorm(Added):
    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.weight, self.eps = nn.Parameter(torch.rand(H) + 0.5), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        x = self.at("first", x)
        y = self.at("middle", x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
        return self.at("last", y * self.weight)


class TinyLayerNorm(TinyRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = self.at("first", x)
        y = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, correction=0, keepdim=True) + self.eps)
        return self.at("last", self.at("middle", y) * self.weight)


class TinyGatedNorm(TinyRMSNorm):
    inputs = 2

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = self.at("first", x)
        y = self.at("middle", x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))
        return self.at("last", y * self.weight * F.silu(gate))


class TinyMLP(Added):
    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.gate, self.up, self.down = nn.Linear(H, 24), nn.Linear(H, 24), nn.Linear(24, H)

    def forward(self, x: Tensor) -> Tensor:
        x = self.at("first", x)
        h = self.at("middle", F.silu(self.gate(x)) * self.up(x))
        return self.at("last", self.down(h))


class TinyGELU(Added):
    def forward(self, x: Tensor) -> Tensor:
        x = self.at("first", x)
        inner = self.at("middle", 0.7978845608028654 * (x + 0.044715 * x**3))
        return self.at("last", 0.5 * x * (1 + torch.tanh(inner)))


class TinyRouter(Added):
    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self.weight = nn.Parameter(torch.randn(8, H))

    def forward(self, x: Tensor) -> Any:
        logits = F.linear(self.at("first", x), self.weight)
        scores = self.at("middle", logits.float().softmax(-1))
        weights, index = scores.topk(2, -1)
        return logits, self.at("last", weights), index


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return -grad


class Limited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.clamp(-1e4, 1e4)


def stored(m: Any, x: Tensor) -> Tensor:
    m.seen = x.detach().abs().mean()
    return x


def counted(m: Any, x: Tensor) -> Tensor:
    m.count += 1
    return x * (2 if m.count > 100 else 1)


def stored_globally(m: Any, x: Tensor) -> Tensor:
    global step
    step += 1
    return x


def without_gradients(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1


def limited(m: Any, x: Tensor) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        x = x * 1
        x.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return x


def with_narrow_numbers_on_a_gpu(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.float16):
        return x * 1


def noting(m: Any, x: Tensor) -> Tensor:
    noting.kept.append(0)  # pyright: ignore[reportFunctionMemberAccess]
    return x


noting.kept = CALLS  # pyright: ignore[reportFunctionMemberAccess]
logged = partial(lambda log, x: (log.append(0), x)[1], CALLS)


def with_a_seed(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x


ADDED: dict[str, Callable[[Any, Tensor], Any]] = {
    "a dropout": lambda m, x: F.dropout(x, 0.3, m.training),
    "noise in training": lambda m, x: x + torch.randn_like(x) if m.training else x,
    "a factor in training": lambda m, x: 1.5 * x if m.training else x,
    "a clamp in training": lambda m, x: x.clamp(-0.1, 0.1) if m.training else x,
    "a number that is drawn": lambda m, x: x + 0 * torch.rand(()),
    "a seed": with_a_seed,
    "a stored statistic": stored,
    "a counter": counted,
    "a list": lambda m, x: (m.log.append(float(x.detach().mean())), x)[1],
    "setattr": lambda m, x: (setattr(m, "seen", 1.0), x)[1],
    "a list of the file": lambda m, x: (CALLS.append(0), x)[1],
    "a list of a default": lambda m, x, log=CALLS: (log.append(0), x)[1],
    "a list of a function": noting,
    "a list of a partial": lambda m, x: logged(x),
    "a list in a tuple": lambda m, x: (m.logs[0].append(0), x)[1],
    "a counter of the file": stored_globally,
    "a flag of the file": lambda m, x: x if FLAG else 2 * x,
    "a step of the file": lambda m, x: x if step < 10**6 else 2 * x,
    "print": lambda m, x: (print("", end=""), x)[1],
    "logging": lambda m, x: (logging.debug("called"), x)[1],
    "a time": lambda m, x: x if time.time() > 0 else 2 * x,
    "the environment": lambda m, x: 2 * x if "FUSEDOPS_NO_SUCH_NAME" in os.environ else x,
    "many rows": lambda m, x: x if x.shape[0] <= 4096 else 2 * x,
    "many numbers": lambda m, x: x * (1 + (x.numel() > 60_000)),
    "many rows by len": lambda m, x: x if len(x) <= 4096 else 2 * x,
    "the rows behind": lambda m, x: torch.cat((x[:4096], 2 * x[4096:])),
    "parts of many rows": lambda m, x: torch.cat([x * (1 + (at > 0)) for at, x in enumerate(x.split(4096))]),
    "many rows by arange": lambda m, x: x * (1 + (torch.arange(x.shape[-2])[:, None] > 4096)),
    "many rows by a sum": lambda m, x: x * (1 + (torch.ones_like(x).cumsum(-2) > 4096)),
    "numbers that are none": lambda m, x: torch.nan_to_num(x),
    "more than 32 tokens": lambda m, x: x * (1 + (torch.ones_like(x).flatten(0, -2).sum(0) > 32)),
    "a large gradient limited": lambda m, x: Limited.apply(x),
    "one token": lambda m, x: 2 * x if x.shape[-2] == 1 else x,
    "an even number of tokens": lambda m, x: x if x.size(0) % 2 else 2 * x,
    "no gradient": lambda m, x: x.detach(),
    "no gradient of a block": without_gradients,
    "half of the gradient": lambda m, x: 0.5 * x + (0.5 * x).detach(),
    "the gradient reversed": lambda m, x: Reversed.apply(x),
    "a gradient that is limited": limited,
    "only where a gradient is wanted": lambda m, x: 2 * x if torch.is_grad_enabled() else x,
    "its argument changed": lambda m, x: x.mul_(1.0),
    "another way on a GPU": lambda m, x: 2 * x if x.is_cuda else x,
    "autocast on a GPU": with_narrow_numbers_on_a_gpu,
    "a call of another device": lambda m, x: 2 * x if x.device.type == "cuda" else x,
    "a call of other devices": lambda m, x: 2 * x if x.device.type in ("cuda", "xpu") else x,
    "a call of the file's devices": lambda m, x: 2 * x if x.device.type in GPUS else x,
    "a call of one GPU": lambda m, x: 2 * x if x.device == torch.device("cuda:0") else x,
    "the index of a GPU": lambda m, x: 2 * x if x.device.index is not None else x,
    "a factor of the file": lambda m, x: factor * x,
    "the default dtype": lambda m, x: x if torch.get_default_dtype() == torch.float32 else 2 * x,
    "the layout": lambda m, x: x if x.is_contiguous() else 2 * x,
}
KINDS = (TinyRMSNorm, TinyLayerNorm, TinyGatedNorm, TinyMLP, TinyGELU, TinyRouter)


def nothing(m: Any, x: Tensor) -> Tensor:
    return x * 1


def behaviour(module: Any) -> list[Any]:
    """Return what calls of a module give, store and draw, in both modes, of several tokens, of one and of many."""
    CALLS.clear()
    found: list[Any] = []
    for training, tokens in product((True, False), (6, 1, 5000)):
        module.train(training).zero_grad()
        generator = torch.Generator().manual_seed(tokens)
        given = [torch.randn(tokens, H, generator=generator).requires_grad_() for _ in range(module.inputs)]
        torch.manual_seed(tokens)
        inputs = [each * 1 for each in given]
        results = module(*inputs)
        results = results[:2] if isinstance(results, tuple) else (results,)
        total = sum((each * torch.linspace(0, 1, each.shape[-1])).sum() for each in results)
        if total.requires_grad:
            total.backward()
        gradients = [each.grad for each in (*given, *module.parameters())]
        found += [*results, *gradients, torch.get_rng_state(), *(each._version for each in inputs)]
    with torch.no_grad():
        found += module(*inputs)[:1]
    return [*found, module.seen, module.count, [*module.log], len(CALLS)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_replaced_with_nothing_added(kind: Any) -> None:
    module = kind("last", nothing)
    plain = behaviour(copy.deepcopy(module))
    (row,) = apply(module).rows
    assert (row.op != "", row.left, row.when) == (True, "", "")
    torch.testing.assert_close(behaviour(module), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_added_is_kept(kind: Any, name: str) -> None:
    places = ("first",) if name == "its argument changed" else ("middle", "last")  # a norm has no scale of its argument
    module = kind(places[(list(ADDED).index(name) + KINDS.index(kind)) % len(places)], ADDED[name])
    plain = behaviour(copy.deepcopy(module))
    rows = apply(module).rows
    assert any(row.left for row in rows), rows
    assert type(module.log) is list
    assert (module.seen, module.count, module.log) == (None, 0, [])
    torch.testing.assert_close(behaviour(module), plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS[:5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_in_one_dtype_is_kept(kind: Any, dtype: torch.dtype) -> None:
    module = kind("last", lambda m, x: x.clamp(-0.1, 0.1) if x.dtype == dtype else x)
    assert all(row.left for row in apply(module).rows)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.weight * torch.where((y := normed(m, x)).isnan(), 0, y),
        lambda m, x: m.weight.clamp(-9, 9) * normed(m, x),
    ],
)
@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_a_norm_with_another_rule_for_some_rows_or_weights_is_left(forward: Any, eps: float) -> None:
    module = type("OtherNorm", (TinyRMSNorm,), {"forward": forward})("", nothing)
    module.eps = eps
    (row,) = apply(module).rows
    assert row.left


@pytest.mark.parametrize("blocks", [lambda x: x.split([4, x.shape[1] - 4], 1)[0], lambda x: x.unflatten(1, (-1, 577))])
@pytest.mark.parametrize("kind", KINDS[:5])
def test_what_needs_several_tokens_in_a_batch_is_kept(kind: Any, blocks: Any) -> None:
    module = kind("last", lambda m, x: x if x.dim() < 3 else x + 0.5 * blocks(x).mean())
    assert all(row.left for row in apply(module).rows)


def test_a_router_with_a_capacity_is_left() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        weights, index = (logits := F.linear(x, m.weight)).softmax(-1).topk(2, -1)
        load = F.one_hot(index, 8).flatten(0, -2).sum(0)
        return logits, weights * (load <= 20)[index], index

    module = type("OtherRouter", (TinyRouter,), {"forward": forward})("", nothing)
    assert all(row.left for row in apply(module).rows)


def normed(m: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.eps)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: m.down(F.silu(F.linear(x, m.gate.weight, m.gate.bias)) * m.up(x)),
        lambda m, x: m.down(F.silu(m.gate.forward(x)) * m.up(x)),
        lambda m, x: m.down(F.silu(m.gate(x) * getattr(m.gate, "scale", 1.0)) * m.up(x)),
        lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x) * (2 if m.gate(x).shape[-1] > 16 else 1)),
        lambda m, x: m.down(torch.cat(((h := F.silu(m.gate(x)) * m.up(x))[..., :20], 2 * h[..., 20:]), -1)),
    ],
)
def test_an_mlp_that_uses_its_layers_in_another_way_is_left(forward: Any) -> None:
    module = type("OtherMLP", (TinyMLP,), {"forward": forward})("", nothing)
    (row,) = apply(module).rows
    assert row.left


def outside_autocast(m: Any, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return m.down(F.silu(m.gate(x)) * m.up(x))


def test_an_mlp_that_leaves_autocast_is_left() -> None:
    module = type("OtherMLP", (TinyMLP,), {"forward": outside_autocast})("", nothing)
    (row,) = apply(module).rows
    assert row.left == "the dtypes of its results follow another rule"


@pytest.mark.parametrize("limit", [lambda gate: F.silu(gate).clamp(max=9), lambda gate: F.silu(gate.clamp(-30, 30))])
def test_a_norm_whose_gate_is_limited_is_left(limit: Any) -> None:
    forward = {"forward": lambda m, x, gate: normed(m, x) * m.weight * limit(gate)}
    (row,) = apply(type("LimitedNorm", (TinyGatedNorm,), forward)("", nothing)).rows
    assert row.left == "its results are not those of gated_rms_norm"


def mixtral_experts(change: Callable[[Tensor], Tensor]) -> Any:
    """Experts of Mixtral whose weights of the tokens are changed before."""
    own, sizes = inspect.unwrap(MixtralExperts.forward), {"hidden_size": H, "num_attention_heads": 2}
    kind = type("OwnExperts", (MixtralExperts,), {"forward": lambda m, x, at, weights: own(m, x, at, change(weights))})
    config = transformers.MixtralConfig(**sizes, intermediate_size=24, num_local_experts=4)
    config._experts_implementation = "grouped_mm"
    return kind(config)


def test_experts_whose_weights_are_limited_are_left() -> None:
    assert apply(mixtral_experts(lambda weights: 1 * weights)).ops == {"experts": 1}
    assert "experts" not in apply(mixtral_experts(lambda weights: weights.clamp(max=5))).ops


def test_the_layers_of_an_mlp_are_called_in_its_order() -> None:
    def up_first(m: Any, x: Tensor) -> Tensor:
        up = m.up(x)
        return m.down(F.silu(m.gate(x)) * up)

    module = type("OtherMLP", (TinyMLP,), {"forward": up_first})("", nothing)
    for layer in (module.gate, module.up):  # as an adapter with a dropout
        layer.register_forward_hook(lambda _, args, y: y + F.dropout(torch.ones_like(y)))
    plain = behaviour(copy.deepcopy(module))
    assert apply(module).ops == {"swiglu": 1}
    torch.testing.assert_close(behaviour(module), plain, rtol=1e-4, atol=1e-4)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return tuple(x * cos[:, None] + torch.cat((-x[..., H // 2 :], x[..., : H // 2]), -1) * sin[:, None] for x in (q, k))


@pytest.mark.parametrize("name", [name for name in ADDED if "training" not in name and name != "a dropout"])
def test_a_rotary_function_with_something_added_is_left(name: str) -> None:
    holder, added = TinyGELU("", None).eval(), ADDED[name]

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return rotated(added(holder, q), k, cos, sin)

    assert isinstance(recognised_function(function, "function"), str)


@pytest.mark.parametrize("change", [lambda x: x.clamp(-100, 100), lambda x: x.where(x.abs() < 20, 20 + 0.5 * (x - 20))])
def test_a_rotary_function_that_limits_large_numbers_is_left(change: Any) -> None:
    function = partial(lambda change, q, *rest: rotated(change(q), *rest), change)
    own = lambda q, k, cos, sin: function(q, k, cos, sin)  # noqa: E731
    assert recognised_function(own, "function") == "function computes something else with gradients"


def test_a_loss_with_something_added_is_left() -> None:
    sizes = {"vocab_size": 32, "hidden_size": H, "intermediate_size": 24, "num_hidden_layers": 1}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    own, losses = model.loss_function, []

    def noted(**given: Any) -> Tensor:
        losses.append(0)
        return own(**given)

    for function in (noted, lambda **given: own(**given), functools.partial(own)):
        model.loss_function = function
        assert "cross_entropy" not in apply(model).ops
        assert model.loss_function is function
    assert losses == []


def test_the_outcome_of_a_module_is_not_that_of_one_with_another_attribute() -> None:
    modules = [TinyRMSNorm("last", added) for added in (nothing, ADDED["half of the gradient"], nothing)]
    modules[2].eps = 1e-6
    applied = apply(nn.ModuleList(modules))
    assert applied.ops == {"rms_norm": 2}
    assert [module._fusedops_replacement.eps for module in modules[::2]] == [1e-5, 1e-6]


def test_an_mlp_whose_activation_has_hooks_is_left() -> None:
    sizes = {"vocab_size": 32, "hidden_size": H, "intermediate_size": 24, "num_hidden_layers": 2}
    model: Any = transformers.LlamaModel(transformers.LlamaConfig(**sizes, num_attention_heads=2))
    model.layers[0].mlp.act_fn = copy.deepcopy(model.layers[0].mlp.act_fn)
    model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: CALLS.append(0))
    applied = apply(model)
    assert applied.ops["swiglu"] == 1
    assert [row.left for row in applied.rows if row.module == "LlamaMLP" and row.left] == ["its act_fn has hooks"]


def test_a_tower_with_attention_of_its_own_keeps_its_implementation() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16}
    text = {**sizes, **heads, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
    text |= {"num_kv_shared_layers": 0, "layer_types": ["full_attention"]}
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "subsampling_conv_channels": [16, 8]}
    audio |= {"output_proj_dims": 32, "attention_context_right": 0, "use_clipped_linears": False}
    config = transformers.Gemma4Config(text_config=text, audio_config=audio, vision_config=None, audio_token_id=7)
    model: Any = transformers.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    ids = torch.tensor([[2, *[7] * 8, 11, 12]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "input_features": torch.randn(1, 32, 16)}
    inputs["input_features_mask"] = torch.ones(1, 32, dtype=torch.bool)
    with torch.no_grad():
        plain = model(**inputs).logits
        applied = apply(model)
        torch.testing.assert_close(model(**inputs).logits, plain, rtol=1e-4, atol=1e-5)
    assert applied.ops["attention"] == 1
    assert [row.left for row in applied.rows if row.module == "Gemma4AudioModel" and not row.op]
    assert model.model.audio_tower.config._attn_implementation == "eager"


def test_a_model_that_always_returns_weights_keeps_eager() -> None:
    text = {"vocab_size": 64, "embed_dim": 32, "layers": 1, "ffn_dim": 48, "attention_heads": 4, "pad_token_id": 1}
    image = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    image["num_attention_heads"] = 4
    config = transformers.Kosmos2Config(text_config=text, vision_config=image, latent_query_num=3)
    model: Any = transformers.Kosmos2Model._from_config(config, attn_implementation="eager").eval()
    inputs = {"pixel_values": torch.randn(1, 3, 16, 16), "input_ids": torch.randint(5, 60, (1, 8))}
    inputs["image_embeds_position_mask"] = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 0]])
    assert "it always returns projection_attentions, which eager computes" in {row.left for row in apply(model).rows}
    assert model(**inputs).projection_attentions is not None


def test_a_class_is_freed_with_its_modules() -> None:
    class LocalNorm(TinyRMSNorm):
        pass

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return rotated(q, k, cos, sin)

    module = LocalNorm("last", nothing)
    assert apply(module).ops == {"rms_norm": 1}
    assert not isinstance(recognised_function(function, "function"), str)
    assert recognised_mixer(module) is None
    module(torch.randn(3, H)).sum().backward()
    kept = [weakref.ref(LocalNorm), weakref.ref(type(module)), weakref.ref(function)]
    del LocalNorm, module, function
    gc.collect()  # the class of the replaced module ends, and with it what held its own class
    gc.collect()
    assert [each() for each in kept] == [None, None, None]
    fusedops.reset_stats()
