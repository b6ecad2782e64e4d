"""from_packed: checkpoints of the Hub with packed weights, by the packages of their formats."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_checkpoints import KINDS, share_of_a_load, write_packed

from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers import apply, from_packed, quantize
from fusedops.nn import QuantizedLinear

for package in ("bitsandbytes", "compressed_tensors"):
    pytest.importorskip(package)
IDS = torch.arange(3, 25).view(2, 11)
FORMATS = {
    "fp8": "FP8_BLOCK",
    "fp8 tensors": "FP8_TENSOR",
    "fbgemm_fp8": "FP8_ROW",
    "float-quantized": "FP8_ROW",
    "nvfp4-pack-quantized": "NVFP4",
    "mxfp4-pack-quantized": "MXFP4",
    "bitsandbytes": "NF4",
    "bitsandbytes, nested": "NF4",
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_the_unpacked_weights(tmp_path: Path, kind: str) -> None:
    plain = write_packed(tmp_path, kind, attention_bias=kind == "fp8")
    model = from_packed(tmp_path)
    layers = [each for each in model.modules() if type(each) is QuantizedLinear]
    assert len(layers) == 14
    assert {each.format for each in layers} == {FORMATS.get(kind, "INT4_GROUP")}
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)


def test_the_parts_of_a_model_are_as_after_quantize(tmp_path: Path) -> None:
    plain = write_packed(tmp_path, "gptq", biases)
    with torch.device("meta"):
        model = from_packed(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    assert model.model.norm.weight.dtype is model.lm_head.weight.dtype is torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")
    assert (model.model.layers[0].self_attn.q_proj.bias == 0.5).all()
    assert model.model.layers[0].self_attn.k_proj.bias is None
    with pytest.raises(InvalidInputError, match="save_pretrained: got a model with packed weights"):
        model.save_pretrained(tmp_path / "again")
    model.float()
    assert apply(model).ops["rms_norm"] == 5
    want = logits(model)
    quantize(model, skip=["*"]).remove()
    assert {type(each) for each in model.modules()}.isdisjoint({QuantizedLinear})
    assert not [name for name in model.state_dict() if "packed" in name]
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    weight = model.model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(weight, plain.model.layers[0].mlp.up_proj.weight)


def biases(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] += 0.5


def test_another_class_has_its_part_of_a_checkpoint_and_gives_gradients(tmp_path: Path) -> None:
    transformers: Any = importlib.import_module("transformers")
    plain = write_packed(tmp_path, "nvfp4-pack-quantized").model
    model = from_packed(tmp_path, auto_class=transformers.AutoModel)
    assert isinstance(model.layers[1].mlp.up_proj, QuantizedLinear)
    x = torch.randn(1, 5, 192, generator=torch.Generator().manual_seed(1)).requires_grad_()
    (got,), (want,) = (
        torch.autograd.grad(each(inputs_embeds=x).last_hidden_state.square().sum(), x) for each in (model, plain)
    )
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "gptq", "bitsandbytes, nested"])
def test_the_most_memory_of_a_load_is_near_that_of_the_file(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 6, "num_hidden_layers": 4}
    write_packed(tmp_path / "small", kind), write_packed(tmp_path, kind, **sizes)
    assert 0.9 < share_of_a_load(tmp_path) < 1.6
