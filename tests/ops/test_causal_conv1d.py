"""causal_conv1d: torch's own convolution, packed sequences apart bit for bit, tokens one by one, bounds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from calls import has_kernels
from torch import Tensor

import fusedops

NAN, INF = float("nan"), float("inf")
BACKENDS = [name for name in ("eager", "cpu", "triton") if has_kernels(name, "causal_conv1d")]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_width = pytest.mark.parametrize("width", [2, 4])
BOUNDS = torch.tensor([0, 5, 5, 6, 21, 23, 40], dtype=torch.int32)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(y: Any, tensors: dict[str, Tensor], seed: int = 9) -> list[Tensor]:
    outputs = [y] if isinstance(y, Tensor) else [*y]
    grads = [numbers(*each.shape, seed=seed + at) for at, each in enumerate(outputs)]
    return [*torch.autograd.grad(outputs, [*tensors.values()], grads)]


def leaves(**tensors: Tensor) -> dict[str, Tensor]:
    return {name: each.clone().requires_grad_() for name, each in tensors.items()}


@every_backend
@every_width
def test_it_is_the_convolution_of_torch(width: int, backend: str) -> None:
    ours = leaves(x=numbers(2, 6, 40), weight=numbers(6, width, seed=1), bias=numbers(6, seed=2))
    theirs = leaves(**ours)
    want = torch.nn.functional.conv1d(
        torch.nn.functional.pad(theirs["x"], (width - 1, 0)), theirs["weight"][:, None], theirs["bias"], groups=6
    )
    got = fusedops.causal_conv1d(**ours, backend=backend)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(got, ours), gradients(want, theirs)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


def packed(width: int, backend: str, transposed: bool, **changes: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return y and the state, and the gradients of x, weight, bias and the initial state, of packed sequences."""
    x = numbers(1, 7, 40)
    tensors = {"x": x, "weight": numbers(7, width, seed=1), "bias": numbers(7, seed=2)}
    tensors = leaves(**tensors, initial_state=numbers(6, 7, width - 1, seed=3), **{})
    for name, value in changes.items():
        tensors[name] = value.clone().requires_grad_()
    x = tensors["x"]
    given = x.mT.contiguous().mT if transposed else x
    others = {name: each for name, each in tensors.items() if name != "x"}
    results = fusedops.causal_conv1d(
        given, **others, activation="silu", return_state=True, cu_seqlens=BOUNDS, backend=backend
    )
    return [each.detach() for each in results], gradients(results, tensors)


@every_backend
@pytest.mark.parametrize("width", [3, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_packed_sequence_reaches_no_other_bit(width: int, transposed: bool, backend: str) -> None:
    """Another sequence of NaN leaves the bits of each one, forward and backward."""
    (y, state), (dx, *_, dinitial) = packed(width, backend, transposed)
    changed = numbers(1, 7, 40)
    changed[..., 6:21] = NAN
    before = numbers(6, 7, width - 1, seed=3)
    before[3] = NAN
    (y_other, state_other), (dx_other, *_, dinitial_other) = packed(
        width, backend, transposed, x=changed, initial_state=before
    )
    others = [*range(6), *range(21, 40)]
    assert torch.equal(y[..., others], y_other[..., others])
    assert torch.equal(dx[..., others], dx_other[..., others])
    sequences = [0, 1, 2, 4, 5]
    assert torch.equal(state[sequences], state_other[sequences])
    assert torch.equal(dinitial[sequences], dinitial_other[sequences])
    assert not torch.equal(y[..., 6:21], y_other[..., 6:21])


@every_backend
@every_width
def test_packed_sequences_are_those_of_calls_of_their_own(width: int, backend: str) -> None:
    (y, state), found = packed(width, backend, False)
    parts: list[Tensor] = []
    states: list[Tensor] = []
    tensors = leaves(x=numbers(1, 7, 40), weight=numbers(7, width, seed=1), bias=numbers(7, seed=2))
    tensors |= leaves(initial_state=numbers(6, 7, width - 1, seed=3))
    bounds = BOUNDS.tolist()
    for n, (start, end) in enumerate(pairwise(bounds)):
        part, after = fusedops.causal_conv1d(
            tensors["x"][..., start:end],
            tensors["weight"],
            tensors["bias"],
            activation="silu",
            initial_state=tensors["initial_state"][n : n + 1],
            return_state=True,
            backend=backend,
        )
        parts.append(part)
        states.append(after)
    whole, last = torch.cat(parts, -1), torch.cat(states)
    torch.testing.assert_close(y, whole, rtol=1e-6, atol=1e-6)
    assert torch.equal(state, last)
    for one, other in zip(found, gradients((whole, last), tensors)):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


@every_backend
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_one_by_one_are_the_whole(dtype: torch.dtype, activation: str | None, backend: str) -> None:
    """The state after each token is the initial state of the next; parts of two and three tokens too."""
    x, weight, bias = numbers(2, 35, 11, dtype=dtype), numbers(35, 4, seed=1, dtype=dtype), numbers(35, seed=2)
    want, last = fusedops.causal_conv1d(x, weight, bias, activation=activation, return_state=True, backend=backend)
    state, parts, at = None, list[Tensor](), 0
    for count in (1, 1, 1, 1, 2, 3, 1, 1):
        y, state = fusedops.causal_conv1d(
            x[..., at : at + count],
            weight,
            bias,
            activation=activation,
            initial_state=state,
            return_state=True,
            backend=backend,
        )
        parts.append(y)
        at += count
    assert at == 11
    assert state is not None
    assert torch.equal(state, last)
    torch.testing.assert_close(torch.cat(parts, -1), want, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=1e-6)


@every_backend
@pytest.mark.parametrize("shape", [(2, 5, 9), (3, 64, 33), (1, 3, 1)])
def test_y_has_the_order_of_x_in_memory(shape: tuple[int, int, int], backend: str) -> None:
    x, weight = numbers(*shape), numbers(shape[1], 4, seed=1)
    rows = x.mT.contiguous().mT
    y, of_rows = (fusedops.causal_conv1d(each, weight, backend=backend) for each in (x, rows))
    torch.testing.assert_close(y, of_rows, rtol=1e-6, atol=1e-6)
    assert y.stride() == x.stride()
    assert of_rows.stride() == rows.stride()


@every_backend
def test_the_rows_of_a_wider_projection(backend: str) -> None:
    """x is often some columns of a projection, transposed: neither S nor C is without gaps."""
    wide = numbers(2, 9, 50)
    x, weight = wide[..., 10:33].mT, numbers(23, 4, seed=1)
    want = fusedops.causal_conv1d(x.contiguous(), weight, activation="silu", backend=backend)
    got = fusedops.causal_conv1d(x, weight, activation="silu", backend=backend)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


@every_backend
def test_positions_of_no_sequence(backend: str) -> None:
    x = numbers(1, 3, 12)
    x[..., :2], x[..., 9:] = NAN, INF
    x.requires_grad_()
    bounds = torch.tensor([2, 5, 9])
    y = fusedops.causal_conv1d(x, numbers(3, 4, seed=1), activation="silu", cu_seqlens=bounds, backend=backend)
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, NAN).index_fill(2, torch.arange(2, 9), 1.0))
    for result in (y, dx):
        assert result.isfinite().all()
        assert (result[..., :2] == 0).all()
        assert (result[..., 9:] == 0).all()


@every_backend
@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ([0, 5, 3], r"cu_seqlens\[2\] = 3 after 5, expected the start of a sequence from 5 to 8"),
        ([0, 9], r"cu_seqlens\[1\] = 9 after 0"),
        ([-1, 8], r"cu_seqlens\[0\] = -1, expected the start of a sequence from 0 to 8"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_bounds_are_checked_on_a_cpu(bounds: list[int], text: str, dtype: torch.dtype, backend: str) -> None:
    given = torch.tensor(bounds, dtype=dtype)
    for _ in range(2):  # a call like the one before too
        with pytest.raises(fusedops.InvalidInputError, match=text):
            fusedops.causal_conv1d(numbers(1, 2, 8), numbers(2, 4), cu_seqlens=given, backend=backend)


@every_backend
def test_silu_of_minus_infinity_is_0(backend: str) -> None:
    x = torch.tensor([[[1.0, -INF, 2.0]]], requires_grad=True)
    y = fusedops.causal_conv1d(x, torch.tensor([[0.5, 1.0]]), activation="silu", backend=backend)
    assert y[0, 0, 1] == 0
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx[0, 0, 0].isfinite()


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ((2, 6, 4), r"pass initial_state\[\.\.\., 1:\], without the oldest input"),
        ((1, 6, 3), r"expected \(2, 6, 3\), the batches, channels and W - 1"),
    ],
)
def test_a_state_of_another_shape(state: tuple[int, ...], text: str) -> None:
    with pytest.raises(fusedops.InvalidInputError, match=text):
        fusedops.causal_conv1d(numbers(2, 6, 5), numbers(6, 4), initial_state=numbers(*state))


def test_packed_sequences_are_one_row() -> None:
    with pytest.raises(fusedops.InvalidInputError, match="dim 0 of x = 2, expected a size in \\[1, 1\\]"):
        fusedops.causal_conv1d(numbers(2, 6, 5), numbers(6, 4), cu_seqlens=torch.tensor([0, 5]))


@every_backend
def test_positions_before_the_first_sequence_and_after_the_last_are_zeros(backend: str) -> None:
    bounds = torch.tensor([4, 9, 11], dtype=torch.int32)
    tensors = leaves(x=numbers(1, 7, 13), weight=numbers(7, 3, seed=1), initial_state=numbers(2, 7, 2, seed=2))
    whole, state = fusedops.causal_conv1d(**tensors, return_state=True, cu_seqlens=bounds, backend=backend)
    cut = {**tensors, "x": tensors["x"][..., 4:11].detach().requires_grad_()}
    alone, after = fusedops.causal_conv1d(**cut, return_state=True, cu_seqlens=bounds - 4, backend=backend)
    torch.testing.assert_close(whole[..., 4:11], alone, rtol=1e-6, atol=1e-6)
    assert torch.equal(state, after)
    dx, *_ = torch.autograd.grad(whole.sum(), [*tensors.values()])
    for each in (whole, dx):
        assert not each[..., :4].any()
        assert not each[..., 11:].any()


def test_packed_sequences_without_channels_have_a_gradient_that_has_one_too() -> None:
    x, weight = torch.zeros(1, 0, 24, requires_grad=True), torch.zeros(0, 2)
    bounds = torch.tensor([0, 5, 24])
    y, state = fusedops.causal_conv1d(x, weight, return_state=True, cu_seqlens=bounds)
    (of_x,) = torch.autograd.grad(y.sum() + state.sum(), x, create_graph=True)
    assert of_x.shape == x.shape
