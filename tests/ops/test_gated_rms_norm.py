"""gated_rms_norm: float64 in plain torch, the classes of transformers, gates that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import has_kernels
from torch import Tensor

import fusedops

INF = float("inf")
BACKENDS = [name for name in ("eager", "cpu", "triton") if has_kernels(name, "gated_rms_norm")]
every_backend = pytest.mark.parametrize("backend", BACKENDS)

# the module, its class, its arguments after the size, and the options of the op
CLASSES: dict[str, tuple[str, str, tuple[Any, ...], dict[str, Any]]] = {
    "Qwen3-Next": ("qwen3_next", "Qwen3NextRMSNormGated", (), {}),
    "Qwen3.5": ("qwen3_5", "Qwen3_5RMSNormGated", (), {}),
    "Kimi Linear": ("kimi_linear", "KimiLinearRMSNormGated", (), {"activation": "sigmoid"}),
    "Mamba-2": ("mamba2", "MambaRMSNormGated", (), {"gate_first": True}),
    "Granite 4": ("granitemoehybrid", "GraniteMoeHybridRMSNormGated", (), {"gate_first": True}),
    "Bamba": ("bamba", "BambaRMSNormGated", (), {"gate_first": True}),
    "Zamba2": ("zamba2", "Zamba2RMSNormGated", (24,), {"gate_first": True, "groups": 4}),
    "Nemotron-H": ("nemotron_h", "NemotronHRMSNormGated", (12,), {"gate_first": True, "groups": 8}),
}


def inputs(dtype: torch.dtype, size: int = 96) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((3, 5, size), (3, 5, size), (size,), (3, 5, size))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)  # pyright: ignore


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model", CLASSES)
def test_the_classes_of_transformers(model: str, dtype: torch.dtype, backend: str) -> None:
    module, name, more, options = CLASSES[model]
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}", reason="needs transformers")
    x, gate, weight, grad = inputs(dtype)
    norm = getattr(modeling, name)(96, *more, eps=1e-3).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(weight)
    leaves = [each.clone().requires_grad_() for each in (x, gate)]
    want = norm(*leaves)
    wanted = torch.autograd.grad(want, (*leaves, norm.weight), grad.to(want.dtype))
    got = fusedops.gated_rms_norm(*leaves, norm.weight, 1e-3, **options, backend=backend)
    found = torch.autograd.grad(got, (*leaves, norm.weight), grad)
    # the class rounds to bfloat16 before the weight, or after it
    tight = {"rtol": 2e-5, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 4e-2, "atol": 6e-2}
    for one, other in zip((got, *found), (want, *wanted)):
        torch.testing.assert_close(one, other, **tight)


@every_backend
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 6])
def test_float64_in_plain_torch(gate_first: bool, activation: str, groups: int, backend: str) -> None:
    tensors = inputs(torch.float32)
    x, gate, weight = (each.double().requires_grad_() for each in tensors[:3])
    act = getattr(torch.nn.functional, activation)(gate)
    parts = (x * act if gate_first else x).view(3, 5, groups, -1)
    normed = (parts / (parts.square().mean(-1, keepdim=True) + 0.1).sqrt()).view(3, 5, -1) * (1.5 + weight)
    want = normed if gate_first else normed * act
    leaves = [each.clone().requires_grad_() for each in tensors[:3]]
    options: dict[str, Any] = {"gate_first": gate_first, "activation": activation, "groups": groups, "offset": 1.5}
    got = fusedops.gated_rms_norm(*leaves, 0.1, **options, backend=backend)
    wanted = torch.autograd.grad(want, (x, gate, weight), tensors[3].double())
    found = torch.autograd.grad(got, leaves, tensors[3])
    for one, other in zip((got, *found), (want, *wanted)):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)


@every_backend
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_a_gate_of_minus_infinity_is_0(gate_first: bool, activation: str, backend: str) -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    gate = torch.tensor([[0.0, -INF, 2.0, -200.0]], requires_grad=True)
    y = fusedops.gated_rms_norm(x, gate, gate_first=gate_first, activation=activation, backend=backend)
    assert y.isfinite().all()
    assert y[0, 1] == 0
    assert abs(y[0, 3]) < 1e-35
    dx, dgate = torch.autograd.grad(y.sum(), (x, gate))
    assert dx.isfinite().all()
    assert dgate.isfinite().all()
    assert dgate[0, 1] == 0


@every_backend
def test_a_gate_of_infinity(backend: str) -> None:
    x, gate = torch.tensor([[1.0, 2.0]]), torch.tensor([[INF, 1.0]], requires_grad=True)
    y = fusedops.gated_rms_norm(x, gate, backend=backend)
    assert y[0, 0] == INF
    assert y[0, 1].isfinite()
    (dgate,) = torch.autograd.grad(y[0, 1], gate)
    assert dgate[0, 0] == 0
    assert fusedops.gated_rms_norm(x, gate, activation="sigmoid", backend=backend).isfinite().all()


@every_backend
def test_a_group_does_not_depend_on_the_others(backend: str) -> None:
    x, gate, weight, _ = inputs(torch.float32)
    y = fusedops.gated_rms_norm(x, gate, weight, gate_first=True, groups=4, backend=backend)
    for at in range(4):
        part = slice(24 * at, 24 * (at + 1))
        one = fusedops.gated_rms_norm(x[..., part], gate[..., part], weight[part], gate_first=True, backend=backend)
        torch.testing.assert_close(y[..., part], one, rtol=1e-6, atol=1e-6)
