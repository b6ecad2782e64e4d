"""bind: the same numbers and gradients as the op, by the kernel that was selected when it was bound."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from calls import OPTIONS, every_op, gradients, growing, inputs, named, outputs, public
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops import FallbackWarning, InvalidInputError, NoBackendError, PolicyError
from fusedops.constraints import Dim
from fusedops.testing import OPS

pytestmark = pytest.mark.usefixtures("no_compiled_backend")

OP = "scaled_masked_softmax"
X = torch.ones(2, 4)
SHORT = Dim("x", (-1,), at_most=8)


# A bound call is served as the op's own, by whichever kernel was selected: that is tried with one of triton.
@pytest.mark.parametrize(("op", "backend"), [*((op, "eager") for op in OPTIONS), ("add_rms_norm", "triton")])
def test_the_same_numbers_and_gradients(op: str, backend: str) -> None:
    tensors = growing(op, inputs(op, dtype=torch.float32))
    with fusedops.use(backend, fallback="raise"):
        bound = fusedops.bind(op, **named(op, tensors))
        want = public(op)(*tensors)
        wanted = gradients(want, tensors)
    fusedops.reset_stats()
    got = bound(**named(op, tensors))  # whatever the policy is now
    assert all(map(torch.equal, outputs(got), outputs(want)))
    assert [(c.backend, c.calls) for c in fusedops.stats().counts] == [(backend, 1)]
    assert all(map(torch.equal, gradients(got, tensors), wanted))
    with torch.no_grad():
        assert not any(y.requires_grad for y in outputs(bound(**named(op, tensors))))


@every_op
def test_it_has_the_ops_signature(op: str) -> None:
    bound = fusedops.bind(op, **named(op, inputs(op)))
    assert bound.__name__ == op
    have, want = inspect.signature(bound).parameters.values(), OPS[op].signature.parameters.values()
    assert [(p.name, p.kind, p.default) for p in have] == [(p.name, p.kind, p.default) for p in want]


def test_dropout_draws_as_the_op_does() -> None:
    x = torch.ones(4, 33)
    bound = fusedops.bind("bias_dropout", x)
    for seed in (None, 5):
        torch.manual_seed(3)
        got = bound(x, None, 0.5, seed=seed)
        torch.manual_seed(3)
        assert torch.equal(got, fusedops.bias_dropout(x, None, 0.5, seed=seed))
    assert not torch.equal(bound(x), bound(x))
    assert torch.equal(bound(x, training=False), x)


def test_the_selection_is_made_when_it_is_bound(fakes: Any) -> None:
    fakes("first", SHORT, backward=(Dim("y", (-1,), at_most=6),))
    fakes("second")
    with fusedops.use("first", fallback="silent"):
        bound = fusedops.bind(OP, X)
    assert fakes.ran == [], "nothing runs"
    fusedops.set_policy("second")
    bound(X)
    bound(X.clone().requires_grad_()).sum().backward()
    assert fakes.ran == ["first", "first", "first backward"]
    fakes.ran.clear()
    fusedops.unregister("first")
    bound(X)
    assert fakes.ran == ["first"]


def test_a_fallback_at_binding_is_seen_and_a_refusal_by_all_is_the_decision(fakes: Any) -> None:
    fakes("short", SHORT)
    long = torch.ones(2, 9)
    with pytest.warns(FallbackWarning, match="runs on eager, not on short: got dim -1 of x = 9"):
        bound = fusedops.bind(OP, long, backend="short")
    assert torch.equal(bound(long), fusedops.scaled_masked_softmax(long))
    with fusedops.use("short", fallback="raise"), pytest.raises(NoBackendError) as error:
        fusedops.bind(OP, long)
    assert error.value.decision.candidates[0].reasons[0].given == "dim -1 of x = 9"


def test_an_invalid_call_is_reported() -> None:
    with pytest.raises(PolicyError) as error:
        fusedops.bind("bias_geluu", X)
    assert str(error.value) == (
        f"bind: got op 'bias_geluu', expected one of {', '.join(sorted(OPS))}; to fix: write 'bias_gelu'"
    )
    with pytest.raises(InvalidInputError, match="got x of int64"):
        fusedops.bind(OP, torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(InvalidInputError) as invalid:
        fusedops.bind(OP, fusedops.TensorSpec((2, 4)))
    assert str(invalid.value) == (
        "bind: got x as a TensorSpec, expected a tensor on this machine; to fix: use explain for specs"
    )
    with pytest.raises(InvalidInputError, match="got no argument 'x', expected "):
        fusedops.bind(OP)


# The code is one for all ops, and each op is compiled, transformed and traced by tests of its own: these have numbers,
# a seed, several outputs, an output that may be absent, and arguments that are prepared.
@pytest.mark.parametrize("op", [OP, "bias_dropout", "add_rms_norm", "attention", "experts"])
def test_where_no_kernel_can_be_called_it_is_the_op(op: str) -> None:
    tensors = inputs(op)
    names, bound = [*named(op, tensors)], fusedops.bind(op, **named(op, tensors))

    def call(*given: Tensor) -> Tensor:
        return bound(**dict(zip(names, given)), **OPTIONS[op])

    want = public(op)(*tensors)
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, example: Any) -> Any:
        seen.append(graph.code)
        return graph.forward

    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend=look)(*tensors), want)
    assert f"fusedops.{op}" in seen[0]
    x, *others = tensors
    tangent = torch.ones_like(x)
    got = torch.func.jvp(lambda x: call(x, *others), (x,), (tangent,))[1]
    torch.testing.assert_close(got, torch.func.jvp(lambda x: public(op)(x, *others), (x,), (tangent,))[1])
    with FakeTensorMode() as mode:
        fake = call(*[mode.from_tensor(t) for t in tensors])
    shapes = [[(y.shape, y.dtype) for y in outputs(results)] for results in (fake, want)]
    assert shapes[0] == shapes[1]


def test_the_calls_are_counted() -> None:
    fusedops.reset_stats()
    bound = fusedops.bind(OP, X)
    assert fusedops.stats().counts == ()
    for _ in range(3):
        bound(X)
    assert [(c.op, c.backend, c.calls) for c in fusedops.stats().counts] == [(OP, "eager", 3)]
    fusedops.reset_stats()
