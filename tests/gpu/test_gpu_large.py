"""Tensors of more than 2**31 elements on a GPU. `make gpu` runs this alone: it takes up to 50 GB of its memory."""

from __future__ import annotations

import pytest
import torch
from gpu_calls import CUDA, DEVICE, HERE, SOFTMAX, softmax_of
from torch import Tensor

import fusedops
from fusedops import Case, testing
from fusedops.philox import philox, threshold

if not HERE:
    pytest.skip("needs a GPU: `make gpu` runs these", allow_module_level=True)

ROWS = 2**21 + 64 if CUDA else 128  # of 1024 columns


def test_more_elements_than_32_bits_count_in_softmax_gelu_and_dropout() -> None:
    """The rows behind 2**31 elements, and behind 2**31 bytes, are as good as the first."""
    rows, width = ROWS, 1024
    x = torch.randn(64, width, dtype=torch.bfloat16, device=DEVICE).repeat(rows // 64, 1)
    grad = torch.randn(64, width, dtype=torch.bfloat16, device=DEVICE).repeat(rows // 64, 1)
    assert not CUDA or x.numel() > 2**31

    def alike(y: torch.Tensor, what: str) -> None:
        first = y[:64]
        for start in (rows // 2, rows - 64):
            assert torch.equal(y[start // 64 * 64 :][:64], first), what

    leaf = x.view(1, 1, rows, width).requires_grad_()
    y = softmax_of(leaf)
    alike(y.detach()[0, 0], "softmax")
    small = torch.softmax(x[:64].detach().double() * 0.125, -1)
    testing.assert_within(y[0, 0, :64].cpu(), small.cpu(), SOFTMAX.evidence.tolerance[x.dtype], "softmax")
    alike(torch.autograd.grad(y, leaf, grad.view_as(y))[0][0, 0], "gradient of softmax")
    del leaf, y
    bias = torch.randn(width, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    leaf = x.detach().requires_grad_()
    y = fusedops.bias_gelu(leaf, bias)
    alike(y.detach(), "bias_gelu")
    dx, dbias = torch.autograd.grad(y, (leaf, bias), grad)
    alike(dx, "gradient of bias_gelu")
    del y, leaf
    wide = dx[:64].double().sum(0) * (rows // 64)
    assert ((dbias.double() - wide).abs() <= 0.02 * wide.abs() + 0.02 * wide.abs().mean()).all()
    del dx
    y = fusedops.bias_dropout(torch.ones_like(x), None, 0.5, seed=7)
    tail = torch.arange((y.numel() - 4096) // 4, y.numel() // 4)
    words = torch.stack(philox(tail, torch.tensor([7])), -1).flatten()
    assert torch.equal(y.view(-1)[-4096:].cpu() != 0, words >= threshold(0.5))


@pytest.mark.parametrize("name", ["add_rms_norm", "cross_entropy", "layer_norm", "swiglu"])
def test_more_elements_than_32_bits_count_in_other_ops(name: str) -> None:
    op, rows = testing.OPS[name], ROWS
    assert op.evidence.sweep is not None
    call = dict(op.evidence.sweep(64, 1024)) | ({"reduction": "none"} if "reduction" in op.parameters else {})
    small = testing.arguments(op, Case("rows", call), torch.bfloat16, DEVICE)
    leaves = [
        arg.repeat(rows // 64, *[1] * (arg.dim() - 1)) if isinstance(arg, Tensor) and arg.shape[0] == 64 else arg
        for arg in small
    ]
    for parameter, arg in zip(op.parameters, leaves):
        if parameter in op.differentiable and isinstance(arg, Tensor):
            arg.requires_grad_()
    y = op.as_tuple(op.call_public(*leaves))[0]
    first = leaves[0]
    grad = torch.randn_like(y[:64]).repeat(rows // 64, *[1] * (y.dim() - 1))
    (gradient,) = torch.autograd.grad(y, first, grad)
    for each in (y.detach(), gradient):
        for start in (rows // 2 // 64 * 64, rows - 64):
            assert torch.equal(each[start : start + 64], each[:64])
