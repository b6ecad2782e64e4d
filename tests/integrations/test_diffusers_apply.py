"""apply for models of diffusers: what is left, other libraries, copies, and the way back."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import Counter
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from diffusion_families import FAMILIES
from torch import nn

import fusedops
from fusedops.integrations.diffusers import apply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
FLUX, PIXART, UNET = FAMILIES["Flux"], FAMILIES["PixArt"], FAMILIES["Stable Diffusion's UNet"]


def calls(model: nn.Module, inputs: dict[str, Any]) -> Counter[str]:
    """The calls of each op in a forward."""
    fusedops.reset_stats()
    with torch.no_grad():
        model(**inputs)
    counts = Counter[str]()
    for row in fusedops.stats().counts:
        counts[row.op] += row.calls
    return counts


def sample(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).sample


def test_the_table_names_the_blocks_and_the_processors() -> None:
    model = FLUX.build()
    rows = {(row.module, row.op): row.count for row in apply(model).rows if row.op}
    assert rows["FluxAttnProcessor", "attention"] == rows["FluxAttnProcessor", "rotary_embedding"] == 2
    assert rows["FluxTransformerBlock", "gated_add_modulated_norm"] == 1
    assert rows["AdaLayerNormZero", "modulated_norm"] == 2
    assert calls(model, FLUX.inputs())["gated_add_modulated_norm"] == 2


def test_ops_limits_what_is_used() -> None:
    model = FLUX.build()
    assert apply(model, ops=["attention"]).ops == {"attention": 2}
    assert set(calls(model, FLUX.inputs())) == {"attention"}
    with pytest.raises(fusedops.InvalidInputError, match="attenton"):
        apply(model, ops=["attenton"])


def test_a_second_call_changes_nothing_more() -> None:
    model = FLUX.build()
    first = apply(model)
    classes = [type(each) for each in model.modules()]
    assert apply(model).ops == first.ops
    assert [type(each) for each in model.modules()] == classes
    first.remove()
    assert not any("fusedops" in name for each in model.modules() for name in vars(each))


def test_a_copy_and_a_pickled_model_are_applied_too() -> None:
    model = FLUX.build()
    plain = sample(model, FLUX.inputs())
    applied = apply(model)
    counts, result = calls(model, FLUX.inputs()), sample(model, FLUX.inputs())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert calls(other, FLUX.inputs()) == counts
        assert torch.equal(sample(other, FLUX.inputs()), result)
    applied.remove()
    assert torch.equal(sample(model, FLUX.inputs()), plain)


def test_a_mask_is_kept() -> None:
    q = torch.randn(1, 5, 2, 8)
    mask = torch.tensor([[True, True, False, True, False]])
    module = nn.Module()
    module.processor = diffusers.models.transformers.transformer_flux.FluxAttnProcessor()
    dispatch = inspect.getmodule(type(module.processor)).dispatch_attention_fn
    from fusedops.integrations.diffusers._served.attention import attention

    fusedops.reset_stats()
    for each in (mask, mask[:, None, None], mask[:, None, None].expand(1, 2, 5, 5)):
        torch.testing.assert_close(attention(dispatch, q, q, q, attn_mask=each), dispatch(q, q, q, attn_mask=each))
    assert sum(row.calls for row in fusedops.stats().counts) == 3
    fusedops.reset_stats()
    bias = torch.randn(1, 1, 5, 5)  # numbers that are added are no mask: the call is torch's
    assert torch.equal(attention(dispatch, q, q, q, attn_mask=bias), dispatch(q, q, q, attn_mask=bias))
    with attention_backend("_native_math"):
        assert torch.equal(attention(dispatch, q, q, q), dispatch(q, q, q))
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(dispatch, q, q, q).dtype is dispatch(q, q, q).dtype
    assert not fusedops.stats().counts


def test_padded_text_does_not_matter() -> None:
    model, inputs = PIXART.build(), PIXART.inputs()
    apply(model)
    result = sample(model, inputs)
    inputs["encoder_hidden_states"][1, 4:] = 7.0  # behind the mask
    assert torch.equal(sample(model, inputs), result)


def test_hooks_of_a_norm_and_of_the_layer_before_gelu_are_called() -> None:
    model, seen = FLUX.build(), list[int]()
    apply(model)
    block = model.transformer_blocks[0]
    for number, module in enumerate((block.norm2, block.ff.net[0].proj)):
        module.register_forward_hook(lambda *_, number=number: seen.append(number))
    sample(model, FLUX.inputs())
    assert seen == [0, 1]


def test_the_bias_before_gelu_is_added_before_the_product_is_rounded_to_16_bits() -> None:
    model = nn.Sequential(diffusers.models.activations.GELU(64, 64)).bfloat16()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        model[0].proj.weight *= 1000
        model[0].proj.bias.copy_(-nn.functional.linear(x[0], model[0].proj.weight))  # what is left is below a rounding
        expected = model(x)[0]
        apply(model)
        torch.testing.assert_close(model(x)[0], expected, rtol=0.02, atol=1e-3)


def test_a_forward_of_the_instance_is_left() -> None:
    model = FLUX.build()
    block = model.transformer_blocks[0]
    block.forward = block.forward
    assert not any(row.module == "FluxTransformerBlock" and row.op for row in apply(model).rows)


def test_the_signature_of_a_forward_stays() -> None:
    model = UNET.build()
    before = {name: inspect.signature(each.forward) for name, each in model.named_modules()}
    processors = {name: inspect.signature(each.__call__) for name, each in model.attn_processors.items()}
    apply(model)
    assert {name: inspect.signature(each.__call__) for name, each in model.attn_processors.items()} == processors
    changed = {name for name, each in model.named_modules() if inspect.signature(each.forward) != before[name]}
    kinds = {type(model.get_submodule(name)).__name__ for name in changed}
    assert not kinds & {"ResnetBlock2D", "UNet2DConditionModel"}


def test_a_model_gets_its_default_processors() -> None:
    model = UNET.build()
    apply(model)
    model.set_default_attn_processor()  # which compares the classes of processors with a list
    sample(model, UNET.inputs())


def test_training_with_dropout_draws_the_same() -> None:
    config = {**PIXART.config, "dropout": 0.5}
    torch.manual_seed(0)
    model = diffusers.PixArtTransformer2DModel(**config).train()

    def drawn() -> torch.Tensor:
        torch.manual_seed(3)
        return sample(model, PIXART.inputs())

    plain = drawn()
    apply(model)
    torch.testing.assert_close(drawn(), plain, rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_has_the_same_gradients() -> None:
    model = FLUX.build().train()
    apply(model)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**FLUX.inputs()).sample.square().sum().backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    plain = gradients()
    model.enable_gradient_checkpointing()
    assert all(map(torch.equal, gradients(), plain))


def test_half_precision_is_as_near_as_plain() -> None:
    model, wide = FLUX.build().bfloat16(), FLUX.build()
    wide.load_state_dict(model.state_dict())
    inputs = {name: each.bfloat16() if each.is_floating_point() else each for name, each in FLUX.inputs().items()}
    exact = sample(wide, {name: each.float() if each.is_floating_point() else each for name, each in inputs.items()})
    plain = (sample(model, inputs).float() - exact).abs().max()
    applied = apply(model)
    assert applied.ops["modulated_norm"] == 4
    assert calls(model, inputs)["modulated_norm"] > 0
    assert (sample(model, inputs).float() - exact).abs().max() <= 1.5 * plain + 2**-7 * exact.abs().max()


def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(fusedops.InvalidInputError, match="expected a model or a pipeline of diffusers"):
        apply("flux")


def test_a_pipeline_has_its_models_applied() -> None:
    model = FAMILIES["UNet"].build()
    pipeline = diffusers.DDPMPipeline(model, diffusers.DDPMScheduler(num_train_timesteps=4))
    applied = apply(pipeline)
    assert applied.ops["group_norm"] > 0
    applied.remove()
    assert type(model) is diffusers.UNet2DModel
