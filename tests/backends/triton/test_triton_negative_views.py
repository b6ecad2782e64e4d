"""Tensors with the negative bit: contiguous views whose memory holds the negated values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fusedops


def negative(*shape: int) -> Tensor:
    """Return a contiguous view with the negative bit."""
    x = torch._neg_view(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    assert x.is_contiguous()
    assert x.is_neg()
    return x


@pytest.mark.parametrize("op", ["bias_gelu", "bias_dropout", "bias_dropout_add", "scaled_masked_softmax"])
def test_a_negative_view_has_its_own_values(op: str) -> None:
    contract = fusedops.ops.OPS[op]
    tensors = {"x": negative(3, 8), "bias": negative(8), "residual": negative(3, 8)}
    call = contract.bind((), {name: value for name, value in tensors.items() if name in contract.parameters})
    if "p" in contract.parameters:
        call = contract.prepared(_with(contract.parameters, call, p=0.5, seed=3))
    got = contract.call_public(*call, backend="triton")
    want = contract.reference(*[arg.resolve_neg() if isinstance(arg, Tensor) else arg for arg in call])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def _with(names: tuple[str, ...], call: tuple[object, ...], **changes: object) -> tuple[object, ...]:
    return tuple(changes.get(name, value) for name, value in zip(names, call))


def test_a_negative_gradient_keeps_its_sign() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    fusedops.bias_gelu(x, backend="triton").backward(torch._neg_view(torch.ones(2, 3)))
    assert x.grad is not None
    assert (x.grad < 0).all()


def test_a_negative_denominator_keeps_its_sign() -> None:
    logits, target = torch.zeros(2, 4, requires_grad=True), torch.tensor([1, 3])
    denominator = torch._neg_view(torch.tensor(-2.0))
    loss = fusedops.cross_entropy(logits, target, denominator=denominator, backend="triton")
    loss.backward()
    assert loss.item() == pytest.approx(math.log(4))
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.125, -0.375, 0.125, 0.125])
