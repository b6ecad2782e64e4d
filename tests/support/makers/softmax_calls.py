"""Arguments of scaled_masked_softmax, its reference results, and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import fusedops
from fusedops.testing import OPS

OP = OPS["scaled_masked_softmax"]

softmax = fusedops.scaled_masked_softmax

torch_op = torch.ops.fusedops.scaled_masked_softmax


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


X = numbers(2, 3, 5, 7)

MASK = numbers(2, 1, 5, 7, seed=1) > 0.5
MASK[0, :, 2] = True

SCALE = 0.3

G = numbers(2, 3, 5, 7, seed=2)

# kernel arguments: (mask, scale, causal)
CALLS: list[tuple[Any, float, bool]] = [(None, 1.0, False), (MASK, SCALE, False), (MASK, SCALE, True)]

calls = pytest.mark.parametrize(("mask", "scale", "causal"), CALLS, ids=["plain", "masked", "causal"])


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-11)


def want(mask: Any, scale: float, causal: bool, x: Tensor = X) -> tuple[Tensor, Tensor]:
    """The reference's output, and its gradient for G."""
    x = x.detach().clone().requires_grad_()
    y = OP.reference(x, mask, scale, causal)
    return y.detach(), torch.autograd.grad(y, x, G)[0]


@contextmanager
def counting_compilations() -> Iterator[list[Any]]:
    """A list that grows by one for each graph that torch.compile makes."""
    torch._dynamo.reset()
    graphs: list[Any] = []
    yield graphs
    torch._dynamo.reset()


def backend_that_counts(graphs: list[Any]) -> Callable[..., Any]:
    def forward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph)

    return aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, inputs: make_boxed_func(graph))
