"""torch.jit.trace and torch.fx.symbolic_trace: the traced call serves other data and other sizes as a direct one."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import close, every_op, growing, inputs, loss, noting_backend, options, outputs, public, shapes
from torch import Tensor

import fusedops
import fusedops.nn
from fusedops.testing import OPS

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")  # torch's own


def traced(function: Callable[..., Any], tensors: list[Tensor]) -> Callable[..., Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)  # a branch on data or sizes would be recorded
        return torch.jit.trace(function, tuple(tensors))


@every_op
def test_jit_traced_for_other_sizes_and_data(op: str) -> None:
    graph = traced(public(op), inputs(op))
    assert f"fusedops::{op}" in str(graph.graph)
    for length, seed in ((5, 1), (9, 2), (300, 3)):
        tensors = inputs(op, length, seed=seed)
        close(outputs(graph(*tensors)), outputs(public(op)(*tensors)))


@every_op
def test_jit_traced_gradients(op: str) -> None:
    graph = traced(public(op), growing(op, inputs(op)))
    ours, theirs = growing(op, inputs(op, 7, seed=4)), growing(op, inputs(op, 7, seed=4))
    loss(graph(*ours)).backward()
    loss(public(op)(*theirs)).backward()
    close([each.grad for each in ours], [each.grad for each in theirs])


def test_jit_traced_masks_and_many_rows_are_those_of_the_call() -> None:
    def softmax(x: Tensor, mask: Tensor) -> Tensor:
        return fusedops.scaled_masked_softmax(x, mask, 0.5)

    x, mask = torch.randn(4, 40, 40), torch.rand(4, 1, 40) < 0.1
    graph = traced(softmax, [x, mask])
    dead = mask.clone()
    dead[0] = True
    assert torch.equal(graph(x, dead)[0], torch.zeros(40, 40))
    x, bias = torch.randn(1000, 1000), torch.randn(1000)
    graph = traced(fusedops.bias_gelu, [x, bias])
    large = torch.randn(2000, 1000)
    torch.testing.assert_close(graph(large, bias), fusedops.bias_gelu(large, bias))


def test_jit_traced_dropout_draws_at_each_run() -> None:
    graph = torch.jit.trace(lambda x: fusedops.bias_dropout(x, None, 0.5), (torch.ones(100),), check_trace=False)
    first, second = graph(torch.ones(1000)), graph(torch.ones(1000))
    assert not torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}


def test_a_bound_call_is_traced_too() -> None:
    bound = fusedops.bind("bias_gelu", torch.randn(3, 4))
    graph = traced(lambda x: bound(x), [torch.randn(3, 4)])
    x = torch.randn(700, 4)
    torch.testing.assert_close(graph(x), fusedops.bias_gelu(x))


class Module(torch.nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.function, self.names, self.options = OPS[op].function, [*shapes(op)], options(op)

    def forward(self, t0: Any, t1: Any = None, t2: Any = None, t3: Any = None, t4: Any = None, t5: Any = None,
                t6: Any = None) -> Any:  # fmt: skip
        return self.function(**dict(zip(self.names, (t0, t1, t2, t3, t4, t5, t6))), **self.options)


def symbolically_traced(op: str) -> torch.fx.GraphModule:
    absent: dict[str, Any] = {f"t{place}": None for place in range(len(shapes(op)), 7)}
    return torch.fx.symbolic_trace(Module(op), concrete_args=absent)


@every_op
def test_symbolically_traced(op: str) -> None:
    graph = symbolically_traced(op)
    assert OPS[op].function in [node.target for node in graph.graph.nodes]
    for tensors in (inputs(op), inputs(op, 9, seed=2)):
        want = outputs(public(op)(*tensors))
        close(outputs(graph(*tensors)), want)
        close(outputs(copy.deepcopy(graph)(*tensors)), want)


def test_a_symbolically_traced_call_is_compiled() -> None:
    compiled = torch.compile(symbolically_traced("rms_norm"), backend="aot_eager", fullgraph=True)
    close(compiled(*inputs("rms_norm")), public("rms_norm")(*inputs("rms_norm")))
    torch._dynamo.reset()


def test_a_symbolic_number_and_a_policy_stay_in_the_graph() -> None:
    ran: list[tuple[Any, ...]] = []
    noting_backend("scaled_masked_softmax", "noting", ran)
    graph = torch.fx.symbolic_trace(lambda x, scale: fusedops.scaled_masked_softmax(x, None, scale, backend="noting"))
    x = torch.randn(3, 4)
    for scale in (0.5, 2.0):
        torch.testing.assert_close(graph(x, scale), torch.softmax(x * scale, -1))
    assert len(ran) == 2
    with pytest.raises(fusedops.InvalidInputError, match="scale = inf"):
        graph(x, float("inf"))


def test_a_symbolically_traced_dropout_keeps_its_seed_or_draws_at_each_run() -> None:
    x = torch.ones(1000)
    graph = torch.fx.symbolic_trace(lambda x: fusedops.bias_dropout(x, None, 0.5, seed=7))
    assert torch.equal(graph(x), fusedops.bias_dropout(x, None, 0.5, seed=7))
    graph = torch.fx.symbolic_trace(lambda x: fusedops.bias_dropout(x, None, 0.5))
    assert not torch.equal(graph(x), graph(x))


def test_the_modules_are_traced_symbolically() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), fusedops.nn.BiasGELU(), torch.nn.Linear(32, 8))
    graph, x = torch.fx.symbolic_trace(model), torch.randn(3, 8)
    torch.testing.assert_close(graph(x), model(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(graph))(x), model(x))
    assert fusedops.bias_gelu in [node.target for node in graph.graph.nodes]
