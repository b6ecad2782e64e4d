"""causal_conv1d on cpu: the same bits on any number of threads, and for a sequence beside any others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops

BOUNDS = torch.tensor([0, 700, 701, 1500], dtype=torch.int32)


def results(channels: int, length: int, by_channel: bool, batch: int = 1, **options: Any) -> list[Tensor]:
    """Return y, the state, and the gradients of x, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    shapes = (batch, channels, length), (channels, 4), (channels,)
    x, weight, bias = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    given = x.mT.contiguous().mT if by_channel else x
    y, state = fusedops.causal_conv1d(
        given, weight, bias, activation="silu", return_state=True, backend="cpu", **options
    )
    grads = [torch.randn(each.shape, generator=generator) for each in (y, state)]
    return [y.detach(), state.detach(), *torch.autograd.grad((y, state), (x, weight, bias), grads)]


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("options", [{"batch": 3}, {"cu_seqlens": BOUNDS}], ids=["batches", "packed"])
def test_the_same_bits_on_any_number_of_threads(by_channel: bool, options: dict[str, Any]) -> None:
    """Several rows and tiles, several parts of positions, several chunks of a sum."""
    before = torch.get_num_threads()
    try:
        found: list[list[Tensor]] = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results(160, 1500, by_channel, **options))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("width", [3, 4])
@pytest.mark.parametrize("channels", [1, 15, 700])
def test_a_token_has_the_bits_of_the_sequence(width: int, channels: int) -> None:
    """One position is computed by another loop, which takes states and weights apart in registers."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((2, channels, 9), (channels, width)))
    bias = torch.randn(channels, generator=generator)
    options: dict[str, Any] = {"activation": "silu", "return_state": True, "backend": "cpu"}
    _, state = fusedops.causal_conv1d(x[..., :8].contiguous(), weight, bias, **options)
    y, after = fusedops.causal_conv1d(x[..., 8:], weight, bias, initial_state=state, **options)
    whole, last = fusedops.causal_conv1d(x.mT.contiguous().mT, weight, bias, **options)
    assert torch.equal(y, whole[..., 8:])
    assert torch.equal(after, last)
