"""A function of an arguments object is called as one that lists its parameters: by position, by name, with defaults."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import fusedops
from fusedops._contract.signature import spread


class Args(NamedTuple):
    x: int
    y: int = 2


def alone(a: Args) -> tuple[int, ...]:
    return tuple(a)


class Both(NamedTuple):
    x: int
    y: int


def first(a: Both, z: int) -> tuple[int, ...]:
    return (*a, z)


def between(w: int, a: Both, z: int) -> tuple[int, ...]:
    return (w, *a, z)


def test_names_and_defaults() -> None:
    assert spread(alone)(1, 3) == spread(alone)(x=1, y=3) == spread(alone)(1, y=3) == (1, 3)
    assert spread(alone)(1) == spread(alone)(x=1) == (1, 2)
    assert spread(first)(1, 3, 4) == spread(first)(1, z=4, y=3) == (1, 3, 4)
    assert spread(between)(0, 1, 3, 4) == spread(between)(0, 1, z=4, y=3) == (0, 1, 3, 4)


@pytest.mark.parametrize("names", [{}, {"y": 1}, {"x": 1, "other": 1}])
def test_what_does_not_fit_is_a_type_error(names: dict[str, int]) -> None:
    with pytest.raises(TypeError):
        spread(alone)(**names)


def test_a_reference_takes_its_parameters_by_name() -> None:
    """Recognition calls references so: a TypeError there would leave every router and every convolution."""
    logits = torch.randn(3, 8)
    options = {"score": "softmax", "bias": None, "groups": 1, "top_groups": 1, "group_score": "max"}
    more = {"normalize": True, "eps": 0.0, "scale": 1.0, "index": None}
    by_name = fusedops.ops.OPS["top_k_routing"].reference(logits, 2, **options, **more)
    by_position = fusedops.ops.OPS["top_k_routing"].reference(logits, 2, *options.values(), *more.values())
    torch.testing.assert_close(by_name, by_position)
    x, weight = torch.randn(1, 4, 8), torch.randn(4, 3)
    y, _ = fusedops.ops.OPS["causal_conv1d"].reference(x, weight, activation="silu")
    torch.testing.assert_close(y, fusedops.causal_conv1d(x, weight, activation="silu", backend="eager"))
