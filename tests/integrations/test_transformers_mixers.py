"""apply on the layers of hybrid models: convolution and recurrence, their states, packed sequences, look-alikes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers")

from model_families import FAMILIES, counted
from transformers import DynamicCache
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next

from fusedops import FusedOpsWarning
from fusedops.integrations.transformers import Row, apply
from fusedops.integrations.transformers._mixers.recognition import Mixer, recognised_mixer

# past_key_values and cache_params, which transformers 5.24 names cache
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in version 5.40:FutureWarning")

HYBRIDS = ["Qwen3.5", "Kimi-Linear", "Bamba", "LFM2"]
IDS = torch.randint(3, 64, (1, 11), generator=torch.Generator().manual_seed(7))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def in_pieces(model: Any) -> Tensor:
    """The logits of pieces that follow each other with a cache; the first one is shorter than the convolution."""
    cache, pieces = None, []
    with torch.no_grad():
        for piece in IDS.repeat(2, 1).split([2, 4, 1, 1, 3], 1):
            result = model(piece, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            pieces.append(result.logits)
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_cache_that_is_filled_in_pieces_gives_the_same_logits(name: str) -> None:
    model = FAMILIES[name].build()
    expected = in_pieces(model)
    apply(model)
    close(in_pieces(model), expected)


def packed(*lengths: int) -> dict[str, Tensor]:
    """The arguments of one row of packed sequences, as DataCollatorWithFlattening makes them."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    index = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ids = {"input_ids": IDS[:, : sum(lengths)], "position_ids": positions}
    return {**ids, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "seq_idx": index}


@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_sequences_see_nothing_of_each_other(name: str) -> None:
    model, given = FAMILIES[name].build(), packed(6, 1, 4)
    with torch.no_grad():
        expected = torch.cat([model(part).logits for part in IDS.split([6, 1, 4], 1)], 1)
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(**given, use_cache=False)
    apply(model)
    for left_out in ({}, {"seq_idx"}, {"cu_seq_lens_q", "cu_seq_lens_k"}):
        kept = {each: value for each, value in given.items() if each not in left_out}
        logits = model(**kept, use_cache=False).logits
        close(logits, expected)
    model.zero_grad()
    logits[:, 6:].sum().backward()  # of the last two sequences
    gradients = {each: parameter.grad.clone() for each, parameter in model.named_parameters()}
    model.zero_grad()
    sum(model(part).logits.sum() for part in IDS[:, 6:].split([1, 4], 1)).backward()
    for each, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[each], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("names", [["cu_seq_lens_q"], ["seq_idx"]], ids=str)
def test_packed_sequences_shorter_than_the_convolution_fill_a_cache(names: list[str]) -> None:
    model = FAMILIES["Bamba"].build()
    layer, x = model.model.layers[0].mamba, torch.randn(1, 3, 32)
    with torch.no_grad():
        expected = torch.cat([layer(part) for part in x.split([2, 1], 1)], 1)
        apply(model)
        given = {name: packed(2, 1)[name] for name in names}
        close(layer(x, cache_params=DynamicCache(config=model.config), **given), expected)


def test_packed_sequences_in_several_rows_are_refused_as_without_apply() -> None:
    model = FAMILIES["Bamba"].build()
    apply(model)
    refused = pytest.raises(ValueError, match="can't keep packed sequences apart")
    with pytest.warns(FusedOpsWarning, match="got a call that causal_conv1d does not take"), refused:
        model(IDS.repeat(2, 1), seq_idx=torch.zeros(2, 11, dtype=torch.int32))


def test_the_step_of_one_token_calls_the_ops_and_keeps_the_state_in_place() -> None:
    model = FAMILIES["Bamba"].build()
    apply(model)
    with torch.no_grad():
        cache = model(IDS, use_cache=True).past_key_values
        states = [cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0]]
        before = [state.clone() for state in states]
        assert counted(lambda: model(IDS[:, :1], past_key_values=cache)).items() >= {
            ("causal_conv1d", 1),
            ("linear_attention", 1),
        }
    assert cache.layers[0].conv_states[0] is states[0]
    assert cache.layers[0].recurrent_states[0] is states[1]
    assert not any(torch.equal(*each) for each in zip(states, before))
    assert states[1].transpose(-1, -2).is_contiguous()  # as the op has it: no copy for a step


def test_ops_a_copy_and_a_second_call() -> None:
    model = FAMILIES["Bamba"].build()
    applied = apply(model, ops=["causal_conv1d"])
    rows = [row for row in applied.rows if row.module == "BambaMixer"]
    assert rows == [
        Row("BambaMixer", "causal_conv1d", 1),
        Row("BambaMixer", "", 1, "ops has no linear_attention"),
    ]
    assert [row for row in apply(model).rows if row.module == "BambaMixer"] == rows
    with torch.no_grad():
        copied = counted(lambda: copy.deepcopy(model)(IDS))
    assert copied["causal_conv1d"] == 1
    assert "linear_attention" not in copied
    applied.remove()
    assert not apply(model, ops=["rms_norm"]).ops.keys() - {"rms_norm"}


class Convolution(nn.Module):
    """A layer whose forward calls a function of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return convolved(x, self.weight, None, "silu")


def convolved(hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
    y = nn.functional.conv1d(nn.functional.pad(hidden_states, (2, 0)), weight[:, None, -3:], bias, groups=len(weight))
    return y if activation is None else nn.functional.silu(y)


def convolved_by_any_width(hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
    return modeling_mamba2.causal_conv1d_fn(hidden_states, weight, bias, activation)


def with_other_function(function: Callable[..., Any]) -> Any:
    """A Convolution whose file has another function."""
    own = Convolution.forward
    names = {**own.__globals__, "convolved": function}
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__)
    return type("Convolution", (Convolution,), {"forward": forward})()


LOOK_ALIKES: dict[str, Callable[..., Any]] = {
    "a convolution of width 3 alone": convolved,
    "one position later": lambda hidden_states, weight, bias=None, activation=None: modeling_mamba2.causal_conv1d_fn(
        hidden_states, weight, bias, activation
    ).roll(1, -1),
    "another activation": lambda hidden_states, weight, bias=None, activation=None: torch.relu(
        modeling_mamba2.causal_conv1d_fn(hidden_states, weight, bias)
    ),
    "it raises": lambda hidden_states, weight, bias=None, activation=None: [][0],
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_only_looks_like_it_is_left(name: str) -> None:
    layer = with_other_function(LOOK_ALIKES[name])
    rows = apply(nn.ModuleList([layer, nn.RMSNorm(4)])).rows
    reason = "the results of convolved are not those of causal_conv1d"
    assert Row("Convolution", "", 1, reason) in rows


def convolved_after(change: Any) -> Any:
    def function(hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
        return modeling_mamba2.causal_conv1d_fn(change(hidden_states), weight, bias, activation)

    return function


def attended_after(change: Any) -> Any:
    def function(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    ) -> Any:  # fmt: skip
        query, key, value, g, beta = change(query, key, value, g, beta)
        options = initial_state, output_final_state, use_qk_l2norm_in_kernel
        names = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
        rule = modeling_qwen3_next.torch_recurrent_gated_delta_rule
        return rule(query, key, value, g=g, beta=beta, **dict(zip(names, options)))

    return function


def scanned_after(change: Any) -> Any:
    def function(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **rest: Any
    ) -> Any:
        return modeling_mamba2.mamba2_chunk_scan(*change(hidden_states, dt, A), B, C, chunk_size, **rest)

    return function


def stepped_after(change: Any) -> Any:
    def function(
        state: Tensor, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **rest: Any
    ) -> Tensor:
        return modeling_mamba2.mamba2_selective_state_update(state, change(hidden_states), dt, A, B, C, **rest)

    return function


LIMITED: list[tuple[Any, Any]] = [
    (convolved_after, lambda x: x.clamp(-99, 99)),
    (convolved_after, torch.nan_to_num),
    (stepped_after, lambda x: x.clamp(-99, 99)),
    (stepped_after, torch.nan_to_num),
    (scanned_after, lambda x, dt, a: (x.clamp(-99, 99), dt, a)),
    (scanned_after, lambda x, dt, a: (x, dt.clamp(max=20), a)),
    (scanned_after, lambda x, dt, a: (x, dt, a.clamp(min=-16))),
    (attended_after, lambda q, k, v, g, beta: (q, k, v.clamp(-99, 99), g, beta)),
    (attended_after, lambda q, k, v, g, beta: (q, k, v, g.clamp(min=-5), beta)),
    (attended_after, lambda q, k, v, g, beta: (q, k, v, g, beta.clamp(max=1))),
    (attended_after, lambda q, k, v, g, beta: (q, k * (k.norm(dim=-1, keepdim=True) > 0.1), v, g, beta)),
]


@pytest.mark.parametrize(("maker", "change"), LIMITED)
def test_a_function_with_another_limit_or_eps_is_left(maker: Any, change: Any) -> None:
    same = maker(lambda *given: given if len(given) > 1 else given[0])
    assert isinstance(recognised_mixer(with_other_function(same)), Mixer)
    assert isinstance(recognised_mixer(with_other_function(maker(change))), str)


def test_a_function_that_is_the_op_is_replaced_and_other_calls_are_its_own() -> None:
    layer, x = with_other_function(convolved_by_any_width), torch.randn(2, 4, 20)
    expected = layer(x)
    assert apply(layer).ops == {"causal_conv1d": 1}
    close(layer(x), expected)
    layer.weight = nn.Parameter(torch.randn(4, 9))  # the op has no width above 8
    with pytest.warns(FusedOpsWarning, match="convolved: got a call that causal_conv1d does not take"):
        assert counted(lambda: layer(x)) == {}


def test_a_function_for_which_a_package_is_installed_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    package, name = ModuleType("causal_conv1d"), "causal_conv1d_fn"

    def of_the_package(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None) -> Tensor:
        raise RuntimeError("expected a tensor on cuda")

    setattr(package, name, of_the_package)
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    layer = with_other_function(use_kernel_func_from_hub_with_fallback(name, "causal_conv1d")(convolved_by_any_width))
    x = torch.randn(2, 4, 5)
    with pytest.raises(RuntimeError, match="on cuda"):
        layer(x)
    assert apply(layer).ops == {"causal_conv1d": 1}
    close(layer(x), convolved_by_any_width(x, layer.weight, None, "silu"))


def test_a_function_that_kernels_replaces_is_left(monkeypatch: pytest.MonkeyPatch) -> None:

    function = modeling_qwen3_next.causal_conv1d_fn
    if not isinstance(function, nn.Module):
        pytest.skip("needs the package kernels")
    layer = with_other_function(function)
    assert not isinstance(recognised_mixer(layer), str)
    left = "the results of convolved are not those of causal_conv1d"
    hook = function.register_forward_pre_hook(lambda *_: None)  # after it was recognised
    assert recognised_mixer(layer) == left
    hook.remove()
    monkeypatch.setitem(function.__dict__, "forward", lambda *args, **kwargs: None)
    assert recognised_mixer(layer) == left
