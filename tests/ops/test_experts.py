"""experts: what its contract says about choices, beside a loop over the tokens in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

import fusedops

ACTIVATIONS = {
    "swiglu": lambda h: silu(h.chunk(2)[0]) * h.chunk(2)[1],
    "geglu": lambda h: gelu(h.chunk(2)[0]) * h.chunk(2)[1],
    "geglu_tanh": lambda h: gelu(h.chunk(2)[0], approximate="tanh") * h.chunk(2)[1],
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda h: gelu(h, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda h: torch.relu(h).square(),
}
H, I = 6, 4  # noqa: E741


def tensors(experts: int, tokens: int, choices: int, activation: str = "swiglu") -> dict[str, Any]:
    """Return random tensors of a call."""
    generator = torch.Generator().manual_seed(experts + 10 * tokens)
    rows = 2 * I if activation in ("swiglu", "geglu", "geglu_tanh") else I
    shapes = {"up": (experts, rows, H), "down": (experts, H, I), "up_bias": (experts, rows), "down_bias": (experts, H)}
    shapes |= {"x": (tokens, H), "weights": (tokens, choices)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
    }


def by_token(index: list[list[int]], activation: str, x: Tensor, weights: Tensor, **given: Tensor) -> Tensor:
    """Compute the op one token and one choice after another."""
    rows: list[Tensor] = []
    for token, choices in enumerate(index):
        total = 0.0 * x[token]
        for k, e in enumerate(choices):
            if 0 <= e < given["up"].shape[0]:
                h = linear(x[token], given["up"][e], given["up_bias"][e])
                out = linear(ACTIVATIONS[activation](h), given["down"][e], given["down_bias"][e])
                total = total + weights[token, k] * out
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("experts", "index", "activation"),
    [
        (4, [[0, 3], [1, 2], [3, 0]], "swiglu"),
        (4, [[2, 2], [2, 2], [2, 2]], "geglu"),  # all tokens on one expert, each twice
        (3, [[3, 0], [-1, 5], [1, 3], [2, 2]], "geglu_tanh"),  # sentinels first, last, and alone
        (1, [[0], [0], [1]], "silu"),
        (3, [[2, 1, 0], [0, 1, 2]], "relu2"),  # K = E
        (5, [[4], [0]], "gelu"),  # experts without tokens
        (2, [[1], [0]], "gelu_tanh"),
        (2, [[1], [1]], "relu"),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_choices(experts: int, index: list[list[int]], activation: str, transposed: bool) -> None:
    given = tensors(experts, len(index), len(index[0]), activation)
    call = {**given, **({key: given[key].mT for key in ("up", "down")} if transposed else {})}
    y = fusedops.experts(index=torch.tensor(index), activation=activation, transposed=transposed, **call)
    expected = by_token(index, activation, **given)
    torch.testing.assert_close(y, expected)
    grad = torch.randn_like(y)
    wanted = torch.autograd.grad(expected, list(given.values()), grad, materialize_grads=True)
    got = torch.autograd.grad(y, list(given.values()), grad)
    for name, one, other in zip(given, got, wanted):
        torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("tokens", "choices"), [(0, 2), (3, 0)])
def test_nothing_is_chosen(tokens: int, choices: int) -> None:
    given = tensors(3, tokens, choices)
    y = fusedops.experts(index=torch.zeros(tokens, choices, dtype=torch.int32), **given)
    assert y.shape == (tokens, H)
    assert not y.any()
    y.sum().backward()
    assert all(not each.grad.any() for each in given.values())


def test_a_number_that_is_not_finite_stays_with_its_token() -> None:
    given = tensors(3, 4, 2)
    with torch.no_grad():
        given["x"][1] = float("nan")
        given["x"][2] = float("inf")
    index = torch.tensor([[0, 1], [2, 2], [3, -1], [1, 0]])
    y = fusedops.experts(index=index, **given)
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()
    y[[0, 3]].sum().backward()
    assert given["up"].grad[:2].isfinite().all()
    assert given["x"].grad[[0, 2, 3]].isfinite().all()
