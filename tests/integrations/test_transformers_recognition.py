"""How modules are recognised: by their results. A look-alike is left; another name is not in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from model_families import FAMILIES, counted
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import fusedops
from fusedops.integrations._modules import norms as _norms
from fusedops.integrations.transformers import Row, apply
from fusedops.integrations.transformers._rotary.functions import recognised_function

pytestmark = pytest.mark.filterwarnings("ignore:apply. fusedops in:fusedops.FusedOpsWarning", "ignore::FutureWarning")


class TinyNorm(nn.Module):
    """A norm by a formula that a test gives."""

    def __init__(self, formula: Any, weight: Any = True, bias: bool = False, size: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size)) if weight else None
        self.bias = nn.Parameter(torch.randn(size)) if bias else None
        self.eps = 1e-5
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def rms(norm: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)


def centered(norm: Any, x: Tensor, correction: int = 0) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, correction=correction, keepdim=True) + norm.eps)


NORMS = {
    "rms_norm": (lambda n, x: rms(n, x) * n.weight, {}),
    "rms_norm, 1 + weight": (lambda n, x: rms(n, x) * (1 + n.weight), {}),
    "rms_norm, no weight": (rms, {"weight": False}),
    "layer_norm": (lambda n, x: centered(n, x) * n.weight + n.bias, {"bias": True}),
    "layer_norm, 1 + weight": (lambda n, x: centered(n, x) * (1 + n.weight) + n.bias, {"bias": True}),
    "layer_norm, no bias": (lambda n, x: centered(n, x) * n.weight, {}),
    "layer_norm, no weight": (centered, {"weight": False}),
}
LOOK_ALIKES = {
    "Bessel's correction": (lambda n, x: centered(n, x, 1) * n.weight, {"size": 4096}),
    "eps outside the root": (lambda n, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + n.eps) * n.weight, {}),
    "another eps": (lambda n, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * n.weight, {}),
    "the sum, not the mean": (lambda n, x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + n.eps) * n.weight, {}),
    "over dim 1": (lambda n, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + n.eps) * n.weight, {}),
    "2 + weight": (lambda n, x: rms(n, x) * (2 + n.weight), {}),
    "clamped": (lambda n, x: (rms(n, x) * n.weight).clamp(-2, 2), {}),
    "of 4 dims another": (lambda n, x: rms(n, x) * n.weight * (2 if x.dim() == 4 else 1), {}),
    "float32 results": (lambda n, x: rms(n, x.float()) * n.weight.float(), {}),
    "groups": (lambda n, x: rms(n, x.unflatten(-1, (4, -1))).flatten(-2) * n.weight, {}),
    "a bias that is not added": (lambda n, x: centered(n, x) * n.weight, {"bias": True}),
    "a tuple": (lambda n, x: (rms(n, x) * n.weight,), {}),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_recognised(name: str) -> None:
    formula, options = NORMS[name]
    norm = TinyNorm(formula, **options)
    x = torch.randn(3, 16)
    expected = norm(x)
    assert apply(norm).rows == (Row("TinyNorm", name.partition(",")[0], 1),)
    fusedops.reset_stats()
    torch.testing.assert_close(norm(x=x), expected)
    assert fusedops.stats().counts


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_only_looks_like_a_norm_is_left(name: str) -> None:
    formula, options = LOOK_ALIKES[name]
    norm = TinyNorm(formula, **options)
    (row,) = apply(norm).rows
    assert row.op == ""
    assert row.left in {
        "its results are those of neither rms_norm nor layer_norm",
        "the dtypes of its results follow another rule",
    }
    assert type(norm) is TinyNorm


def test_a_norm_with_a_second_argument_is_left() -> None:
    class GatedNorm(TinyNorm):
        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = rms(self, x) * self.weight
            return y if scale is None else y * scale

    assert apply(GatedNorm(None)).rows == (Row("GatedNorm", "", 1, "its forward takes x, scale, expected one tensor"),)


def test_a_norm_of_another_dim_is_left() -> None:
    """With one group and (B, C), GroupNorm computes what LayerNorm does; Moonshine calls it with (B, C, S)."""
    (row,) = apply(nn.Sequential(nn.GroupNorm(1, 16))).rows
    assert row == Row("GroupNorm", "", 1, "its results are those of neither rms_norm nor layer_norm")


@pytest.mark.parametrize("size", [2, 3, 4096])
def test_the_recognition_of_a_norm_takes_few_numbers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    numbers = _norms.numbers
    monkeypatch.setattr(
        _norms, "numbers", lambda *args, **options: drawn.append(prod(args[1:])) or numbers(*args, **options)
    )
    norm = nn.RMSNorm(size, device="meta")
    assert apply(nn.ModuleList([norm])).rows == (Row("RMSNorm", "rms_norm", 1),)
    assert max(drawn) <= 40 * size  # the square of the size took 5 s for each norm of width 4096


def test_a_norm_with_a_weight_that_is_not_used_is_recognised() -> None:
    """As Falcon Mamba's, whose weight is a buffer of ones for a kernel."""
    norm, x = TinyNorm(rms, weight=False), torch.randn(3, 16)
    del norm.weight
    norm.register_buffer("weight", torch.full((16,), 3.0))
    expected = norm(x)
    assert apply(norm).rows == (Row("TinyNorm", "rms_norm", 1),)
    torch.testing.assert_close(norm(x), expected)


def test_a_norm_with_sharded_weights_is_left() -> None:
    norm = TinyNorm(NORMS["rms_norm"][0], size=0)  # as DeepSpeed's third stage keeps them
    assert apply(norm).rows == (Row("TinyNorm", "", 1, "the size of its weight is not known"),)


@pytest.mark.parametrize("kind", ["input", "promoted", "weight"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_the_dtype_of_the_result_is_kept(kind: str, given: torch.dtype, own: torch.dtype) -> None:
    def formula(norm: Any, x: Tensor) -> Tensor:
        y = rms(norm, x.float())
        if kind == "input":
            return (y * norm.weight.float()).to(x.dtype)
        if kind == "promoted":
            return y.to(x.dtype) * norm.weight
        return (y.to(norm.weight.dtype) if norm.weight.dtype in (torch.bfloat16, torch.float16) else y) * norm.weight

    norm, x = TinyNorm(formula).to(own), torch.randn(3, 16).to(given)
    expected = norm(x)
    assert apply(norm).ops == {"rms_norm": 1}
    result = norm(x)
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


# ------------------------------------------------------------------------------------------------------- gated MLPs


class TinyMLP(nn.Module):
    """An MLP by a formula that a test gives; the names of its layers mean nothing."""

    def __init__(
        self, formula: Any, packed: bool = False, dropout: bool = False, width: int = 16, **numbers: float
    ) -> None:
        super().__init__()
        for name, number in numbers.items():
            setattr(self, name, number)
        self.a = nn.Linear(8, 2 * width if packed else width)
        if not packed:
            self.b = nn.Linear(8, width)
        self.c = nn.Linear(width, 8)
        if dropout:
            self.drop = nn.Dropout(0.5)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def pairs(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.a(x)[..., ::2], m.a(x)[..., 1::2]


def halves(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = m.a(x).chunk(2, -1)
    return gate, up


MLPS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "silu": ("swiglu", lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)), {}),
    "gate second": ("swiglu", lambda m, x: m.c(m.a(x) * F.silu(m.b(x))), {}),
    "gelu": ("geglu", lambda m, x: m.c(F.gelu(m.a(x)) * m.b(x)), {}),
    "gelu tanh": ("geglu", lambda m, x: m.c(F.gelu(m.a(x), approximate="tanh") * m.b(x)), {}),
    "inputs as wide": ("swiglu", lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)), {"width": 8}),
    "halves": ("swiglu", lambda m, x: m.c(F.silu(halves(m, x)[0]) * halves(m, x)[1]), {"packed": True}),
    "up first": ("geglu", lambda m, x: m.c(halves(m, x)[0] * F.gelu(halves(m, x)[1])), {"packed": True}),
    "interleaved": ("swiglu", lambda m, x: m.c(F.silu(pairs(m, x)[0]) * pairs(m, x)[1]), {"packed": True}),
    "clamped": ("swiglu", lambda m, x: m.c(F.silu(m.a(x).clamp(max=1)) * m.b(x).clamp(-1, 1)), {"limit": 1.0}),
    "MiniMax's": (
        "swiglu",
        lambda m, x: m.c((m.b(x).clamp(-2, 2) + 1) * (g := m.a(x).clamp(max=2)) * torch.sigmoid(1.7 * g)),
        {"limit": 2.0, "alpha": 1.7},
    ),
    "dropout": ("swiglu", lambda m, x: m.c(m.drop(F.silu(m.a(x)) * m.b(x))), {"dropout": True}),
    "dropout last": ("swiglu", lambda m, x: m.drop(m.c(F.silu(m.a(x)) * m.b(x))), {"dropout": True}),
}
OTHER_MLPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "relu": (lambda m, x: m.c(F.relu(m.a(x)) * m.b(x)), {}),
    "quick gelu": (lambda m, x: m.c(m.a(x) * torch.sigmoid(1.702 * m.a(x)) * m.b(x)), {}),
    "clamped": (lambda m, x: m.c(F.silu(m.a(x)).clamp(max=500) * m.b(x)), {}),
    "clamped by another limit": (lambda m, x: m.c(F.silu(m.a(x).clamp(max=1)) * m.b(x).clamp(-1, 1)), {"limit": 1.1}),
    "a gate that is not clamped": (lambda m, x: m.c(F.silu(m.a(x)) * m.b(x).clamp(-1, 1)), {"limit": 1.0}),
    "scaled": (lambda m, x: 1.5 * m.c(F.silu(m.a(x)) * m.b(x)), {}),
    "a residual": (lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)) + x.mean(), {}),
    "the sum": (lambda m, x: m.c(F.silu(m.a(x)) + m.b(x)), {}),
    "a plain MLP": (lambda m, x: m.c(F.silu(m.a(x)) * 1), {}),
    "dropout first": (lambda m, x: m.c(F.silu(m.a(m.drop(x))) * m.b(x)), {"dropout": True}),
    "of 2 dims another": (lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)) * (x.dim() - 1), {}),
}


@pytest.mark.parametrize("name", MLPS)
def test_a_gated_mlp_is_recognised(name: str) -> None:
    op, formula, options = MLPS[name]
    mlp, x = TinyMLP(formula, **options), torch.randn(2, 5, 8)
    torch.manual_seed(0)
    expected = mlp(x)
    assert apply(mlp).rows == (Row("TinyMLP", op, 1),)
    torch.manual_seed(0)  # dropout drops the same elements
    torch.testing.assert_close(mlp(x=x), expected)


@pytest.mark.parametrize("name", OTHER_MLPS)
def test_another_mlp_is_left(name: str) -> None:
    formula, options = OTHER_MLPS[name]
    mlp = TinyMLP(formula, **options)
    assert apply(mlp).rows == (Row("TinyMLP", "", 1, "its results are those of neither swiglu nor geglu"),)
    assert type(mlp) is TinyMLP


class GatingMLP(TinyMLP):
    """As Moshi's: it takes an index too, and three dims alone."""

    def forward(self, x: Tensor, layer: int | None = None) -> Tensor:
        batch, length, _ = x.shape
        gate, up = self.a(x).view(batch, length, 2, -1).unbind(2)
        return self.c(F.silu(gate) * up) * (1 if layer is None else layer)


def test_a_gated_mlp_with_an_argument_that_may_be_none() -> None:
    mlp, x = GatingMLP(None, packed=True), torch.randn(2, 5, 8)
    expected, other = mlp(x), mlp(x, layer=2)
    assert apply(mlp).rows == (Row("GatingMLP", "swiglu", 1),)
    for result, right, calls in ((lambda: mlp(x, None), expected, 1), (lambda: mlp(x, layer=2), other, 0)):
        fusedops.reset_stats()
        torch.testing.assert_close(result(), right)
        assert len(fusedops.stats().counts) == calls


class ResidualMLP(TinyMLP):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.c(F.silu(self.a(x)) * self.b(x))


def test_what_an_mlp_has_beside_is_named() -> None:
    learned = TinyMLP(lambda m, x: m.c(m.act(m.a(x))))
    del learned.b
    learned.act = nn.PReLU()
    convolved = nn.Module.__new__(type("ConvMLP", (nn.Module,), {"forward": lambda m, x: m.c(F.silu(m.a(x)))}))
    nn.Module.__init__(convolved)
    convolved.a, convolved.c = Conv1D(12, 8), Conv1D(8, 12)
    for mlp, reason in (
        (ResidualMLP(None), "its forward takes x, residual, expected one tensor"),
        (learned, "its act has parameters, and is no linear layer"),
        (convolved, "it has no gate"),
    ):
        assert apply(mlp).rows == (Row(type(mlp).__name__, "", 1, reason),)


def test_a_last_layer_in_float32_is_given_float32() -> None:
    """T5 keeps it so, and casts what it is given."""
    family = FAMILIES["T5 v1.1"]
    model = family.build().bfloat16()
    for module in model.modules():
        if hasattr(module, "wo"):
            module.wo.float()
    with torch.no_grad():
        expected = model(**family.inputs()).logits
        assert apply(model, ops=["geglu"]).ops == {"geglu": 4}
        torch.testing.assert_close(model(**family.inputs()).logits, expected, rtol=0.05, atol=0.05)


class Adapter(nn.Module):
    """A linear layer with an adapter, as PEFT wraps one."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.in_features, self.out_features = layer, layer.in_features, layer.out_features
        self.down, self.up = nn.Linear(layer.in_features, 2), nn.Linear(2, layer.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_layers_with_adapters_are_called(wrapped_first: bool) -> None:
    mlp, x = TinyMLP(MLPS["silu"][1]), torch.randn(2, 8)
    applied = None if wrapped_first else apply(mlp)
    mlp.a, mlp.c = Adapter(mlp.a), Adapter(mlp.c)
    applied = applied or apply(mlp)
    assert applied.ops == {"swiglu": 1}
    result = mlp(x)
    result.sum().backward()
    assert mlp.a.up.weight.grad is not None
    applied.remove()
    torch.testing.assert_close(result, mlp(x))


# ---------------------------------------------------------------------------------------------------------- rotations


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def shifted_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return apply_rotary_pos_emb(q, k, cos, 2 * sin, unsqueeze_dim)


def negative_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return apply_rotary_pos_emb(q, k, cos, -sin, unsqueeze_dim)


def rotary_of_patches(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """As DINOv3: the first tokens stay."""
    first = [each[..., : -cos.shape[-2], :] for each in (q, k)]
    rotated = apply_rotary_pos_emb(*(each[..., -cos.shape[-2] :, :] for each in (q, k)), cos, sin, 0)
    return tuple(torch.cat(each, -2) for each in zip(first, rotated))


class TinyRotary(nn.Module):
    """The angles of positions, each once, twice as halves, or twice as pairs."""

    def __init__(self, layout: str = "halves") -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(4))
        self.layout = layout

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq
        if self.layout != "once":
            angles = torch.cat((angles, angles), -1) if self.layout == "halves" else angles.repeat_interleave(2, -1)
        return angles.cos(), angles.sin()


class TinyAttention(nn.Module):
    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], dim: int = 1) -> Any:
        return apply_rotary_pos_emb(x, x, *angles, unsqueeze_dim=dim)


class OddAttention(nn.Module):
    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Any:
        return shifted_rotary(x, x, *angles)


def test_a_rotation_is_recognised_and_the_file_stays_as_it_is() -> None:
    model = nn.ModuleList([TinyRotary(), TinyAttention()])
    own, other = apply_rotary_pos_emb, TinyAttention()
    x, angles = torch.randn(2, 3, 5, 8), model[0](torch.zeros(1), torch.arange(5)[None])
    expected = model[1](x, angles)
    assert apply(model).rows == (Row("TinyAttention", "rotary_embedding", 1),)
    for run, calls in ((model[1], 1), (other, 0)):
        fusedops.reset_stats()
        torch.testing.assert_close(run(x, angles), expected)
        assert len(fusedops.stats().counts) == calls
    assert apply_rotary_pos_emb is own
    swapped = [each.transpose(1, 2) for each in expected]
    torch.testing.assert_close(list(model[1](x.transpose(1, 2), angles, 2)), swapped)


def test_ranks_that_were_not_compared_run_the_models_own_function() -> None:
    model = nn.ModuleList([TinyRotary(), TinyAttention()])
    x, angles = torch.randn(1, 2, 3, 5, 8), model[0](torch.zeros(1), torch.arange(5)[None])
    expected = model[1](x, angles, 1)
    assert apply(model).ops == {"rotary_embedding": 1}
    fusedops.reset_stats()
    assert torch.equal(model[1](x, angles, 1)[0], expected[0])
    assert not fusedops.stats().counts


class PatchAttention(nn.Module):
    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Any:
        return rotary_of_patches(x, x, *angles)


@pytest.mark.parametrize("first", [0, 1])
def test_tokens_without_an_angle_run_the_models_own_function(first: int) -> None:
    model = nn.ModuleList([TinyRotary(), PatchAttention()])
    x, angles = torch.randn(2, 3, 5 + first, 8), model[0](torch.zeros(1), torch.arange(5))
    expected = model[1](x, angles)
    assert apply(model).ops == {"rotary_embedding": 1}
    fusedops.reset_stats()
    torch.testing.assert_close(model[1](x, angles), expected)
    assert len(fusedops.stats().counts) == 1 - first


def test_positions_that_are_learned_have_their_gradient() -> None:
    """As MLCD's, of its class token."""
    model = nn.ModuleList([TinyRotary(), TinyAttention()])
    x, positions = torch.randn(2, 3, 5, 8), torch.arange(5.0)[None].requires_grad_()
    expected = model[1](x, model[0](torch.zeros(1), positions))[0]
    (gradient,) = torch.autograd.grad(expected.square().sum() + expected.sum(), positions)
    assert apply(model).ops == {"rotary_embedding": 1}
    result = model[1](x, model[0](torch.zeros(1), positions))[0]
    assert torch.equal(result, expected)
    assert torch.equal(torch.autograd.grad(result.square().sum() + result.sum(), positions)[0], gradient)


def test_positions_of_rows_and_columns() -> None:
    """Pixtral's angles have no batch."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.PixtralVisionConfig(**sizes, image_size=16, patch_size=8)
    model, images = transformers.PixtralVisionModel(config).eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(images).last_hidden_state
        assert apply(model, ops=["rotary_embedding"]).ops == {"rotary_embedding": 1}
        fusedops.reset_stats()
        torch.testing.assert_close(model(images).last_hidden_state, expected, rtol=1e-4, atol=2e-5)
    assert fusedops.stats().counts


def test_another_rotation_is_left() -> None:
    model = nn.ModuleList([TinyRotary(), OddAttention()])
    assert apply(model).rows == (
        Row("OddAttention", "", 1, "the results of shifted_rotary are not those of rotary_embedding"),
    )


@pytest.mark.parametrize("layout", ["once", "pairs", None])
def test_angles_of_another_layout_are_left(layout: str | None) -> None:
    model = nn.ModuleList([*([] if layout is None else [TinyRotary(layout)]), TinyAttention()])
    reason = "the model has no rotary module that gives cos as apply_rotary_pos_emb takes it"
    assert apply(model).rows == (Row("TinyAttention", "", 1, reason),)


def neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def complex_rotary(q: Tensor, k: Tensor, freqs: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs.unsqueeze(unsqueeze_dim)
        return torch.view_as_real(numbers).flatten(-2).type_as(x)

    return turned(q), turned(k)


@pytest.mark.parametrize("dim", [1, 2])
def test_the_dim_of_the_heads_may_be_the_fourth_argument(dim: int) -> None:
    found = recognised_function(complex_rotary, "complex_rotary")
    assert not isinstance(found, str)
    freqs = torch.polar(torch.ones(2, 5, 4), torch.randn(2, 5, 4))
    arguments = torch.randn(2, 5, 5, 8), torch.randn(2, 5, 5, 8), freqs, dim
    expected = complex_rotary(*arguments)
    calls = counted(lambda: torch.testing.assert_close(found(complex_rotary, *arguments), expected))
    assert calls == {"rotary_embedding": 1}


def rotary_of_one(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return x * cos.unsqueeze(unsqueeze_dim) + rotate_half(x) * sin.unsqueeze(unsqueeze_dim)


def rotary_sin_first(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    cos, sin = (each[:, :, None, :].repeat_interleave(2, 3) for each in (cos, sin))
    return tensor * cos + neighbours(tensor) * sin


def rotary_of_the_last(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    cos, sin = (each.repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for each in (cos, sin))
    first, last = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    return torch.cat((first, last * cos + neighbours(last) * sin), -1)


def rotary_apart(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Any:
    pairs = [torch.cat((each[..., ::2], each[..., 1::2]), -1) for each in (q, k)]
    return apply_rotary_pos_emb(*pairs, cos, sin, unsqueeze_dim)


def rotary_complex(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
    numbers = [torch.view_as_complex(each.float().unflatten(-1, (-1, 2))) * freqs_cis[:, :, None] for each in (xq, xk)]
    return tuple(torch.view_as_real(each).flatten(3).to(xq.dtype) for each in numbers)


def twice(angle: Tensor) -> Tensor:
    return torch.cat((angle, angle), -1)


# the forwards of attention modules; x has 3 heads of 5 tokens
FORMS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Any]] = {
    "one tensor": lambda m, x, c, s: rotary_of_one(x, twice(c), twice(s)),
    "heads third": lambda m, x, c, s: rotary_of_one(x.transpose(1, 2), cos=twice(c), sin=twice(s), unsqueeze_dim=2),
    "sin first": lambda m, x, c, s: rotary_sin_first(x.transpose(1, 2), s, c),
    "the last elements": lambda m, x, c, s: rotary_of_the_last(x, c[..., :3], s[..., :3]),
    "negative": lambda m, x, c, s: negative_rotary(x, x[:, :1], twice(c), twice(s)),
    "angles of all": lambda m, x, c, s: apply_rotary_pos_emb(x, x[:, :1], twice(c[0]), twice(s[0]), 0),
    "six parameters": lambda m, x, c, s: rotary_apart(x, x[:, :1], twice(c), twice(s)),
    "complex": lambda m, x, c, s: rotary_complex(x.transpose(1, 2), x.transpose(1, 2)[:, :, :1], torch.complex(c, s)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_rotation_is_recognised(form: str) -> None:
    attention = type("FormAttention", (nn.Module,), {"forward": FORMS[form]})()
    model = nn.ModuleList([TinyRotary(), attention])
    x, (cos, sin) = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 2, 5, 4)
    expected = attention(x, cos, sin)
    assert apply(model).rows == (Row("FormAttention", "rotary_embedding", 1),)
    fusedops.reset_stats()
    result = attention(x, cos, sin)
    assert fusedops.stats().counts
    torch.testing.assert_close(result, expected)
    pairs = [each if isinstance(each, tuple) else (each,) for each in (result, expected)]
    sums = [torch.stack([one.square().sum() for one in each]).sum() for each in pairs]
    torch.testing.assert_close(*(torch.autograd.grad(each, x)[0] for each in sums))


factor = 1.0


def test_a_forward_that_reads_a_number_of_its_file_is_left() -> None:
    """A replaced layer runs a copy of its forward, with the names of the file as they were."""
    forward = {"forward": lambda m, x, c, s: factor * rotary_of_one(x, twice(c), twice(s))}
    model = nn.ModuleList([TinyRotary(), type("FormAttention", (nn.Module,), forward)()])
    assert apply(model).rows == (Row("FormAttention", "", 1, "its forward reads the global factor"),)


def test_positions_of_three_sections() -> None:
    """Models of images and text have positions of time, height and width, and no others."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = transformers.Qwen3VLTextConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, rope_parameters=rope
    )
    model = transformers.AutoModel.from_config(config).eval()
    ids, positions = torch.arange(9)[None] + 3, torch.stack([torch.arange(9)[None] * k for k in (1, 2, 3)])
    with torch.no_grad():
        expected = model(ids, position_ids=positions).last_hidden_state
        assert apply(model).ops["rotary_embedding"] == 2
        result = model(ids, position_ids=positions).last_hidden_state
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=2e-5)


# ------------------------------------------------------------------------------------------------- experts, attention


class OtherExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([part @ weight for part, weight in zip(x.split(sizes), self.weight)])


class ThreeExperts(OtherExperts):
    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x


def test_experts_of_another_form_have_a_reason() -> None:
    takes = "its forward takes x, sizes, expected tokens, the indices of their experts, and weights"
    assert apply(OtherExperts()).rows == (Row("OtherExperts", "", 1, takes),)
    made = "it is not made by transformers' use_experts_implementation"
    assert apply(ThreeExperts()).rows == (Row("ThreeExperts", "", 1, made),)


def test_a_model_that_reads_masks_itself_keeps_its_attention() -> None:
    """GIT adds the mask to its scores: one of sdpa, which is boolean, would change them."""
    model = FAMILIES["GIT"].build()
    (row,) = [row for row in apply(model).rows if row.module == "GitVisionAttention"]
    assert row.left == "it does not support transformers' sdpa, and GitAttention reads the masks itself"
    assert model.config._attn_implementation == "eager"


# --------------------------------------------------------------------------------------------------------------- loss


def test_another_loss_is_left() -> None:
    model = FAMILIES["Llama"].build()

    def scaled(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return logits.mean()

    model.loss_function = scaled
    (row,) = [row for row in apply(model).rows if row.left]
    assert row == Row("LlamaForCausalLM", "", 1, f"its loss calls {__name__}'s function")
    assert model.loss_function is scaled


@pytest.mark.parametrize("name", ["Llama", "ModernBERT"])
def test_the_loss_takes_what_trainers_pass(name: str) -> None:
    family = FAMILIES[name]
    model, inputs = family.build(), family.inputs()
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    options: list[dict[str, Any]] = [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}]
    expected = [model(**inputs, labels=labels, **each).loss for each in options]
    applied = apply(model, ops=["cross_entropy"])
    for each, right in zip(options, expected):
        loss = model(**inputs, labels=labels, **each).loss
        torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-5)
    applied.remove()
    assert torch.equal(model(**inputs, labels=labels).loss, expected[0])


def test_a_model_trains_with_gradient_checkpoints() -> None:
    family = FAMILIES["Llama"]
    gradients: list[list[Tensor]] = []
    for checkpoints in (False, True):
        model, inputs = family.build().train(), family.inputs()
        apply(model)
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Any] = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["Gemma 2", "Mixtral", "gpt-oss"])
def test_the_mode_in_which_apply_is_called_changes_nothing(name: str, mode: str) -> None:
    one, other = FAMILIES[name].build(), FAMILIES[name].build()
    with MODES[mode]():
        applied = apply(one, fused_loss=True)
    assert applied.rows == apply(other, fused_loss=True).rows
