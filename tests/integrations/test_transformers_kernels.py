"""fusedops' layers for the package kernels: kernelize with mapping()."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from model_families import FAMILIES, counted
from torch import Tensor, nn
from transformers.utils import is_kernels_available

from fusedops.integrations.transformers import apply, mapping

kernels = pytest.importorskip("kernels", reason="the package kernels is not installed")
if not is_kernels_available():
    pytest.skip(f"this release of transformers does not take kernels {kernels.__version__}", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

TRAINING, COMPILE = kernels.Mode.TRAINING, kernels.Mode.TORCH_COMPILE


@pytest.fixture
def kernelized() -> Iterator[Callable[..., Any]]:
    """Kernelize a model with fusedops' layers. transformers' functions, which kernels changes for all models, are
    given back their own forward after the test."""
    functions: set[Any] = set()

    def run(model: Any, mode: Any = TRAINING, device: str = "cpu") -> Any:
        for module in model.modules():
            functions.update(getattr(module, "_kernel_funcs", {}).values())
        with kernels.use_kernel_mapping(mapping(), inherit_mapping=False):
            return kernels.kernelize(model, mode=mode, device=device)

    yield run
    for function in functions:
        vars(function).pop("forward", None)


def logits(model: Any, name: str) -> Tensor:
    with torch.no_grad():
        return model(**FAMILIES[name].inputs()).logits


@pytest.mark.parametrize("device", ["cpu", "npu", "xpu"])
@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("Llama", {"rms_norm": 5, "rotary_embedding": 2}),
        ("Qwen3", {"rms_norm": 9, "rotary_embedding": 2}),
        ("gpt-oss", {"rms_norm": 5, "rotary_embedding": 2}),
        ("OLMo 2", {"rms_norm": 9, "rotary_embedding": 2}),
        ("DeepSeek-V3", {"rms_norm": 9}),  # its rotation has another name
    ],
)
def test_the_layers_run(kernelized: Callable[..., Any], name: str, calls: dict[str, int], device: str) -> None:
    model = FAMILIES[name].build()
    expected = logits(model, name)
    kernelized(model, device=device)
    assert counted(lambda: torch.testing.assert_close(logits(model, name), expected, rtol=1e-4, atol=2e-5)) == calls


@pytest.mark.parametrize("file", ["llama", "glm", "cohere", "ernie4_5", "phi3", "gpt_oss", "deepseek_v4", "another"])
def test_each_rotation_of_the_name_is_its_own(kernelized: Callable[..., Any], file: str) -> None:
    """Functions of one name rotate halves or pairs, with cos once or twice: the layer is what the function is."""
    name = "llama" if file == "another" else file
    own = importlib.import_module(f"transformers.models.{name}.modeling_{name}").apply_rotary_pos_emb
    parameters = tuple(inspect.signature(getattr(own, "forward", own)).parameters)

    @kernels.use_kernel_forward_from_hub("rotary_pos_emb")
    def rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if file == "another":
            return own(q, k, cos, 2 * sin, unsqueeze_dim=unsqueeze_dim)
        if parameters[1] == "k":
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return own(q, cos, sin, unsqueeze_dim=unsqueeze_dim), own(k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    q, k, half = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 5, 4)
    twice = {"cohere": half.repeat_interleave(2, -1), "gpt_oss": half, "deepseek_v4": half[..., :3]}
    angles = twice.get(file, torch.cat((half, half), -1))
    expected = rotation(q, k, angles, angles.flip(1))
    kernelized(rotation)
    calls = counted(lambda: torch.testing.assert_close(rotation(q, k, angles, angles.flip(1)), expected))
    assert calls == ({} if file == "another" else {"rotary_embedding": 1})


def test_gradients_pass(kernelized: Callable[..., Any]) -> None:
    model, other = (FAMILIES["Llama"].build() for _ in range(2))
    kernelized(other)
    for each in (model, other):
        each(**FAMILIES["Llama"].inputs()).logits.square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(theirs.grad, mine.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_under_torch_compile(kernelized: Callable[..., Any]) -> None:
    llama = FAMILIES["Llama"]
    model = dataclasses.replace(llama, values={**llama.values, "num_hidden_layers": 1}).build()
    expected = logits(model, "Llama")
    kernelized(model, TRAINING | COMPILE)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    calls = counted(lambda: torch.testing.assert_close(logits(compiled, "Llama"), expected, rtol=1e-4, atol=2e-5))
    assert calls == {"rms_norm": 3, "rotary_embedding": 1}


def test_a_norm_of_another_dtype_runs_its_own_forward(kernelized: Callable[..., Any]) -> None:
    norm = FAMILIES["Llama"].build().model.norm
    kernelized(norm)
    assert norm(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.float32
    assert counted(lambda: norm(torch.ones(2, 32, dtype=torch.bfloat16))) == {}


@pytest.mark.parametrize(
    ("layer", "op", "activation"),
    [
        ("SwiGLUMLP", "swiglu", torch.nn.functional.silu),
        ("GeGLUMLP", "geglu", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_mlps_by_their_names(kernelized: Callable[..., Any], layer: str, op: str, activation: Any) -> None:
    @kernels.use_kernel_forward_from_hub(layer)
    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(activation(self.gate_proj(x)) * self.up_proj(x))

    mlp, x = MLP(), torch.randn(3, 4)
    expected = mlp(x)
    kernelized(mlp)
    assert counted(lambda: torch.testing.assert_close(mlp(x), expected)) == {op: 1}


def test_zero_centered_norms(kernelized: Callable[..., Any]) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    norm, x = Qwen3_5RMSNorm(8), torch.randn(3, 8)
    nn.init.normal_(norm.weight)
    expected = norm(x)
    kernelized(norm)
    assert counted(lambda: torch.testing.assert_close(norm(x), expected)) == {"rms_norm": 1}


def test_a_layer_is_what_kernels_asks_for() -> None:
    layers = mapping()
    assert all(set(devices) == {"cpu", "cuda", "rocm", "npu", "xpu"} for devices in layers.values())
    for name, devices in mapping(["cpu"]).items():
        layer = devices["cpu"]
        assert layer == layers[name]["npu"]
        assert hash(layer) == hash(layers[name]["cuda"])
        assert name in str(layer)
        members = {member for member, _ in inspect.getmembers(layer.load())} - set(dir(nn.Module))
        assert members == {"can_torch_compile", "has_backward"}


def test_what_is_kernelized_is_left_by_apply(kernelized: Callable[..., Any]) -> None:
    model = kernelized(FAMILIES["Llama"].build())
    left = {row.module: row.left for row in apply(model).rows if not row.op}
    assert left == {
        "LlamaRMSNorm": "another library has replaced its forward",
        "LlamaAttention": "another library has replaced apply_rotary_pos_emb, or it has hooks",
    }


def test_what_a_mapping_replaces_in_the_installed_transformers() -> None:
    users = mapping(["cpu"]).users
    assert set(users) == set(mapping())
    assert "modeling_llama.LlamaRMSNorm" in users["RMSNorm"]
    assert "modeling_qwen3_5.Qwen3_5RMSNorm" in users["RMSNormZeroCentered"]
    assert "modeling_llama.apply_rotary_pos_emb" in users["rotary_pos_emb"]
    for name, each in users.items():
        for user in each[:: max(1, len(each) // 6)]:  # read from the sources: some of them, as kernels has them
            file, _, member = user.rpartition(".")
            module = importlib.import_module(f"transformers.models.{_folder(file)}.{file}")
            assert getattr(module, member).kernel_layer_name == name


def _folder(file: str) -> str:
    import transformers

    (path,) = pathlib.Path(transformers.__path__[0], "models").rglob(f"{file}.py")
    return path.parent.name


def test_a_mapping_prints_what_it_replaces() -> None:
    lines = {line.split()[0]: line.split() for line in str(mapping(["cpu", "npu"])).splitlines()}
    assert lines["SwiGLUMLP"][1:] == lines["GeGLUMLP"][1:] == ["none"]  # apply() recognises the gated MLPs
    assert int(lines["RMSNorm"][1]) > 100
    assert "on cpu, npu, in transformers" in str(mapping(["cpu", "npu"]))
    assert all(len(line) <= 100 for line in str(mapping()).splitlines())
