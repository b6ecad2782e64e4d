"""The eager kernels of bias_dropout and bias_dropout_add: copies, the mask, the generator, dtypes."""

from __future__ import annotations

import pytest
import torch
from right import assert_right
from torch import Tensor

import fusedops


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("training", [True, False])
def test_a_result_without_bias_and_dropout_is_a_copy(device: str, training: bool) -> None:
    x = torch.ones(6, 50, device=device)
    y = fusedops.bias_dropout(x, p=0.0, training=training, backend="eager")
    y.zero_()
    assert x.cpu().all(), "a change of the result changed x"


def test_forward_and_backward_use_one_mask() -> None:
    x, bias, residual = torch.randn(300, 1000, requires_grad=True), torch.randn(1000), torch.randn(300, 1000)
    for call in (
        lambda: fusedops.bias_dropout(x, bias, 0.4, backend="eager"),
        lambda: fusedops.bias_dropout_add(x, bias, residual, 0.4, backend="eager") - residual,
    ):
        y = call()
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(dx == 0, y == 0)
        assert torch.equal(dx[dx != 0], torch.full_like(dx[dx != 0], 1 / 0.6))


def test_the_generator_governs() -> None:
    x = torch.ones(4000)

    def draw(seed: int | None = None) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return fusedops.bias_dropout(x, p=0.5, backend="eager")

    first = draw(1)
    assert not torch.equal(first, draw())
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, draw(2))
    with torch.random.fork_rng():
        inside = draw(7)
    assert torch.equal(draw(7), inside)
    state = torch.get_rng_state()
    fusedops.bias_dropout(x, p=0.0, backend="eager")
    fusedops.bias_dropout_add(x, None, x, 0.5, training=False, backend="eager")
    fusedops.bias_dropout(x, p=0.5, seed=3, backend="eager")
    assert torch.equal(torch.get_rng_state(), state)


def test_a_float32_residual_is_not_narrowed() -> None:
    with fusedops.use("eager", fallback="raise"):
        bias = torch.randn(70).to(torch.bfloat16)
        assert_right("bias_dropout_add", torch.randn(50, 70).to(torch.bfloat16), bias, torch.randn(50, 70), 0.5, seed=5)
    # and the other way: x is rounded to the residual's dtype before anything is added
    x, residual = 100 + torch.randn(50, 70), torch.zeros(50, 70, dtype=torch.bfloat16)
    options = {"training": False, "backend": "eager"}
    assert torch.equal(fusedops.bias_dropout_add(x, None, residual, 0.5, **options), x.to(torch.bfloat16))
    y = fusedops.bias_dropout_add(x, torch.full((70,), -100.0), residual, 0.5, **options)
    assert torch.equal(y, (x.to(torch.bfloat16).float() - 100).to(torch.bfloat16))
