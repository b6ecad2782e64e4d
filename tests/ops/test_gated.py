"""The gated activations: what peers compute, the edges of the contract, and what is written."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import megatron_peer
import pytest
import torch
from right import assert_right
from torch import Tensor

import fusedops

INF, NAN = float("inf"), float("nan")
every_backend = pytest.mark.parametrize("backend", ["cpu", "eager", "triton"])


# ------------------------------------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_mlp_of_llama(dtype: torch.dtype) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs transformers")
    config = modeling.LlamaConfig(hidden_size=32, intermediate_size=88)
    mlp, x = modeling.LlamaMLP(config).to(dtype), torch.randn(2, 5, 32).to(dtype)
    want = mlp(x)
    got = mlp.down_proj(fusedops.swiglu(mlp.gate_proj(x), mlp.up_proj(x)))
    # the model rounds silu(gate) to bfloat16 before the product
    tight = dtype is torch.float32
    torch.testing.assert_close(got, want, rtol=1e-5 if tight else 3e-2, atol=1e-6 if tight else 2e-2)


def test_the_experts_of_gpt_oss() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss", reason="needs transformers")
    config = modeling.GptOssConfig(hidden_size=8, intermediate_size=24, num_local_experts=2)
    experts = modeling.GptOssExperts(config)
    packed = (6 * torch.randn(5, 48)).requires_grad_()
    assert packed.abs().max() > experts.limit
    want = experts._apply_gate(packed)
    got = fusedops.swiglu(packed, limit=experts.limit, alpha=experts.alpha, offset=1.0, interleaved=True)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, packed, grad), torch.autograd.grad(want, packed, grad))


def test_megatrons_packed_halves() -> None:
    peer = pytest.importorskip("megatron.core.fusions.fused_bias_swiglu", reason="needs megatron-core")
    packed = torch.randn(6, 34, requires_grad=True)
    grad = torch.randn(6, 17)
    y = fusedops.swiglu(packed)
    (got,) = torch.autograd.grad(y, packed, grad)
    with megatron_peer.on_cpu():
        torch.testing.assert_close(y, peer.swiglu(packed))
        torch.testing.assert_close(got, peer.swiglu_back(grad, packed))


def test_the_mlp_of_gemma() -> None:
    modeling = pytest.importorskip("transformers.models.gemma.modeling_gemma", reason="needs transformers")
    config = modeling.GemmaConfig(hidden_size=32, intermediate_size=88, hidden_activation="gelu_pytorch_tanh")
    mlp, x = modeling.GemmaMLP(config), torch.randn(2, 5, 32)
    got = mlp.down_proj(fusedops.geglu(mlp.gate_proj(x), mlp.up_proj(x)))
    torch.testing.assert_close(got, mlp(x), rtol=1e-5, atol=1e-6)


def test_the_packed_order_of_diffusers_is_the_other_one() -> None:
    packed = torch.randn(4, 20)
    hidden, gate = packed.chunk(2, -1)
    want = hidden * torch.nn.functional.gelu(gate)
    torch.testing.assert_close(fusedops.geglu(gate, hidden, approximate="none"), want)


# ------------------------------------------------------------------------------------------------------ the contract


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflow in Triton's interpreter
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_geglu_of_infinite_gates(approximate: Any, backend: str) -> None:
    gate = torch.tensor([-INF, INF, -3e38, 3e38, 1.0]).requires_grad_()
    up = torch.full((5,), 3.0).requires_grad_()
    y = fusedops.geglu(gate, up, approximate=approximate, backend=backend)
    assert y[:4].tolist() == [0.0, INF, 0.0, INF]
    dgate, dup = torch.autograd.grad(y, [gate, up], torch.ones(5))
    assert dgate[:4].tolist() == [0.0, 3.0, 0.0, 3.0]
    assert dup[:3].tolist() == [0.0, INF, 0.0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of -inf * 0 in Triton's interpreter
@pytest.mark.parametrize(("backend", "elements"), [("cpu", 4), ("eager", 4), ("eager", 2**18), ("triton", 4)])
def test_a_gate_of_minus_infinity_gives_zero(elements: int, backend: str) -> None:
    gate = torch.full((elements,), -INF).requires_grad_()
    up = torch.full((elements,), 3.0).requires_grad_()
    y = fusedops.swiglu(gate, up, backend=backend)
    assert torch.equal(y, torch.zeros(elements))
    for gradient in torch.autograd.grad(y, [gate, up], torch.ones(elements)):
        assert torch.equal(gradient, torch.zeros(elements))
    # where the formula has no limit, NaN
    assert fusedops.swiglu(gate[:1], up[:1] * INF, backend=backend).isnan().all()


@pytest.mark.parametrize(("backend", "elements"), [("cpu", 1), ("eager", 1), ("eager", 2**16), ("triton", 1)])
def test_a_clamp_stops_the_gradient_beyond_its_bounds_and_of_nan(elements: int, backend: str) -> None:
    gate = torch.tensor([2.0, 2.001, -9.0, NAN, 1.0, 1.0, 1.0, 1.0]).repeat(elements).requires_grad_()
    up = torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, -2.0, 2.001, NAN]).repeat(elements).requires_grad_()
    y = fusedops.swiglu(gate, up, limit=2.0, backend=backend)
    dgate, dup = torch.autograd.grad(y.sum(), [gate, up])
    assert (dgate[:8] != 0).tolist() == [True, False, True, False, True, True, True, True]
    assert (dup[:8] != 0).tolist() == [True, True, True, True, True, True, False, False]
    free = torch.autograd.grad(fusedops.swiglu(gate, up, backend=backend).sum(), (gate, up))
    assert free[0][[3, 7]].isnan().all()
    assert free[1][3].isnan()


@every_backend
@pytest.mark.parametrize("grad", [NAN, INF])
def test_what_a_clamp_stops_is_0_for_any_gradient(grad: float, backend: str) -> None:
    """As in torch, whose clamp does not multiply by 0: experts have infinity there where a weight is infinite."""
    gate, up = (torch.tensor([[beyond, 0.01]], requires_grad=True) for beyond in (3.0, -1.0))
    y = fusedops.swiglu(gate, up, limit=0.125, backend=backend)
    for gradient in torch.autograd.grad(y, (gate, up), torch.tensor([[grad, 1.0]])):
        assert gradient[0, 0] == 0
        assert gradient[0, 1].isfinite()


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_limit_is_compared_in_float32(dtype: torch.dtype, backend: str) -> None:
    limit = 1e-5  # below the 16-bit number next to it
    gate, up = (torch.tensor([limit, 0.0]).to(dtype).requires_grad_() for _ in range(2))
    assert gate[0].float() > limit
    y = fusedops.swiglu(gate, up, limit=limit, offset=1.0, backend=backend)
    for gradient in torch.autograd.grad(y, [gate, up], torch.ones(2, dtype=dtype)):
        assert gradient[0] == 0


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": fusedops.swiglu,
    "gpt_oss": partial(fusedops.swiglu, limit=1.5, alpha=1.702, offset=1.0),
    "geglu_tanh": fusedops.geglu,
    "geglu_erf": partial(fusedops.geglu, approximate="none"),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every_backend
@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_values(name: str, backend: str) -> None:
    f = partial(FUNCTIONS[name], backend=backend)
    gate = torch.tensor([-INF, -1e30, -200.0, -90.0, -0.0, 0.0, 200.0, 1e30, INF, NAN])
    y = f(gate, torch.ones_like(gate))
    factor = 2.0 if name == "gpt_oss" else 1.0
    largest = 1.5 / (1 + math.exp(-1.702 * 1.5)) if name == "gpt_oss" else None
    assert not y[:3].any()
    assert y[3].abs() < 1e-30
    assert not y[4:6].any()
    for at, value in ((6, 200.0), (7, 1e30), (8, INF)):
        assert y[at] == pytest.approx(factor * (value if largest is None else largest), rel=1e-6)
    assert y[9].isnan()
    assert f(torch.ones(1), torch.tensor([NAN])).isnan()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every_backend
@pytest.mark.parametrize("alpha", [0.0, -1.0, 3e38, -3e38])
def test_alphas(alpha: float, backend: str) -> None:
    gate, up = torch.tensor([-2.0, -0.5, 0.0, 1e-3, 3.0], requires_grad=True), torch.ones(5)
    with fusedops.use(backend, fallback="raise"):
        assert_right("swiglu", gate, up, alpha=alpha)
        if alpha < 0:
            assert fusedops.swiglu(torch.tensor([INF]), up[:1], alpha=alpha) == 0
        (gradient,) = torch.autograd.grad(fusedops.swiglu(gate, up, alpha=alpha).sum(), gate)
    if abs(alpha) > 1:
        slope = torch.where(gate * alpha > 0, 1.0, torch.where(gate == 0, 0.5, 0.0))
        torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@every_backend
def test_a_sigmoid_that_is_zero_gives_zero_for_the_largest_numbers(backend: str) -> None:
    gate = torch.tensor([-150.0, -1e4, -INF], requires_grad=True)
    y = fusedops.swiglu(gate, torch.zeros(3), offset=3e38, backend=backend)
    (gradient,) = torch.autograd.grad(y.sum(), gate)
    assert not y.any()
    assert not gradient.any()
