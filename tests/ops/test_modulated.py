"""modulated_norm, gated_add, gated_add_modulated_norm and group_norm: forms of the arguments, memory and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.testing import OPS

B, S, H = 2, 300, 70


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape or (B, S, H))


def test_a_row_for_each_sample_is_a_view_of_a_longer_row() -> None:
    six = rows(B, 6 * H).requires_grad_()
    shift, scale, gate, *_ = six.chunk(6, 1)
    x, y = rows(), rows()
    z, s = fusedops.gated_add_modulated_norm(x, y, gate, scale, shift)
    want = x + y * gate[:, None]
    torch.testing.assert_close(s, want)
    normed = torch.nn.functional.layer_norm(want, (H,), eps=1e-6)
    torch.testing.assert_close(z, normed * (1 + scale[:, None]) + shift[:, None], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fusedops.modulated_norm(s, scale, shift), z)
    (got,) = torch.autograd.grad(z.sum() + s.sum(), six)
    (expected,) = torch.autograd.grad((normed * (1 + scale[:, None]) + shift[:, None]).sum() + want.sum(), six)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(H,), (B, H), (B, 1, H), (1, 1, H), (1, S, H), (B, S, H), (B, S, 1), (1, S, 1)])
@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_every_form_of_a_gate_has_a_gradient_of_its_shape(shape: tuple[int, ...], backend: str) -> None:
    residual, y, gate = rows(), rows(), rows(*shape).requires_grad_()
    grad = rows()
    s = fusedops.gated_add(residual, y, gate, activation="tanh", backend=backend)
    (got,) = torch.autograd.grad(s, gate, grad)
    wide = gate.detach().double().requires_grad_()
    of_rows = wide[:, None] if wide.dim() == 2 else wide
    want = residual.double() + y.double() * torch.tanh(of_rows)
    torch.testing.assert_close(s, want.float())
    torch.testing.assert_close(got, torch.autograd.grad(want, wide, grad.double())[0].float(), rtol=1e-4, atol=1e-4)


def gradients(op: str, threads: int, **call: Any) -> list[Tensor]:
    torch.set_num_threads(threads)
    leaves = [each.requires_grad_() for each in call.values() if isinstance(each, Tensor)]
    results = getattr(fusedops, op)(**call, backend="cpu")
    results = [results] if isinstance(results, Tensor) else [*results]
    return [*results, *torch.autograd.grad(results, leaves, [torch.ones_like(each) * 0.3 for each in results])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_same_bits_on_any_number_of_threads(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    rows_of_6 = {name: rows(B, 1, H) for name in ("gate", "scale", "shift")}
    both = {"residual": rows().to(dtype), "y": rows().to(dtype), **rows_of_6, "weight": rows(H), "bias": rows(H)}
    images = [
        rows(3, 12, 40, 50).to(dtype).contiguous(memory_format=each)
        for each in (torch.contiguous_format, torch.channels_last)
    ]
    try:
        for op, call in (
            ("gated_add_modulated_norm", both),
            *(("group_norm", {"x": x, "groups": 3, "weight": rows(12), "activation": "silu"}) for x in images),
        ):
            first, *others = (gradients(op, count, **call) for count in (1, 2, 5))
            for other in others:
                assert all(map(torch.equal, first, other))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0), (2, 0, 3), (2, 4, 0, 5), (1, 4, 1, 1)])
def test_zero_sizes_of_group_norm_are_those_of_torch(shape: tuple[int, ...], backend: str) -> None:
    x, weight = rows(*shape).requires_grad_(), rows(shape[1]).requires_grad_()
    y = fusedops.group_norm(x, 2, weight, backend=backend)
    want = torch.group_norm(x, 2, weight)
    torch.testing.assert_close(y, want)
    got, of_torch = (torch.autograd.grad(each.sum(), (x, weight)) for each in (y, want))
    torch.testing.assert_close(got[0], of_torch[0])
    # of no positions the sum for the weight is 0; torch's is 0 * NaN
    torch.testing.assert_close(got[1], of_torch[1] if x.shape[2:].numel() else torch.zeros_like(weight))


@pytest.mark.parametrize("backend", ["eager", "cpu"])
def test_group_norm_keeps_channels_last(backend: str) -> None:
    for rank, order in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        x = rows(2, 8, *(3, 5, 4)[: rank - 2]).contiguous(memory_format=order)
        y = fusedops.group_norm(x, 4, activation="silu", backend=backend)
        assert y.is_contiguous(memory_format=order)
        torch.testing.assert_close(y, torch.nn.functional.silu(torch.group_norm(x, 4)), rtol=1e-4, atol=1e-5)


def test_no_tokens_and_forms_that_are_refused() -> None:
    empty, scale = rows(B, 0, H), rows(B, H).requires_grad_()
    y = fusedops.modulated_norm(empty, scale)
    assert y.shape == empty.shape
    assert not torch.autograd.grad(y.sum(), scale)[0].any()
    for op, bad in (
        ("modulated_norm", {"x": rows(), "scale": rows(3, H)}),
        ("modulated_norm", {"x": rows(), "scale": rows(B, S, 1)}),
        ("modulated_norm", {"x": rows(S, H), "scale": rows(H)}),
        ("gated_add", {"residual": rows(), "y": rows(), "gate": rows(B, S, 2)}),
        ("gated_add", {"residual": rows(), "y": rows(), "gate": rows(H), "activation": "relu"}),
        ("group_norm", {"x": rows(2, 6, 4), "groups": 4}),
    ):
        assert op in OPS
        with pytest.raises(fusedops.InvalidInputError, match=op):
            getattr(fusedops, op)(**bad)
