"""The autograd Functions and functional forms of apex's softmax, beside the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_cases import DTYPES, NP, SK, SQ, B, assert_same, masked, tensor, with_gradients
from torch import Tensor
from torch.testing import assert_close

import fusedops
from fusedops.compat import megatron as ours

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own

FUNCTIONS: dict[str, tuple[Any, Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "ScaledMaskedSoftmax": (
        ours.ScaledMaskedSoftmax,
        lambda x, mask: ours.ScaledMaskedSoftmax.apply(x, mask, 0.3),
        lambda x, mask: fusedops.scaled_masked_softmax(x, mask, 0.3),
    ),
    "GenericScaledMaskedSoftmax": (
        ours.GenericScaledMaskedSoftmax,
        lambda x, mask: ours.GenericScaledMaskedSoftmax.apply(x, mask, 0.3),
        lambda x, mask: fusedops.scaled_masked_softmax(x, mask, 0.3),
    ),
    "ScaledUpperTriangMaskedSoftmax": (
        ours.ScaledUpperTriangMaskedSoftmax,
        lambda x, mask: ours.ScaledUpperTriangMaskedSoftmax.apply(x.view(-1, SQ, SK), 0.3).view_as(x),
        lambda x, mask: fusedops.scaled_masked_softmax(x, None, 0.3, causal=True),
    ),
    "ScaledSoftmax": (
        ours.ScaledSoftmax,
        lambda x, mask: ours.ScaledSoftmax.apply(x, 0.3),
        lambda x, mask: fusedops.scaled_masked_softmax(x, None, 0.3),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_is_the_op(name: str, dtype: torch.dtype) -> None:
    _, apply, op = FUNCTIONS[name]
    x, mask = tensor(B, NP, SQ, SK, dtype=dtype), masked(B, 1, SQ, SK)
    got, want = with_gradients(lambda x: apply(x, mask), x), with_gradients(lambda x: op(x, mask), x)
    assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_backward_serve_subclasses_and_compile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, apply, op = FUNCTIONS[name]
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    want = with_gradients(lambda x: op(x, mask), x)
    torch._dynamo.reset()
    compiled = torch.compile(apply, backend="aot_eager", fullgraph=True)
    assert_close(with_gradients(lambda x: compiled(x, mask), x), want)

    class Sub(cls):
        called = False

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            Sub.called = True
            return cls.forward(ctx, *args)

    monkeypatch.setattr(ours, name, Sub)
    assert_close(with_gradients(lambda x: apply(x, mask), x), want)
    assert Sub.called


def test_functions_under_torch_func() -> None:
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)

    def gradient(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return torch.func.grad(lambda x: (function(x, mask) ** 2).sum())(x)

    for _, apply, op in FUNCTIONS.values():
        assert_close(gradient(apply), gradient(op))


def test_grad_output_is_not_written() -> None:
    """apex's causal backward writes into it: apex#1430, #1587."""
    x = tensor(4, SQ, SK).requires_grad_()
    grad = tensor(4, SQ, SK, seed=2)
    before = grad.clone()
    ours.ScaledUpperTriangMaskedSoftmax.apply(x, 0.5).backward(grad)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("name", ["ScaledMaskedSoftmax", "ScaledUpperTriangMaskedSoftmax", "ScaledSoftmax"])
def test_as_the_cuda_kernels_of_the_original(peer: Any, name: str) -> None:
    extension = {
        "ScaledMaskedSoftmax": "scaled_masked_softmax_cuda",
        "ScaledUpperTriangMaskedSoftmax": "scaled_upper_triang_masked_softmax_cuda",
        "ScaledSoftmax": "scaled_softmax_cuda",
    }[name]
    pytest.importorskip(extension, reason=f"needs {extension}, apex's CUDA extension")
    shape = (8, 32, 32) if "Triang" in name else (4, 2, 32, 32)
    x = tensor(*shape, dtype=torch.float16).cuda()
    args = (masked(4, 1, 32, 32).cuda(), 0.3) if name == "ScaledMaskedSoftmax" else (0.3,)
    want = with_gradients(lambda x: getattr(peer.softmax, name).apply(x, *args), x)
    assert_same(with_gradients(lambda x: getattr(ours, name).apply(x, *args), x), want, torch.float16)


# ------------------------------------------------------------------------------------------ apex's functional forms


def test_functional_forms() -> None:
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    op = fusedops.scaled_masked_softmax
    assert torch.equal(ours.scaled_masked_softmax(x, mask, 0.3), op(x, mask, 0.3))
    assert torch.equal(ours.scaled_masked_softmax(x, None, 0.3), op(x, None, 0.3))
    assert torch.equal(ours.generic_scaled_masked_softmax(x, mask, 0.3), op(x, mask, 0.3))
    assert torch.equal(ours.scaled_softmax(x, 0.3), op(x, None, 0.3))
    assert torch.equal(ours.scaled_upper_triang_masked_softmax(x, None, 0.3), op(x, None, 0.3, causal=True))
    assert torch.equal(ours.scaled_upper_triang_masked_softmax(x, mask, 0.3), op(x, mask, 0.3, causal=True))
    with pytest.raises(AssertionError, match="causal mask is only for self attention: got 4 queries and 8 keys"):
        ours.scaled_upper_triang_masked_softmax(x[:, :, :4], None, 0.3)


def test_functional_forms_take_the_dtype_of_autocast() -> None:
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    with torch.autocast("cpu", torch.bfloat16):
        for y in (
            ours.scaled_masked_softmax(x, mask, 0.3),
            ours.generic_scaled_masked_softmax(x, mask, 0.3),
            ours.scaled_upper_triang_masked_softmax(x, None, 0.3),
            ours.scaled_softmax(x, 0.3),
        ):
            assert y.dtype == torch.bfloat16
        assert ours.scaled_softmax(x.double(), 0.3).dtype == torch.float64
    assert ours.scaled_softmax(x, 0.3).dtype == torch.float32


def test_generic_module() -> None:
    x, mask = tensor(B, NP, SQ, SK), masked(B, 1, SQ, SK)
    module = ours.GenericFusedScaleMaskSoftmax(False, False, True, None, True, 0.3)
    assert torch.equal(module(x, mask), fusedops.scaled_masked_softmax(x, mask, 0.3))
