"""The norms beside torch's and transformers': the same results, state dicts that load, and the same gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
import fusedops.nn

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BACKENDS = ("eager", "triton")


def both(mine: Any, theirs: Any, tensors: list[Tensor], grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return output and gradients of two functions of the same tensors."""
    results: list[list[Tensor]] = []
    for function in (mine, theirs):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        y = function(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
    return results[0], results[1]


def close(got: list[Tensor], want: list[Tensor], roundings: float = 1.5) -> None:
    """Assert that results differ by that many roundings to their dtype, relative to the largest element."""
    for one, other in zip(got, want):
        assert one.dtype is other.dtype
        room = roundings * torch.finfo(one.dtype).eps * max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one, other, rtol=roundings * torch.finfo(one.dtype).eps, atol=room)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_a_norm_is_torchs(name: str, dtype: torch.dtype, backend: str) -> None:
    vectors = [torch.randn(48).to(dtype) for _ in ("weight", "bias")[: 1 + (name == "layer_norm")]]
    got, want = both(
        lambda x, *vectors: getattr(fusedops, name)(x, *vectors, eps=1e-5, backend=backend),
        lambda x, *vectors: getattr(torch.nn.functional, name)(x, (48,), *vectors, eps=1e-5),
        [torch.randn(4, 6, 48).to(dtype), *vectors],
        torch.randn(4, 6, 48).to(dtype),
    )
    close(got, want, 4 if dtype in (BF16, F16) else 40)  # torch rounds within backward


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_the_modules_load_what_transformers_has(dtype: torch.dtype) -> None:
    """Llama rounds before the weight too, so its 16-bit results are a rounding away; Gemma's are the same bits."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="needs transformers")
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma", reason="needs transformers")
    x = torch.randn(3, 5, 64).to(dtype)
    for theirs, mine, roundings in (
        (llama.LlamaRMSNorm(64, eps=1e-5), fusedops.nn.RMSNorm(64, 1e-5), 1.5),
        (gemma.GemmaRMSNorm(64, eps=1e-6), fusedops.nn.RMSNorm(64, offset=1.0), 0.0),
    ):
        theirs.to(dtype)
        close([mine.to(dtype)(x).detach()], [theirs(x).detach()])  # as initialised
        torch.nn.init.normal_(theirs.weight)
        mine.load_state_dict(theirs.state_dict())
        close([mine(x).detach()], [theirs(x).detach()], roundings if dtype is BF16 else 4)


def test_the_modules_load_what_torch_has() -> None:
    x = torch.randn(3, 5, 64)
    theirs, mine = torch.nn.LayerNorm(64), fusedops.nn.LayerNorm(64)
    assert list(mine.state_dict()) == list(theirs.state_dict()) == ["weight", "bias"]
    torch.nn.init.normal_(theirs.weight)
    torch.nn.init.normal_(theirs.bias)
    mine.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(mine(x), theirs(x))
    plain = torch.nn.RMSNorm(64, eps=1e-6)
    loaded = fusedops.nn.RMSNorm(64)
    loaded.load_state_dict(plain.state_dict())
    torch.testing.assert_close(loaded(x), plain(x))


def test_a_residual_gives_the_norm_and_the_stream() -> None:
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    for module, op in (
        (fusedops.nn.RMSNorm(8, offset=1.0), lambda: fusedops.add_rms_norm(x, residual, torch.zeros(8), offset=1.0)),
        (fusedops.nn.LayerNorm(8), lambda: fusedops.add_layer_norm(x, residual, torch.ones(8), torch.zeros(8))),
    ):
        y, stream = module(x, residual)
        assert torch.equal(stream, x + residual)
        torch.testing.assert_close([y, stream], [*op()])
        torch.testing.assert_close(y, module(stream))


def test_a_float32_stream_stays_float32() -> None:
    """x and the result of the norm in bfloat16, for the next layer's product; the sum in float32."""
    x, residual = torch.randn(4, 32, dtype=BF16, requires_grad=True), torch.randn(4, 32, requires_grad=True)
    for norm in (fusedops.add_rms_norm, fusedops.add_layer_norm):
        y, stream = norm(x, residual)
        assert (y.dtype, stream.dtype) == (BF16, F32)
        assert torch.equal(stream, x.float() + residual)
        dx, dresidual = torch.autograd.grad([y.sum(), stream.sum()], [x, residual])
        assert (dx.dtype, dresidual.dtype) == (BF16, F32)
        torch.testing.assert_close(dx, dresidual.to(BF16))


@pytest.mark.parametrize(
    ("module", "text", "names"),
    [
        (fusedops.nn.RMSNorm(8), "RMSNorm(8, eps=1e-06)", ["weight"]),
        (
            fusedops.nn.RMSNorm(8, offset=1.0, backend="eager"),
            "RMSNorm(8, eps=1e-06, offset=1.0, backend='eager')",
            ["weight"],
        ),
        (fusedops.nn.RMSNorm(8, elementwise_affine=False), "RMSNorm(8, eps=1e-06, elementwise_affine=False)", []),
        (fusedops.nn.LayerNorm(8), "LayerNorm(8, eps=1e-05)", ["weight", "bias"]),
        (fusedops.nn.LayerNorm(8, bias=False, dtype=BF16), "LayerNorm(8, eps=1e-05, bias=False)", ["weight"]),
        (fusedops.nn.LayerNorm(8, elementwise_affine=False), "LayerNorm(8, eps=1e-05, elementwise_affine=False)", []),
    ],
)
def test_settings_and_parameters(module: torch.nn.Module, text: str, names: list[str]) -> None:
    assert repr(module) == text
    assert list(module.state_dict()) == names
    assert repr(copy.deepcopy(module)) == repr(pickle.loads(pickle.dumps(module))) == text
    y = module(torch.randn(2, 8))
    torch.testing.assert_close(y.square().mean(-1), torch.ones(2), rtol=0.02, atol=0.02)
