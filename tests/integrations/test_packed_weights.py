"""The weight of a packed layer: those who read it get the unpacked one, those who write it, or load it, an error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_files import llama
from model_families import FAMILIES, Family
from model_family import result
from torch import Tensor, nn
from torch.nn.utils import prune

import fusedops.nn._packed_weight
from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers import apply, quantize
from fusedops.quantization import FORMATS

IDS = torch.arange(3, 25).view(2, 11)
X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
JAMBA = {"mamba_dt_rank": 32, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
MOBILEBERT = {"hidden_size": 64, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32}
# they read the weights of their layers: its dtype, or its numbers
READERS = ("T5", "T5 v1.1", "Switch", "Mamba", "RecurrentGemma", "NLLB-MoE")
EACH = [pytest.param(family, marks=[pytest.mark.slow] * (name not in READERS)) for name, family in FAMILIES.items()]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def packed_llama(format: str = "Q8_0") -> Any:
    model = llama(True)
    quantize(model, format=format)
    return model


class Reader(nn.Module):
    """A model that reads a dtype and numbers of packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(64, 32), nn.Linear(32, 64)
        quantize(self)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids).to(self.linear.weight.dtype)
        return self.linear(h) + h @ self.embedding.weight.t() + nn.functional.linear(h, self.linear.weight)


@pytest.mark.parametrize("family", EACH, ids=FAMILIES)
def test_a_family_gives_the_logits_of_the_unpacked_weights(family: Family) -> None:
    model = family.build().eval()
    packed = quantize(model)
    with torch.no_grad():
        got = result(model, family)
        apply(model)
        applied = result(model, family)
        packed.remove()
        want = result(model, family)
    size = float(want.abs().max())
    assert (got - want).abs().max() <= 1e-5 * size
    assert (applied - want).abs().max() <= 1e-5 * size


@pytest.mark.parametrize(
    ("make", "read", "call"),
    [
        (lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, time_step_rank=32)), "dt_proj", None),
        (lambda: transformers.JambaForCausalLM(transformers.JambaConfig(**SIZES, **JAMBA)), "dt_proj", None),
        (
            lambda: transformers.MobileBertForMaskedLM(transformers.MobileBertConfig(**{**SIZES, **MOBILEBERT})),
            "predictions.dense",
            None,
        ),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
            "linear1",
            lambda model: model(X),
        ),
        (lambda: nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), "linear2", lambda model: model(X, X)),
        (
            lambda: nn.ModuleList([nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 32)]),
            "1",
            lambda model: model[1](model[0](X, X, X)[0]),
        ),
    ],
)
def test_a_model_that_reads_the_numbers(make: Callable[[], Any], read: str, call: Any) -> None:
    torch.manual_seed(0)
    model = make().eval()
    packed = quantize(model)
    assert any(read in name and isinstance(each, fusedops.nn.QuantizedLinear) for name, each in model.named_modules())
    compute = call or logits
    with torch.no_grad():
        got = compute(model)
        packed.remove()
        want = compute(model)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_follows_a_trace_reads_the_numbers(compiled: bool, fresh_compiler: None) -> None:
    model, ids = Reader().eval(), IDS[:, :7].contiguous()
    if compiled:
        traced: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.raises(IndexError, match="out of range"):
            torch.compile(model.embedding, backend="aot_eager")(torch.tensor([3, -1]))
    else:
        length = torch.export.Dim.DYNAMIC
        traced = torch.export.export(model, (ids,), dynamic_shapes=({1: length},)).module()
    torch.testing.assert_close(traced(IDS), model(IDS), rtol=1e-5, atol=1e-5)


def test_shape_dtype_and_device_need_no_unpack(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fusedops.nn.QuantizedLinear.of(nn.Linear(64, 3), "Q4_0")
    with monkeypatch.context() as patch:
        patch.setattr(fusedops.nn._packed_weight, "dequantize", None)
        weight = layer.weight
        assert (weight.shape, weight.dtype, weight.device) == ((3, 64), torch.float32, layer.packed.device)
        assert (weight.dim(), weight.numel(), weight.stride(), weight.is_floating_point()) == (2, 192, (64, 1), True)
        assert not weight.requires_grad
        assert weight.requires_grad_(False) is weight
    assert layer.bfloat16().weight.dtype is layer.weight.clone().dtype is torch.bfloat16
    meta = layer.to("meta").weight
    assert (meta.shape, meta.dtype, meta.is_meta) == ((3, 64), torch.bfloat16, True)


def test_numbers_and_gradients_are_those_of_the_unpacked_weight() -> None:
    layer = fusedops.nn.QuantizedLinear.of(nn.Linear(32, 5), "Q8_0")
    want = layer.dequantize()
    for read in (torch.cat, torch.stack):
        assert torch.equal(read([layer.weight, layer.weight]), read([want, want]))
    assert torch.equal(layer.weight.detach().T[3:], want.T[3:])
    assert torch.equal(torch.tensor(layer.weight.cpu().numpy()), want)
    assert torch.equal(copy.deepcopy(layer.weight), want)
    assert torch.equal(pickle.loads(pickle.dumps(layer.weight)), want)
    x = X.clone().requires_grad_()
    (got,) = torch.autograd.grad(nn.functional.linear(x, layer.weight, layer.bias).sum(), x)
    torch.testing.assert_close(got, want.sum(0).expand_as(X))
    torch.testing.assert_close(torch.func.grad(lambda x: (x @ layer.weight.t()).sum())(X), got)


def below_functions(weight: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        weight.mul_(2)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "in place": lambda layer, weight: weight.add_(1),
    "an overload": lambda layer, weight: torch.ops.aten.mul_.Scalar(weight, 2),
    "below torch's functions": lambda layer, weight: below_functions(weight),
    "an operator": lambda layer, weight: weight.__imul__(2),
    "an index": lambda layer, weight: weight.__setitem__(0, 0),
    "of its data": lambda layer, weight: weight.data.zero_(),
    "its data": lambda layer, weight: setattr(weight, "data", torch.ones(5, 32)),
    "a function": lambda layer, weight: nn.init.normal_(weight),
    "out": lambda layer, weight: torch.ones(5, 32, out=weight),
    "several": lambda layer, weight: torch._foreach_add_([weight], 1),
    "a gradient": lambda layer, weight: weight.requires_grad_(),
    "a gradient as an attribute": lambda layer, weight: setattr(weight, "requires_grad", True),
    "a parameter": lambda layer, weight: setattr(layer, "weight", nn.Parameter(torch.ones(5, 32))),
    "a tensor": lambda layer, weight: setattr(layer, "weight", torch.ones(5, 32)),
    "the weight of another size": lambda layer, weight: setattr(
        layer, "weight", fusedops.nn.QuantizedLinear(32, 6, format="Q8_0").weight
    ),
    "the weight of another format": lambda layer, weight: setattr(
        layer, "weight", fusedops.nn.QuantizedLinear(32, 5, format="Q4_0").weight
    ),
    "a new start": lambda layer, weight: layer.reset_parameters(),
    "pruning": lambda layer, weight: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_refused(write: Callable[[Any, Any], Any]) -> None:
    layer = fusedops.nn.QuantizedLinear.of(nn.Linear(32, 5), "Q8_0")
    before = layer.dequantize()
    with pytest.raises(InvalidInputError, match=r"got .* a write to the weight of a packed layer, .*to fix: unpack"):
        write(layer, layer.weight)
    assert torch.equal(layer.weight.clone(), before)
    assert list(layer.state_dict()) == ["packed_Q8_0", "bias"]


def test_packed_layers_are_tied_as_plain_ones() -> None:
    model = packed_llama()
    want = logits(model)
    model.lm_head.packed_Q8_0 = nn.Parameter(model.lm_head.packed.clone(), requires_grad=False)
    model.tie_weights()
    assert model.lm_head.packed is model.model.embed_tokens.packed
    assert torch.equal(logits(model), want)


@pytest.mark.parametrize(("written", "read"), [("Q4_K", "Q4_0"), ("Q4_0", "Q4_K"), ("Q5_K", "Q5_0"), ("", "Q8_0")])
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_of_another_format_is_an_error(written: str, read: str, strict: bool) -> None:
    first, second = nn.Sequential(nn.Linear(256, 4)), nn.Sequential(nn.Linear(256, 4))
    if written:
        quantize(first, format=written)
    quantize(second, format=read)
    key = f"packed_{written}" if written else "weight"
    with pytest.raises(RuntimeError, match=f"got 0.{key} in the state dict, expected 0.packed_{read}; to fix: quant"):
        second.load_state_dict(first.state_dict(), strict=strict)
    with pytest.raises(RuntimeError, match=f"packed_{read}"):
        nn.Sequential(nn.Linear(256, 4)).load_state_dict(second.state_dict())


@pytest.mark.parametrize("assign", [True, False])
def test_a_mean_of_packed_bytes_is_no_weight(assign: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 4), nn.Embedding(4, 64))
    quantize(model)
    before = copy.deepcopy(model.state_dict())
    mean = {key: 0.75 * value for key, value in before.items()}
    with pytest.raises(RuntimeError, match=r"got 0\.packed_Q8_0 of torch\.float32, expected the packed bytes, uint8"):
        model.load_state_dict(mean, assign=assign)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items() if "packed" in key)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("format", [*FORMATS, "NVFP4"])
def test_a_state_dict_of_the_same_format_loads(format: str, assign: bool) -> None:
    first, second = nn.Sequential(nn.Linear(256, 4)), nn.Sequential(nn.Linear(256, 4))
    quantize(first, format=format), quantize(second, format=format)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert torch.equal(second[0].weight.clone(), first[0].dequantize())


def test_indices_are_those_of_torch() -> None:
    plain = nn.Embedding(10, 32, padding_idx=3)
    packed = fusedops.nn.QuantizedEmbedding.of(plain, "Q8_0")
    plain.weight.data = packed.dequantize()
    assert packed.padding_idx == 3
    for taken in (torch.tensor([[3, 9]]), torch.tensor([0], dtype=torch.int32), IDS[:0], torch.tensor(4)):
        assert torch.equal(packed(taken), plain(taken))
    for refused in (torch.tensor([1, -1]), torch.tensor([-100]), torch.tensor([10]), IDS[:1] > 5, IDS[:1] / 7):
        with pytest.raises((IndexError, RuntimeError)) as theirs:
            plain(refused)
        with pytest.raises(theirs.type, match=r"out of range|scalar types"):
            packed(refused)


def test_a_model_cannot_be_resized_or_saved_for_from_pretrained(tmp_path: Path) -> None:
    model = packed_llama()
    before = logits(model)
    with pytest.raises(InvalidInputError, match="a write to the weight of a packed layer"):
        model.resize_token_embeddings(128)
    assert (model.config.vocab_size, model.lm_head.weight.shape[0]) == (96, 96)
    assert torch.equal(logits(model), before)
    other = copy.deepcopy(model)
    for saved in (model, other, model.model):
        with pytest.raises(InvalidInputError, match=r"save_pretrained: .*to fix: torch.save.*skip=\['\*'\]"):
            saved.save_pretrained(tmp_path)
    quantize(other, skip=["*"]).remove()
    other.save_pretrained(tmp_path)
    assert torch.equal(logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path)), logits(other))
    other.resize_token_embeddings(128)
    assert logits(other).shape[-1] == 128


def test_another_format_is_shown() -> None:
    model = packed_llama("Q4_0")
    assert {row.left for row in quantize(model).rows} == {"it is packed in Q4_0"}
    assert model.lm_head.format == "Q4_0"


def test_weights_of_a_packed_model_can_be_offloaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = packed_llama()
    want = logits(model)
    assert torch.equal(logits(accelerate.cpu_offload(model, execution_device="cpu")), want)
    assert model.lm_head.packed.is_meta
