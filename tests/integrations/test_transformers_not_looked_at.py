"""The last line of apply's table: modules without a row whose code calls a function that an op can replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fusedops.errors import FusedOpsWarning
from fusedops.integrations.transformers import apply


class Root(nn.Module):  # an RMSNorm whose name does not say so, with a parameter of another name
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w


class RootNorm(Root):
    pass


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(*self.qkv(x).chunk(3, -1))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mixed(q, k) @ v


def mixed(q: Tensor, k: Tensor) -> Tensor:
    return (lambda scores: scores.softmax(-1))(q @ k.transpose(-1, -2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(8)  # a child of the name of a function
        self.mixing, self.root = Mixing(), Root()

    def forward(self, x: Tensor) -> Tensor:
        return self.root(x + self.mixing(self.layer_norm(x)))


class Gated(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Silu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


def last_line(model: nn.Module) -> str:
    return next((note for note in apply(model).notes if note.startswith("not looked at")), "")


def test_modules_without_a_row_are_counted_with_the_functions_that_they_call() -> None:
    model = nn.Sequential(Block(), Block(), RootNorm(), nn.Linear(8, 8), nn.SiLU(), nn.Dropout(), nn.ReLU())
    applied = apply(model)
    assert applied.notes == ("not looked at: 2 Mixing (softmax), 2 Root (rsqrt)",)
    assert str(applied).endswith(f"\n{applied.notes[0]}")
    assert f"<p>{applied.notes[0]}</p>" in applied._repr_html_()
    reasons = {row.module: row.left for row in applied.rows}
    assert reasons["RootNorm"] == "it has a parameter w, expected a weight, a bias, or neither"
    applied.remove()
    assert apply(model).notes == applied.notes


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1), nn.GELU(), nn.SiLU()), ""),
        (nn.Sequential(nn.LayerNorm(8), nn.CrossEntropyLoss()), "1 CrossEntropyLoss (cross_entropy)"),
        (nn.Sequential(nn.LayerNorm(8), Silu()), "1 Silu (silu)"),
        (Gated(Silu()), ""),  # the replaced MLP calls none of its activation
        (nn.MultiheadAttention(8, 2), "1 MultiheadAttention (multi_head_attention_forward)"),
        (
            nn.TransformerDecoderLayer(8, 2),
            "2 MultiheadAttention (multi_head_attention_forward)",
        ),
        (
            nn.TransformerEncoderLayer(8, 2),  # whose norms do not run in evaluation
            "1 TransformerEncoderLayer (_transformer_encoder_layer_fwd), "
            "1 MultiheadAttention (multi_head_attention_forward)",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:apply")
def test_a_module_of_torch(model: nn.Module, line: str) -> None:
    assert last_line(model) == (f"not looked at: {line}" if line else "")


@pytest.mark.parametrize("kind", ["Llama", "Gpt2", "Mpt"])
def test_models_of_transformers_whose_modules_have_rows_have_no_such_line(kind: str) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    configs: dict[str, Any] = {
        "Llama": lambda: transformers.LlamaConfig(**sizes, intermediate_size=48, pad_token_id=0),
        "Gpt2": lambda: transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=64),
        # its attention is left, in the row of the model
        "Mpt": lambda: transformers.MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=16),
    }
    assert last_line(transformers.AutoModelForCausalLM.from_config(configs[kind]())) == ""


def test_the_warning_that_nothing_is_replaced_has_the_line() -> None:
    with pytest.warns(FusedOpsWarning, match=r"nothing is replaced; .*\nnot looked at: 1 Mixing \(softmax\)$"):
        apply(Mixing())
