"""The patch of Megatron's functions: what each computes, what is left, and the way back."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import megatron_layers as layers
import pytest
import torch
from megatron_cases import tensor, with_gradients
from megatron_layers import assert_near, block, computed, config, hidden, local_spec
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

import fusedops
from fusedops import FusedOpsWarning

pytestmark = [*layers.OWN_WARNINGS, pytest.mark.usefixtures("patch_removed")]


def patch(**options: Any) -> Any:
    from fusedops.integrations import megatron

    return megatron.patch(**options)


def megatron(name: str) -> Any:
    """Return what a module of megatron.core holds now."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"megatron.core.{module}"), attribute)


SWIGLU = "fusions.fused_bias_swiglu.bias_swiglu_impl"
GEGLU = "fusions.fused_bias_geglu.bias_geglu_impl"
GELU = "fusions.fused_bias_gelu.bias_gelu_impl"
ROPE = "models.common.embeddings.rope_utils.apply_rotary_pos_emb"
LOSS = "tensor_parallel.cross_entropy.vocab_parallel_cross_entropy"
FUSED_LOSS = "fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy"
H, BIAS = tensor(32, 4, 64), tensor(64, seed=1)


def held() -> dict[tuple[str, str], int]:
    """Return the identity of every value that modules of Megatron hold."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if name.startswith("megatron")]
    return {(name, key): id(value) for name, module in modules for key, value in list(vars(module).items())}


def test_remove_restores_every_module_exactly() -> None:
    patch().remove()  # imports what is imported late
    before = held()
    patched = patch()
    changed = {key for key, value in held().items() if before[key] != value}
    assert len(changed) == sum(patched.ops.values())
    patched.remove()
    assert held() == before
    patched.remove()
    assert held() == before


def test_a_second_call_changes_nothing_more() -> None:
    first = patch()
    during = held()
    second = patch()
    assert held() == during
    assert second.rows == first.rows
    second.remove()
    assert first.ops == second.ops
    assert importlib.import_module("megatron.core.transformer.mlp").bias_swiglu_impl.__module__.startswith("megatron")
    assert not hasattr(megatron(SWIGLU), "__wrapped__")


def test_a_module_that_is_imported_later_is_restored_too() -> None:
    own = megatron(SWIGLU)
    patched = patch()
    later = types.ModuleType("imported_later")
    later.mine = megatron(SWIGLU)  # from ... import bias_swiglu_impl as mine
    sys.modules[later.__name__] = later
    try:
        assert later.mine is not own
        patched.remove()
        assert later.mine is own
    finally:
        del sys.modules[later.__name__]


def test_the_drop_ins_stay_what_they_are() -> None:
    from fusedops.compat import megatron as dropins

    before = dict(vars(dropins))
    patched = patch()
    assert issubclass(megatron("fusions.fused_softmax.FusedScaleMaskSoftmax"), dropins.FusedScaleMaskSoftmax)
    patched.remove()
    assert {name: value for name, value in vars(dropins).items() if before[name] is not value} == {}


def test_some_ops_alone() -> None:
    patched = patch(ops=["swiglu"])
    assert {row.op for row in patched.rows if row.op} == {"swiglu"}
    assert {row.left for row in patched.rows if row.module == "bias_geglu_impl"} == {"ops has no geglu"}
    assert set(patch(ops=["geglu"]).ops) == {"swiglu", "geglu"}


def test_what_another_library_replaced_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(input: Tensor, bias: Tensor | None) -> Tensor:
        return input

    monkeypatch.setattr("megatron.core.fusions.fused_bias_geglu.bias_geglu_impl", theirs)
    patched = patch()
    assert megatron(GEGLU) is theirs
    (row,) = [row for row in patched.rows if row.module == "bias_geglu_impl"]
    assert (row.op, row.left) == ("", f"{__name__} has replaced it")


def test_the_table() -> None:
    text = str(patch())
    assert text.startswith("fusedops in megatron-core ")
    assert "  function  " in text
    assert "which the op does not take" in text
    assert "<caption>fusedops in megatron-core" in patch()._repr_html_()


# ------------------------------------------------------------------------------------------------------- the functions

CALLS: dict[str, tuple[str, str, Callable[..., Any], tuple[Tensor, ...]]] = {
    "swiglu": ("swiglu", SWIGLU, lambda f, x, b: f(x, b), (H, BIAS)),
    "swiglu without a bias": ("swiglu", SWIGLU, lambda f, x: f(x, None), (H,)),
    "geglu": ("geglu", GEGLU, lambda f, x, b: f(x, b), (H, BIAS)),
    "geglu without a bias": ("geglu", GEGLU, lambda f, x: f(x, None), (H[0],)),
    "gelu": ("bias_gelu", GELU, lambda f, x, b: f(x, b), (H, BIAS)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_equals_megatrons_own(name: str, dtype: torch.dtype) -> None:
    op, place, call, tensors = CALLS[name]
    inputs = [each.to(dtype) for each in tensors]
    want = with_gradients(lambda *given: call(megatron(place), *given), *inputs)
    patch(ops=[op])  # which looks through all modules for each op
    fusedops.reset_stats()
    got = with_gradients(lambda *given: call(megatron(place), *given), *inputs)
    assert {count.op for count in fusedops.stats().counts} == {op}
    assert [each.dtype for each in got if each is not None] == [each.dtype for each in want if each is not None]
    if dtype is torch.float32:
        assert_close(got, want, atol=5e-5, rtol=5e-6)  # of sums of 128 numbers
        return
    # Megatron rounds after each step, also in the sums of the bias's gradient
    wide = with_gradients(lambda *given: call(megatron(place), *given), *(each.float() for each in inputs))
    for mine, theirs, exact in zip(got, want, wide):
        assert mine is not None
        assert theirs is not None
        assert exact is not None
        assert float((mine - exact).norm()) <= 1.1 * float((theirs - exact).norm())


@pytest.mark.parametrize("setting", ["fp8_input_store", "cpu_offload_input"])
def test_a_store_of_inputs_is_megatrons_own(setting: str) -> None:
    want = megatron(SWIGLU)(H, BIAS.clone(), **{setting: True})
    patch(ops=["swiglu"])
    with pytest.warns(FusedOpsWarning, match=f"bias_swiglu_impl: got {setting} = True, expected False"):
        assert torch.equal(megatron(SWIGLU)(H, BIAS.clone(), **{setting: True}), want)


def angles(s: int, r: int, interleaved: bool, b: int = 1) -> Tensor:
    once = tensor(s, b, 1, r // 2, seed=5)
    return once.repeat_interleave(2, -1) if interleaved else torch.cat((once, once), -1)


@pytest.mark.parametrize(
    ("interleaved", "r", "b", "mscale"),  # each pair of values
    [
        (False, 8, 1, 1.0),
        (False, 4, 3, 0.7),
        (True, 8, 3, 0.7),
        (True, 4, 1, 1.0),
        (False, 8, 3, 1.0),
        (True, 4, 1, 0.7),
    ],
)
def test_rope_equals_megatrons_own(interleaved: bool, r: int, b: int, mscale: float) -> None:
    t, freqs, chosen = tensor(5, 3, 4, 8), angles(5, r, interleaved, b), config(rotary_interleaved=interleaved)
    group = torch.distributed.group.WORLD

    def call(t: Tensor) -> Tensor:
        return megatron(ROPE)(t, freqs, chosen, mscale=mscale, cp_group=group)

    want = with_gradients(call, t)
    patch(ops=["rotary_embedding"])
    fusedops.reset_stats()
    got = with_gradients(call, t)
    assert {count.op for count in fusedops.stats().counts} == {"rotary_embedding"}
    assert got[0] is not None
    assert got[0].is_contiguous()  # Megatron's attention views it
    assert_close(got, want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("mla", "pairs that are moved to halves"),
        ("packed", r"packed sequences \(cu_seqlens\)"),
        ("two angles", "two angles for the elements of a pair"),
        ("rank", r"t \[5, 1, 3, 4, 8\] and freqs"),
        ("grad", "freqs that require grad"),
    ],
)
def test_a_rope_that_is_not_served_is_megatrons_own(case: str, text: str) -> None:
    chosen = config()
    chosen.multi_latent_attention = case == "mla"
    t, freqs, seqlens = tensor(5, 3, 4, 8), angles(5, 8, False), None
    if case == "packed":
        t, seqlens = tensor(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    if case == "two angles":
        freqs = tensor(5, 1, 1, 8)
    if case == "rank":
        t = tensor(5, 1, 3, 4, 8)
        freqs = angles(5, 8, False)[:, None]
    if case == "grad":
        freqs.requires_grad_()
    options: dict[str, Any] = {"cu_seqlens": seqlens, "cp_group": torch.distributed.group.WORLD}
    if case == "mla" and layers.megatron_peer.modules().version >= (0, 17):
        options["mla_rotary_interleaved"] = True
    want = megatron(ROPE)(t, freqs, chosen, **options)
    patch(ops=["rotary_embedding"])
    with pytest.warns(FusedOpsWarning, match=f"apply_rotary_pos_emb: got {text}"):
        assert torch.equal(megatron(ROPE)(t, freqs, chosen, **options), want)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_equals_megatrons_own(smoothing: float) -> None:
    logits, target = tensor(5, 3, 16), torch.arange(15).view(5, 3)

    def call(logits: Tensor) -> Tensor:
        return megatron(LOSS)(logits * 1.0, target, smoothing)  # Megatron writes into the logits

    want = with_gradients(call, logits)
    patch(ops=["cross_entropy"])
    fusedops.reset_stats()
    assert_close(with_gradients(call, logits), want, atol=2e-6, rtol=2e-6)
    assert {count.op for count in fusedops.stats().counts} == {"cross_entropy"}
    megatron(LOSS)(given := logits.clone(), target, smoothing)
    assert torch.equal(given, logits)


def test_the_fused_loss_equals_megatrons_own() -> None:
    logits, target, group = tensor(5, 3, 16), torch.arange(15).view(5, 3), torch.distributed.group.WORLD

    def call(logits: Tensor) -> Tensor:
        return megatron(FUSED_LOSS)(logits * 1.0, target, group)

    with torch.compiler.set_stance("force_eager"):
        want = with_gradients(call, logits)
    patch(ops=["cross_entropy"])
    got = with_gradients(call, logits)
    assert_close(got[0], want[0], atol=2e-6, rtol=2e-6)
    # Megatron rounds the gradient to bfloat16, whatever the logits
    assert_close(got[1], want[1], atol=4e-3, rtol=8e-3)


def test_a_target_that_is_no_class_has_no_loss() -> None:
    patch(ops=["cross_entropy"])
    logits = tensor(4, 16).requires_grad_()
    loss = megatron(LOSS)(logits, torch.tensor([1, -100, 16, 3]))
    loss.sum().backward()
    assert loss.detach()[1:3].tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert not logits.grad[1:3].any()
    assert logits.grad[[0, 3]].any()


# --------------------------------------------------------------------------------------------------------- whole models

LLAMA = {"normalization": "RMSNorm", "activation_func": functional.silu, "gated_linear_unit": True}
LLAMA |= {"add_bias_linear": False, "bias_activation_fusion": True, "num_query_groups": 2}


def gpt(config: Any, spec: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    sizes = {"vocab_size": 64, "max_sequence_length": 16, "position_embedding_type": "rope"}
    return layers.randomized(GPTModel(config=config, transformer_layer_spec=spec, **sizes))


def losses(model: Any) -> dict[str, Tensor]:
    ids = torch.arange(24).view(2, 12)
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(ids, torch.arange(12).expand(2, 12), None, labels=ids + 1)
    loss.mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **{name: gradient for name, gradient in gradients.items() if gradient is not None}}


def test_a_model_with_spec_and_patch_equals_megatrons_own() -> None:
    from fusedops.integrations.megatron import get_gpt_block_spec

    chosen = config(**LLAMA)
    want = losses(gpt(chosen, local_spec(chosen)))
    patched = patch()
    fusedops.reset_stats()
    got = losses(gpt(chosen, get_gpt_block_spec(chosen)))
    assert {count.op for count in fusedops.stats().counts} == {
        "rms_norm", "attention", "swiglu", "rotary_embedding", "cross_entropy", "bias_dropout_add",
    }  # fmt: skip
    assert_near(got, want)
    patched.remove()
    again = losses(gpt(chosen, local_spec(chosen)))
    assert all(torch.equal(again[name], want[name]) for name in want)


def test_a_model_of_the_local_spec_with_the_patch() -> None:
    chosen = config(**LLAMA)
    want = losses(gpt(chosen, local_spec(chosen)))
    patch()
    model = gpt(chosen, local_spec(chosen))
    fusedops.reset_stats()
    assert_near(losses(model), want)
    assert {count.op for count in fusedops.stats().counts} >= {"scaled_masked_softmax", "swiglu", "rotary_embedding"}


@pytest.mark.filterwarnings("ignore:fusedops.integrations.megatron. get_gpt_layer_spec:fusedops.FusedOpsWarning")
def test_layers_with_experts_equal_megatrons_own() -> None:
    """The experts are Megatron's own, the shared experts' activation is that of the patch."""
    if layers.megatron_peer.modules().version < (0, 17):
        pytest.skip("needs megatron-core 0.17 or later: the router of 0.16 runs with Transformer Engine alone")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from fusedops.integrations.megatron import get_gpt_block_spec

    experts = {"num_moe_experts": 2, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 32}
    chosen = config(**LLAMA, **experts, moe_layer_freq=[1, 0])
    own = get_gpt_decoder_block_spec(chosen, use_transformer_engine=False, normalization="RMSNorm")
    want = computed(block(chosen, own), hidden(), None)
    patch()
    fusedops.reset_stats()
    assert_near(computed(block(chosen, get_gpt_block_spec(chosen)), hidden(), None), want)
    calls = {(count.op, count.direction): count.calls for count in fusedops.stats().counts}
    assert calls["swiglu", "forward"] == 2  # of the dense layer and of the shared experts


def test_layers_are_traced_whole_by_torch_compile() -> None:
    patch()
    chosen = config(**LLAMA)
    freqs = angles(5, 8, False)

    def step(t: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        group = torch.distributed.group.WORLD
        return megatron_rope(t, freqs, chosen, cp_group=group), megatron_swiglu(h, None)

    megatron_rope, megatron_swiglu = megatron(ROPE), megatron(SWIGLU)
    t = tensor(5, 3, 4, 8)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert_close(compiled(t, H), step(t, H))
