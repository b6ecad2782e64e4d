"""torch.export of models of transformers with fusedops, of any batch and any length, and export to ONNX."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from model_families import FAMILIES, VOCABULARY, Family
from torch import Tensor, nn

from fusedops.errors import FusedOpsWarning
from fusedops.integrations import _recomputed
from fusedops.integrations.transformers import apply

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# Llama's modules are Mistral's without a window, and Qwen3's those of Qwen3-MoE and of Mistral
SLOW = ("Mistral", "Qwen3-MoE", "Gemma 2", "GPT-2", "ModernBERT", "ViT", "T5", "BART", "Whisper")
WITH_GRADIENTS = ("BERT", "Qwen3-MoE", "T5")
EACH = [
    ("BERT", False),
    *(pytest.param(name, False, marks=pytest.mark.slow) for name in SLOW),
    *(pytest.param(name, True, marks=pytest.mark.slow) for name in WITH_GRADIENTS),
]
SIZES = ((2, 3, 2), (3, 21, 12), (5, 60, 31))  # the batch, the length, the length of what is generated


@pytest.fixture(autouse=True)
def sizes_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sizes of these tests on both sides of the number that a call's size is compared with."""
    monkeypatch.setattr(_recomputed, "LEAST", 20_000)


class Result(nn.Module):
    """A model whose inputs are in order, without a cache."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.model, self.names = family.build(), list(family.inputs())

    def forward(self, *inputs: Tensor) -> Tensor:
        values = self.model(**dict(zip(self.names, inputs)), return_dict=True)
        return values.logits if "logits" in values else values.last_hidden_state


def is_tokens(each: Tensor) -> bool:
    return each.dim() == 2 and not each.is_floating_point()


def inputs_of(family: Family, batch: int, length: int, generated: int) -> tuple[Tensor, ...]:
    """Return random inputs, none of them padding."""
    results: list[Tensor] = []
    for name, each in family.inputs().items():
        shape = (
            (batch, generated if name.startswith("decoder") else length)
            if is_tokens(each)
            else (batch, *each.shape[1:])
        )
        random = torch.randint(3, VOCABULARY, shape) if is_tokens(each) else torch.randn(shape)
        results.append(torch.ones_like(random) if "mask" in name else random)
    return tuple(results)


def exported(module: Result, family: Family, strict: bool = False) -> Any:
    """Return the program of a module for every batch and every length."""
    batch, length, generated = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "length", "generated"))
    dynamic = tuple(
        {0: batch, 1: generated if name.startswith("decoder") else length} if is_tokens(each) else {0: batch}
        for name, each in family.inputs().items()
    )
    inputs = tuple(family.inputs().values())
    return torch.export.export(module, inputs, dynamic_shapes={"inputs": dynamic}, strict=strict)


@pytest.mark.parametrize(("name", "gradients"), EACH)
def test_one_program_serves_every_size(name: str, gradients: bool) -> None:
    module = Result(FAMILIES[name])
    module.model.config.use_cache = False
    inputs = [inputs_of(FAMILIES[name], *sizes) for sizes in SIZES]
    with torch.set_grad_enabled(gradients):
        expected = [module(*each).detach() for each in inputs]
        apply(module)
        program = exported(module, FAMILIES[name]).module()
        assert any("fusedops" in str(node.target) for node in program.graph.nodes)
        for each, result in zip(inputs, expected):
            torch.testing.assert_close(program(*each).detach(), result, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects:UserWarning")  # of transformers
def test_by_dynamo_too() -> None:
    module, inputs = Result(FAMILIES["BERT"]), inputs_of(FAMILIES["BERT"], *SIZES[-1])
    expected = module(*inputs)
    apply(module)
    program = exported(module, FAMILIES["BERT"], strict=True)
    torch.testing.assert_close(program.module()(*inputs), expected, rtol=1e-4, atol=2e-5)


TO_ONNX = [
    pytest.param(False, ("UnsupportedOperatorError", "fusedops::layer_norm"), id="torchscript"),
    pytest.param(True, ("ConversionError", "fusedops.layer_norm"), id="dynamo", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("dynamo", "error"), TO_ONNX)
def test_an_export_to_onnx_names_the_way_out(dynamo: bool, error: tuple[str, str], tmp_path: Any) -> None:
    """Where torch fails for want of a translation of an op."""
    if dynamo:
        pytest.importorskip("onnxscript", reason="torch.onnx.export needs onnxscript")
    model, inputs = nn.Sequential(nn.LayerNorm(64)).eval(), (torch.randn(3, 64),)
    applied = apply(model)

    def export() -> None:
        torch.onnx.export(model, inputs, str(tmp_path / "model.onnx"), dynamo=dynamo, verbose=False)

    way_out = r"layer_norm: got a call in torch\.onnx\.export, .* to fix: call applied\.remove\(\) first"
    with pytest.warns(FusedOpsWarning, match=way_out), pytest.raises(Exception, match=error[1]) as raised:
        export()
    assert raised.type.__name__ == error[0]
    if find_spec("onnx") is not None:
        applied.remove()
        export()
