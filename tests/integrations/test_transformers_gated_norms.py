"""apply on norms beside a gate: which it replaces, with the same results, and which it leaves."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedops

pytest.importorskip("transformers", reason="needs transformers")

from fusedops.integrations.transformers import Row, apply

F = nn.functional
CLASSES = {  # and their group_size, which those of 32 have in newer releases of transformers alone
    "qwen3_next.Qwen3NextRMSNormGated": 32,
    "kimi_linear.KimiLinearRMSNormGated": 32,
    "mamba2.MambaRMSNormGated": 32,
    "granitemoehybrid.GraniteMoeHybridRMSNormGated": 32,
    "zamba2.Zamba2RMSNormGated": 8,
    "nemotron_h.NemotronHRMSNormGated": 16,
}
F32, BF16 = torch.float32, torch.bfloat16


def norm_of(path: str) -> Any:
    module, name = path.split(".")
    kind: Any = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)
    norm = kind(32, CLASSES[path]) if "group_size" in inspect.signature(kind).parameters else kind(32)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm


@pytest.mark.parametrize("path", CLASSES)
@pytest.mark.parametrize(("given", "kept"), [(F32, F32), (BF16, BF16), (BF16, F32)], ids=str)
def test_a_class_of_transformers_is_replaced(path: str, given: torch.dtype, kept: torch.dtype) -> None:
    norm = norm_of(path).to(kept)
    x, gate = (torch.randn(2, 5, 32).to(given) for _ in range(2))
    own = copy.deepcopy(norm)
    applied = apply(norm)
    assert applied.rows == (Row(path.split(".")[1], "gated_rms_norm", 1),)
    tolerance = 2e-5 if given is F32 else 4e-2
    fusedops.reset_stats()
    for call in (lambda module: module(x, gate), lambda module: module(gate=gate, hidden_states=x)):
        result, expected = call(norm), call(own)
        assert result.dtype is expected.dtype
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert fusedops.stats().counts
    applied.remove()
    assert type(norm) is type(own)
    assert torch.equal(norm(x, gate), own(x, gate))


def test_without_a_gate_the_own_forward_runs() -> None:
    norm = norm_of("mamba2.MambaRMSNormGated")
    own, x = copy.deepcopy(norm), torch.randn(3, 32)
    apply(norm)
    fusedops.reset_stats()
    assert torch.equal(norm(x), own(x))
    assert not fusedops.stats().counts


class TinyGatedNorm(nn.Module):
    """A norm whose forward is one of FORMS."""

    def __init__(self, formula: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.eps, self.formula = nn.Parameter(torch.ones(16)), 1e-5, formula

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.formula(self, x, gate)


def rms(norm: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight


LOOK_ALIKES: dict[str, Callable[..., Tensor]] = {
    "another activation": lambda norm, x, gate: rms(norm, x) * torch.relu(gate),
    "the gate is not activated": lambda norm, x, gate: rms(norm, x) * gate,
    "a norm of the gate": lambda norm, x, gate: rms(norm, gate) * F.silu(x),
    "a residual": lambda norm, x, gate: rms(norm, x) * F.silu(gate) + x,
    "half of it": lambda norm, x, gate: 0.5 * rms(norm, x) * F.silu(gate),
    "a dim of size 1 is left out": lambda norm, x, gate: (rms(norm, x) * F.silu(gate)).squeeze(-2),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_only_looks_like_it_is_left(name: str) -> None:
    norm = TinyGatedNorm(LOOK_ALIKES[name])
    (row,) = apply(nn.ModuleList([norm, nn.RMSNorm(16)])).rows[:1]
    assert row == Row("TinyGatedNorm", "", 1, "its results are not those of gated_rms_norm", "gated norm")
    assert type(norm) is TinyGatedNorm


def test_the_formula_itself_is_replaced_and_ops_without_it_leave_it() -> None:
    norm = TinyGatedNorm(lambda norm, x, gate: rms(norm, x) * torch.sigmoid(gate))
    (row, *_) = apply(nn.ModuleList([norm, nn.RMSNorm(16)]), ops=["rms_norm"]).rows
    assert (row.op, row.left) == ("", "ops has no gated_rms_norm")
    assert apply(norm).rows == (Row("TinyGatedNorm", "gated_rms_norm", 1),)
