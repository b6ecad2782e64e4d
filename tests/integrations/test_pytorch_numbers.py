"""Numbers in compiled code: a scale, a probability or an eps that varies does not compile each time."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from calls import OPTIONS, arguments, close, gradients, growing, inputs, noting_backend, options, outputs, shapes
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

import fusedops
from fusedops.testing import OPS

pytestmark = pytest.mark.usefixtures("fresh_compiler")
OF_OP = {op: [name for name, text in OPS[op].types.items() if text.startswith("float")] for op in OPTIONS}
# an op with a number of each name: one wrapper serves them all
NUMBERS = {op: OF_OP[op] for op in {name: op for op, names in OF_OP.items() for name in names}.values()}
VALUES = [(step + 1) / 8 for step in range(4)]


def of_numbers(op: str, numbers: Sequence[str]) -> Callable[..., Any]:
    """Return the public function of a number, which several parameters have, and the tensors."""
    function, names, fixed = OPS[op].function, [*shapes(op)], options(op)

    def call(number: Any, *tensors: Tensor) -> Any:
        values = (*tensors, *[number] * len(numbers))
        return function(**{**fixed, **dict(zip((*names, *numbers), values))})

    return call


@pytest.mark.slow
@pytest.mark.parametrize("op", NUMBERS)
def test_several_values_are_compiled_twice(op: str) -> None:
    assert_compiled_twice([op], "aot_eager")


@pytest.mark.slow
def test_several_values_are_compiled_twice_by_inductor() -> None:
    """In one graph: Dynamo counts alike for each op, and Inductor's code is of the numbers."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("needs a C++ compiler, which Inductor compiles for a CPU with")
    assert_compiled_twice([*NUMBERS], "inductor")


def assert_compiled_twice(ops: Sequence[str], backend: str) -> None:
    """Compare calls of the ops in one graph for several values of their numbers."""
    calls, counter = {op: of_numbers(op, NUMBERS[op]) for op in ops}, CompileCounterWithBackend(backend)

    def eager(number: Any, tensors: dict[str, list[Tensor]]) -> list[Any]:
        return [calls[op](number, *tensors[op]) for op in ops]

    compiled = torch.compile(eager, fullgraph=True, backend=counter)
    for value in VALUES:
        ours, theirs = ({op: growing(op, inputs(op)) for op in ops} for _ in range(2))
        got, want = (
            [y for each in run(value, tensors) for y in outputs(each)]
            for run, tensors in ((compiled, ours), (eager, theirs))
        )
        close(got, want)
        every = [[tensor for each in tensors.values() for tensor in each] for tensors in (ours, theirs)]
        close(gradients(got, every[0]), gradients(want, every[1]))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("op", ["rms_norm", "scaled_masked_softmax"])
def test_a_number_made_of_a_length_is_compiled_once(op: str) -> None:
    inner = of_numbers(op, OF_OP[op])

    def eager(*tensors: Tensor) -> Any:
        return inner(1 / math.sqrt(tensors[0].shape[-2]), *tensors)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(eager, fullgraph=True, backend=counter, dynamic=True)
    for length in (4, 6, 9):
        ours, theirs = growing(op, inputs(op, length)), growing(op, inputs(op, length))
        got, want = compiled(*ours), eager(*theirs)
        close(outputs(got), outputs(want))
        close(gradients(got, ours), gradients(want, theirs))
    assert counter.frame_count == 1


def test_the_kernel_gets_python_numbers() -> None:
    ran: list[tuple[Any, ...]] = []
    noting_backend("scaled_masked_softmax", "noting", ran)
    compiled = torch.compile(
        lambda x, scale: fusedops.scaled_masked_softmax(x, None, scale, backend="noting"), backend="aot_eager"
    )
    x = torch.randn(3, 4, requires_grad=True)
    for scale in (0.5, 1.5, 2.5):
        compiled(x, scale).sum().backward()
    numbers = [args[2] for _, args in ran]
    assert [type(number) for number in numbers] == [float] * 6
    assert numbers == [0.5, 0.5, 1.5, 1.5, 2.5, 2.5]


def test_an_invalid_number_is_an_error_when_the_graph_runs() -> None:
    compiled = torch.compile(lambda x, p: fusedops.bias_dropout(x, None, p, seed=3), backend="aot_eager")
    for p in (0.25, 0.5):
        compiled(torch.ones(4), p)
    with pytest.raises(Exception, match=r"got p = 1.5, expected a number in \[0, 1\]"):
        compiled(torch.ones(4), 1.5)
    for p in (0.0, 1.0):  # nothing is dropped, and everything
        torch.testing.assert_close(compiled(torch.ones(4), p), torch.full((4,), 1.0 - p))


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return fusedops.scaled_masked_softmax(q @ k.mT, None, q.shape[-1] ** -0.5)


@pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)`:FutureWarning")  # torch's own
def test_a_number_made_of_a_length_is_exported() -> None:
    dynamic = ({2: torch.export.Dim.DYNAMIC}, {2: torch.export.Dim.DYNAMIC})
    program = torch.export.export(Attention(), (torch.randn(2, 4, 8), torch.randn(2, 4, 8)), dynamic_shapes=dynamic)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for exported in (program, torch.export.load(file), program.run_decompositions()):
        for size in (3, 12):
            q, k = torch.randn(2, 4, size), torch.randn(2, 4, size)
            torch.testing.assert_close(exported.module()(q, k), Attention()(q, k))


@pytest.mark.parametrize("op", NUMBERS)
def test_opcheck_of_the_overload(op: str) -> None:
    contract = OPS[op]
    args = arguments(op, growing(op, inputs(op)))

    def as_tensor(value: Any, text: str) -> Any:
        return torch.tensor(value, dtype=torch.float64) if text.startswith("float") and value is not None else value

    given = [as_tensor(value, text) for value, text in zip(args, contract.types.values())]
    torch.library.opcheck(getattr(torch.ops.fusedops, op).symbolic, given)
