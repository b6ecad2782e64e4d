"""Every text of the integration of transformers, word for word."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from error_calls import INVALID
from error_texts import Table
from gguf_bytes import parts
from gguf_files import llama, write
from torch import nn

import fusedops
from fusedops import FusedOpsWarning
from fusedops._dispatch.registered import registration
from fusedops.integrations._replacement import replace
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations.transformers import (
    apply,
    attention_forward,
    from_gguf,
    quantize,
    quantized_cache,
    recorded_cache,
    seeded_sampling,
    softmax_forward,
)
from fusedops.integrations.transformers._loss.head import Head
from fusedops.nn import QuantizedLinear

TABLE = Table(__file__)
pin = TABLE.pin


def attention(is_causal: bool = True, **options: Any) -> Any:
    q = torch.zeros(1, 2, 4, 8)
    return attention_forward(nn.Identity(), q, q, q, None, is_causal=is_causal, **options)


@torch.no_grad()
def cached(implementation: str = "fusedops", mask: Any = None, **options: Any) -> None:
    """A prompt of three tokens, then one."""
    model = fused(sliding_window=None)
    cache = quantized_cache(model)
    model.set_attn_implementation(implementation)
    ids = torch.tensor([[1, 2, 3]])
    model(ids, past_key_values=cache, attention_mask=mask)
    model(ids[:, :1], past_key_values=cache, **options)


def fused(kind: str = "Mistral", **options: Any) -> Any:
    """Return a small model with fusedops' attention."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_hidden_layers=1, vocab_size=8, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.set_attn_implementation("fusedops")
    return model


def beams() -> None:
    model = fused()
    options = {"num_beams": 2, "max_new_tokens": 2, "pad_token_id": 0}
    model.generate(torch.tensor([[1, 2, 3]]), past_key_values=quantized_cache(model), **options)


@torch.no_grad()
def recorded(function: Any = torch.relu, **options: Any) -> None:
    """A prompt and three tokens with a recorded cache, of a model whose MLP is a function."""

    class Own(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    model = fused(sliding_window=None, **options).eval()
    model.model.layers[0].mlp = Own()
    cache, ids = recorded_cache(model), torch.tensor([[1, 2, 3]])
    for each in (ids, ids[:, :1], ids[:, 1:2], ids[:, 2:]):
        model(each, past_key_values=cache)


@torch.enable_grad()
def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return fusedops.rms_norm(x, torch.ones(8, requires_grad=True)).detach()


def hooked() -> None:
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    try:
        recorded()
    finally:
        hook.remove()


def replaced_decoder() -> None:
    model = fused()
    replace(model.model, Head())
    recorded_cache(model)


def with_buffer_of_meta() -> None:
    model = fused(sliding_window=None).eval()
    model.model.register_buffer("unused", torch.ones(1, device="meta"))
    cache, ids = recorded_cache(model), torch.tensor([[1, 2, 3]])
    for each in (ids, ids[:, :1]):
        with torch.no_grad():
            model(each, past_key_values=cache)


class Steps:
    """A function that counts its calls."""

    count = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count


def quantized_layer(call: Any) -> Any:
    return call(quantized_cache(fused()).layers[0])


def from_quantize() -> Any:
    model = llama()
    quantize(model)
    return model


def softmax(**options: Any) -> Any:
    q = torch.zeros(1, 2, 4, 8)
    return softmax_forward(nn.Identity(), q, q, q, None, **options)


def used_logits(changed: bool = False) -> Any:
    head = nn.Linear(2, 3)
    replace(head, Head())
    logits = head(torch.ones(1, 2))
    if changed:
        nn.init.zeros_(head.weight)
    return logits.argmax(-1)


def reshaped_logits() -> Any:
    head = nn.Linear(2, 3)
    replace(head, Head())
    return head(torch.ones(1, 2)).t_()


def head_of_func() -> Any:
    head = nn.Linear(2, 3)
    replace(head, Head())
    return torch.func.grad(lambda x: head(x).sum())(torch.ones(1, 2))


def a_file(format: str = "Q8_0", begin: int = 0, end: int | None = None, **options: Any) -> Any:
    def load() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder, "model.gguf"), llama(), format, **options)
            path.write_bytes(path.read_bytes()[begin:end])
            from_gguf(path)

    return load


def a_dropped_tensor() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = parts(write(Path(folder, "model.gguf"), llama(), "F16").read_bytes())
        more = whole.tensors[-1]._replace(name=b"rope_freqs.weight", shape=(8,), kind=0, offset=len(whole.body))
        whole = whole._replace(tensors=(*whole.tensors, more), body=whole.body + bytes(32))
        Path(folder, "model.gguf").write_bytes(whole.file())
        from_gguf(Path(folder, "model.gguf"))


switch = 3
KEPT: list[int] = []


def reason(forward: Any) -> Any:
    def read() -> None:
        raise LookupError(reason_of_source([type("Norm", (nn.Module,), {"forward": forward})()]))

    return read


def of_numbers() -> None:
    class Choice(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return super().forward(x).argmax(-1)

    apply(Choice(nn.LayerNorm(8))).benchmark(torch.ones(2, 8), seconds=0.01)


def a_mean_of_packed_bytes() -> None:
    layer = QuantizedLinear.of(nn.Linear(32, 4), "Q8_0")
    layer.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})


def a_gradient_of_packed_bytes() -> None:
    model = from_quantize()
    next(each for name, each in model.named_parameters() if "packed" in name).requires_grad_()


def an_export_to_onnx() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration, "is_onnx_export", lambda: True)
        registration.prepare("rms_norm")


pin("a dropped tensor", a_dropped_tensor, FusedOpsWarning, form="got .* expected .*to fix")
pin("a list of the file", reason(lambda self, x: KEPT and x), LookupError, form="its forward uses")
pin("a switch of the file", reason(lambda self, x: x * switch), LookupError, form="its forward reads")
pin("a device", reason(lambda self, x: x.device.type == "cuda"), LookupError, form="its forward asks")
pin("benchmark of packed weights", lambda: quantize(llama()).benchmark(torch.ones(1)), INVALID)
pin("benchmark of numbers", of_numbers, INVALID)
pin("a format of experts", lambda: quantize(llama(), experts="INT8"), INVALID)
pin("a mean of packed bytes", a_mean_of_packed_bytes, RuntimeError)
pin("packed bytes that are to be trained", a_gradient_of_packed_bytes, INVALID)
pin("a part of a freed model", lambda: from_quantize().get_submodule("model"), INVALID)
pin("an export to ONNX", an_export_to_onnx, FusedOpsWarning)
pin("an op", lambda: apply(nn.Identity(), ops=["gelu"]), INVALID)
pin("a misspelt op", lambda: apply(nn.Identity(), ops=["rmsnorm"]), INVALID)
pin("one op", lambda: apply(nn.Identity(), ops="rms_norm"), INVALID)
pin("a name", lambda: apply("gpt2"), INVALID)  # type: ignore[arg-type]
pin("a save of packed weights", lambda: from_quantize().save_pretrained("."), INVALID)
pin("a paged cache", lambda: attention(cache=object()), INVALID)
pin("a paged cache and softmax", lambda: softmax(cache=object()), INVALID)
NO_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "head_dim": 4}
HOLES = torch.tensor([[1, 0, 1]])
pin("a quantized cache of another implementation", lambda: quantized_cache(llama()), INVALID)
pin("a quantized cache of 16 bits", lambda: quantized_cache(fused(), torch.half), INVALID)
pin("a quantized cache of states", lambda: quantized_cache(fused("Qwen3Next", **NO_EXPERTS)), INVALID)
pin("codes in another implementation", lambda: cached(implementation="eager"), INVALID)
pin("a prompt with holes", lambda: cached(mask=HOLES), INVALID)
pin("a mask with holes", lambda: cached(attention_mask=torch.tensor([[1, 0, 1, 1]])), INVALID)
pin("no mask after padding", lambda: cached(mask=torch.tensor([[0, 1, 1]])), INVALID)
pin("softcap and a quantized cache", lambda: cached(softcap=30.0), INVALID)
pin("beams", beams, INVALID)
pin("prefix tuning", lambda: quantized_cache(fused()).max_cache_len, INVALID)  # as PEFT asks
pin("another batch", lambda: quantized_layer(lambda layer: layer.batch_select_indices(torch.tensor([0]))), INVALID)
pin("offloading", lambda: quantized_layer(lambda layer: layer.offload()), INVALID)
pin("a crop of a positive number", lambda: quantized_cache(fused()).layers[0].crop(4), INVALID)
pin("a crop of a window", lambda: quantized_cache(fused(sliding_window=3)).layers[0].crop(-1), INVALID)
pin("a recorded cache of another implementation", lambda: recorded_cache(llama()), INVALID)
pin("a recorded cache of 16 bits", lambda: recorded_cache(fused(), torch.half), INVALID)
pin("a recorded cache of a model on meta", lambda: recorded_cache(fused().to("meta")), INVALID)
pin("a step that reads an element", lambda: recorded(lambda x: x * x[0, 0, 0].item()), FusedOpsWarning)
pin("a step that reads a list", lambda: recorded(lambda x: x * x[0, 0, 0].tolist()), FusedOpsWarning)
pin("a step that draws", lambda: recorded(lambda x: x + torch.rand_like(x)), FusedOpsWarning)
pin("a step with a gradient", lambda: recorded(with_gradient), FusedOpsWarning)
pin("a step that counts", lambda: recorded(Steps()), FusedOpsWarning)
pin("a step of all hidden states", lambda: recorded(output_hidden_states=True), FusedOpsWarning)
pin("a step with hooks", hooked, FusedOpsWarning)
pin("a decoder that is replaced", replaced_decoder, FusedOpsWarning)
pin("a decoder with a buffer elsewhere", with_buffer_of_meta, FusedOpsWarning)
pin("sparse", lambda: attention(indices=torch.zeros(1)), INVALID)
pin("a window", lambda: attention(False, sliding_window=2), INVALID)
pin("dropout", lambda: attention(dropout=0.1), FusedOpsWarning)
pin("a use of logits", used_logits, FusedOpsWarning)
pin("logits of changed weights", lambda: used_logits(changed=True), INVALID)
pin("logits of another shape", reshaped_logits, INVALID)
pin("a head of func", head_of_func, FusedOpsWarning)
pin("softcap", lambda: attention(softcap=30.0), FusedOpsWarning)
pin("nothing", lambda: apply(nn.Identity()), FusedOpsWarning, form="nothing is replaced; found no")
pin("a format", lambda: quantize(nn.Identity(), format="Q4"), INVALID)
pin("one name to skip", lambda: quantize(nn.Identity(), skip="lm_head"), INVALID)
pin("nothing to pack", lambda: quantize(nn.Identity()), FusedOpsWarning, form="nothing is replaced; found no")
pin("nothing to skip", lambda: quantize(nn.Sequential(nn.Linear(32, 2)), skip=["Linear"]), FusedOpsWarning)
pin("a part of a name", lambda: quantize(nn.ModuleDict({"q_proj": nn.Linear(32, 2)}), skip=["proj"]), FusedOpsWarning)
pin("a longer prompt", lambda: seeded_sampling(7, 5)(torch.zeros(1, 2), torch.zeros(1, 3)), INVALID)
pin("no prompt", lambda: seeded_sampling(7, -1)(torch.zeros(1, 2), torch.zeros(1, 3)), INVALID)
pin("a folder", lambda: from_gguf(os.curdir), INVALID)
pin("no file", lambda: from_gguf("absent.gguf"), INVALID)
pin("a file of another architecture", a_file(architecture="nothing"), INVALID, form="got .* expected .*to fix")
pin("a file of another format", a_file("F64"), INVALID)
pin("a file without a parameter", a_file(without="model.layers.1.mlp.up_proj.weight"), INVALID)
pin("a file of another kind", a_file(begin=4), INVALID)
pin("a file that ends in its header", a_file(end=100), INVALID)
pin("a file that ends in a tensor", a_file(end=-1), INVALID)
pin("a file with another vocabulary", a_file(more=1), INVALID)

test_a_text, test_no_text_is_left_over = TABLE.tests()
