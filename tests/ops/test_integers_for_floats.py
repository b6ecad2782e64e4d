"""An integer that is given for a float parameter reaches kernels as a float, by every path.

torch's arithmetic takes integers of 64 bits. A kernel that computes ``2 * z_loss`` raised an OverflowError for 2**62.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from calls import arguments, call_registered, inputs, outputs
from torch import Tensor

import fusedops
import fusedops_eager
from fusedops.testing import OPS, expected

PARAMETERS = [(op.name, op.parameters[place]) for op in OPS.values() for place in op.float_indices]
Seen = list[tuple[str, str, Any]]
WAYS: dict[str, Callable[[str, tuple[Any, ...]], Any]] = {
    "public": lambda op, args: OPS[op].call_public(*args, backend="recorder"),
    "bind": lambda op, args: fusedops.bind(op, **named(op, args), backend="recorder")(**named(op, args)),
    "bind, by position": lambda op, args: fusedops.bind(op, **named(op, args), backend="recorder")(*args),
    "torch.ops": lambda op, args: call_registered(op, *args, backend="recorder"),
    "compiled": lambda op, args: torch.compile(OPS[op].call_public, backend="aot_eager")(*args, backend="recorder"),
}


@pytest.fixture
def seen() -> Iterator[Seen]:
    """Register eager's kernels under the name "recorder"; each call is recorded: op, direction, arguments by name."""
    record: Seen = []

    def recorded(kernel: fusedops.Kernel) -> fusedops.Kernel:
        names = OPS[kernel.op].parameters_of(kernel.direction)

        @wraps(kernel.function)
        def function(*args: Any) -> Any:
            record.append((kernel.op, kernel.direction, dict(zip(names, args))))
            return kernel.function(*args)

        return replace(kernel, function=function)

    backend = fusedops_eager.fusedops_backend()
    fusedops.register(replace(backend, name="recorder", kernels=tuple(map(recorded, backend.kernels))))
    yield record
    fusedops.unregister("recorder")


def call_with(op: str, name: str, value: float) -> tuple[Any, ...]:
    """Return the arguments of a small call with this number; its tensors have gradients."""
    contract = OPS[op]
    args = arguments(op, inputs(op, 3, torch.float32, batch=2))
    given = {**dict(zip(contract.parameters, args)), name: value}
    wanted = (*contract.differentiable, contract.passed_through)
    return tuple(
        arg.detach().clone().requires_grad_() if isinstance(arg, Tensor) and each in wanted else arg
        for each, arg in given.items()
    )


def named(op: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Return the arguments by name."""
    return dict(zip(OPS[op].parameters, args))


def largest(op: str, name: str) -> int:
    """Return an integer of 63 bits, or 1 where the op does not accept it."""
    return 2**62 if OPS[op].invalid(call_with(op, name, 2**62)) is None else 1


# every parameter by the public function, and every op by every way, with its parameters in turn
EACH = [(op, [name for other, name in PARAMETERS if other == op]) for op in dict(PARAMETERS)]
BY_WAY = [(op, names[at % len(names)], way) for op, names in EACH for at, way in enumerate(WAYS)]
BY_WAY += [(op, name, "public") for op, name in PARAMETERS if (op, name, "public") not in BY_WAY]


@pytest.mark.parametrize(("op", "name", "way"), BY_WAY)
def test_a_kernel_gets_a_float(op: str, name: str, way: str, seen: Seen) -> None:
    args = call_with(op, name, largest(op, name))
    torch._dynamo.reset()
    torch.autograd.backward([y.sum() for y in outputs(WAYS[way](op, args)) if y is not None and y.requires_grad])
    assert seen
    for _, direction, given in seen:
        assert type(given.get(name, 0.0)) is float, f"{direction}: {given[name]!r}"


@pytest.mark.parametrize(("op", "name"), PARAMETERS)
def test_the_same_decision_and_the_same_answer(op: str, name: str) -> None:
    contract, value = OPS[op], largest(op, name)
    one, other = (call_with(op, name, each) for each in (value, float(value)))
    decisions = [fusedops.explain(op, **named(op, args)) for args in (one, other)]
    assert str(decisions[0]) == str(decisions[1])
    mine, theirs = expected(contract, one), expected(contract, other)
    torch.testing.assert_close(mine.outputs, theirs.outputs, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(mine.gradients, theirs.gradients, rtol=0, atol=0, equal_nan=True)


def test_a_denominator_of_more_than_64_bits() -> None:
    logits, target = torch.randn(3, 5), torch.tensor([0, 1, 2])
    want = fusedops.cross_entropy(logits, target, denominator=float(2**70))
    assert torch.equal(fusedops.cross_entropy(logits, target, denominator=2**70), want)
