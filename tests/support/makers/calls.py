"""A small call of each op, for the tests of torch's own features: tensors in, the outputs out, the rest fixed.

Made from each op's ``sample`` and constraints, so that a new op needs no line here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import fusedops
from fusedops.constraints import Classes, DType, Indices, Lengths, Offsets, Rank, Slots
from fusedops.testing import OPS
from fusedops.testing._calls import random_indices


def sample(op: str, batch: int = 3, length: int = 5) -> Mapping[str, Any]:
    """Return a small call by parameter; tuples are shapes."""
    contract = OPS[op]
    return (
        contract.evidence.cases[0].args if contract.evidence.sample is None else contract.evidence.sample(batch, length)
    )


def shapes(op: str, batch: int = 3, length: int = 5) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the call's tensors by parameter, in the op's order."""
    call = sample(op, batch, length)
    return {name: call[name] for name in OPS[op].parameters if isinstance(call.get(name), tuple)}


def options(op: str) -> dict[str, Any]:
    """Return the call's arguments that are no tensors, by parameter."""
    return {name: value for name, value in sample(op).items() if value is not None and not isinstance(value, tuple)}


# an op without gradients has its calls under transforms in its own test
OPTIONS: dict[str, dict[str, Any]] = {op: options(op) for op, contract in OPS.items() if contract.has_gradient}
every_op = pytest.mark.parametrize("op", OPTIONS)


def dtype_of(op: str, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` where the op's constraints accept it for a parameter, else the first one that they accept."""
    accepted = [item.dtypes for item in OPS[op].constraints if isinstance(item, DType) and item.name == name]
    return dtype if all(dtype in each for each in accepted) else accepted[0][0]


def inputs(op: str, length: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0, batch: int = 3) -> list[Tensor]:
    """Return the call's tensors, in the op's order."""
    generator = torch.Generator().manual_seed(seed)
    sizes = shapes(op, batch, length)
    first, ends = next(iter(sizes.values())), ends_of_groups(op)
    lengths = {item.name: item for item in OPS[op].constraints if isinstance(item, Lengths)}
    classes = [item for item in OPS[op].constraints if isinstance(item, Classes)]
    slots = {item.name: item.of for item in OPS[op].constraints if isinstance(item, Slots)}
    places = {item.name: item for item in OPS[op].constraints if isinstance(item, Indices)}
    columns = first[-1]
    tensors: list[Tensor] = []
    for name, shape in sizes.items():
        numbers, kind = torch.randn(shape, generator=generator, dtype=torch.float64), dtype_of(op, name, dtype)
        if kind is torch.bool:
            numbers = numbers > 0.5
        elif name in ends:  # of groups of rows of the first tensor
            numbers = (numbers.abs() * first[0]).clamp(max=first[0]).sort(-1).values
            if ends[name].bounds:  # every row in a group
                numbers[0], numbers[-1] = 0, first[0]
        elif name in lengths:
            numbers = (numbers.abs() * 3) % (prod(sizes[of][dim] for of, dim in lengths[name].sizes) + 1)
        elif name in slots:
            numbers = torch.randperm(prod(sizes[slots[name]][:2]), generator=generator)[: numbers.numel()]
        elif name in places:
            numbers = random_indices(shape, sizes[places[name].of][places[name].dim], generator)
        elif not kind.is_floating_point:  # positions in a dimension of a tensor, such as classes
            most = next((sizes[of.of][of.dim] for of in classes if of.name == name and of.of), columns)
            numbers = (numbers.abs() * most) % most
        tensors.append(numbers.to(kind))
    return tensors


def ends_of_groups(op: str) -> dict[str, Offsets]:
    """Return the constraints on the parameters that hold the ends of groups of rows of the first tensor."""
    return {item.name: item for item in OPS[op].constraints if isinstance(item, Offsets)}


def requiring_a_gradient(op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, the first of which whose gradient a kernel computes requires one."""
    at = 1 if OPS[op].passed_through == next(iter(shapes(op))) else 0
    return [tensor.requires_grad_() if i == at else tensor for i, tensor in enumerate(tensors)]


def has_kernels(backend: str, op: str) -> bool:
    """Return True for a backend that serves some calls of an op. Test backends are not known here: True."""
    info = {each.name: each for each in fusedops.backends()}.get(backend)
    return info is None or op in info.ops


def takes(backend: str, op: str, dtype: torch.dtype = torch.float64) -> bool:
    """Return True for a backend that serves the call of ``inputs``. Test backends are not known here: True."""
    if backend not in {each.name for each in fusedops.backends()}:
        return True
    call = {**dict(zip(shapes(op), inputs(op, dtype=dtype))), **options(op)}
    return has_kernels(backend, op) and fusedops.explain(op, **call, backend=backend).backend == backend


def on_backends(*names: str) -> pytest.MarkDecorator:
    """Parametrize ``op`` and ``backend`` by the pairs where the backend serves the call of ``inputs`` in float32."""
    pairs = [(op, name) for op in OPTIONS for name in names if takes(name, op, torch.float32)]
    return pytest.mark.parametrize(("op", "backend"), pairs)


def has_fixed_rank(op: str) -> bool:
    """Return True for an op whose first tensor has one number of dims."""
    first = OPS[op].parameters[0]
    return any(isinstance(item, Rank) and item.ranks and item.name == first for item in OPS[op].constraints)


def batched(tensors: Sequence[Tensor]) -> list[bool]:
    """Return True for each tensor whose first dim is the batch, as that of the first tensor is."""
    return [tensor.dim() > 1 and len(tensor) == len(tensors[0]) for tensor in tensors]


def samples(op: str) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """Return :func:`inputs` for torch.vmap over the first dim, a new one where the rank is fixed, and ``in_dims``."""
    tensors = inputs(op)
    if has_fixed_rank(op):
        tensors = [tensor[:, None] if first else tensor for tensor, first in zip(tensors, batched(tensors))]
        ends = ends_of_groups(op)  # of one row in each sample
        tensors = [tensor.clamp(max=1) if name in ends else tensor for name, tensor in zip(shapes(op), tensors)]
    return tensors, tuple(0 if first else None for first in batched(tensors))


def public(op: str) -> Callable[..., Any]:
    """Return the public function of the tensors alone."""
    function, names = OPS[op].function, [*shapes(op)]
    fixed = OPTIONS[op] if op in OPTIONS else options(op)
    return lambda *tensors: function(**dict(zip(names, tensors)), **fixed)


def named(op: str, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return the arguments of the public function by name."""
    return {**dict(zip(shapes(op), tensors)), **OPTIONS[op]}


def arguments(op: str, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the arguments of the registered op, and of the reference, in order."""
    contract = OPS[op]
    return contract.prepared(contract.bind((), {**dict(zip(shapes(op), tensors)), **options(op)}))


def registered(op: str) -> Callable[..., Any]:
    """Return ``torch.ops.fusedops.<op>``, its outputs alone, as a function of the tensors alone."""
    return lambda *tensors: call_registered(op, *arguments(op, tensors))


def call_registered(op: str, *args: Any, **options: Any) -> Any:
    """Call ``torch.ops.fusedops.<op>``, and return its outputs without the saved values."""
    results = getattr(torch.ops.fusedops, op)(*args, **options)
    return OPS[op].outputs_of(results) if OPS[op].required_saved else results


def reference(op: str) -> Callable[..., Any]:
    """Return the op's reference as a function of the tensors alone."""
    return lambda *tensors: OPS[op].reference(*arguments(op, tensors))


def with_gradient(op: str) -> list[int]:
    """Return the places of the call's tensors that have a gradient."""
    contract = OPS[op]
    wanted = (*contract.differentiable, contract.passed_through)
    return [place for place, name in enumerate(shapes(op)) if name in wanted]


def growing(op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of the call's first tensors, with requires_grad where the op has a gradient."""
    places = with_gradient(op)
    return [tensor.clone().requires_grad_(place in places) for place, tensor in enumerate(tensors)]


def outputs(y: Any) -> tuple[Tensor, ...]:
    """Return the outputs of a call as a tuple, but for integers, which have no gradient."""
    every = (y,) if isinstance(y, Tensor) else tuple(y)
    return tuple(each for each in every if each.is_floating_point())


def stacked(results: Sequence[Any]) -> Any:
    """Return the results of several calls with each output stacked."""
    if isinstance(results[0], Tensor):
        return torch.stack([*results])
    return tuple(torch.stack(each) for each in zip(*results))


def loss(y: Any) -> Tensor:
    """Return the sum of the squares of the outputs."""
    return sum((each.square().sum() for each in outputs(y)), torch.zeros(()))


def gradients(y: Any, tensors: Sequence[Tensor], **options: Any) -> list[Tensor]:
    """Return the gradients of :func:`loss` by the tensors that require them."""
    return list(torch.autograd.grad(loss(y), [t for t in tensors if t.requires_grad], **options))


def close(got: Any, want: Any) -> None:
    """Assert that two are equal but for the rounding of float64. The tangent of the square of an lse of -inf is NaN."""
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10, equal_nan=True)


def contiguous(results: Any) -> Any:
    """Return the results of a reference with the contiguous strides that a kernel's have."""
    if isinstance(results, Tensor):
        return results.contiguous()
    return tuple(None if each is None else each.contiguous() for each in results)


def reference_kernels(
    op: str, name: str, ran: list[tuple[Any, ...]], *constraints: Any, backward: Sequence[Any] | None = ()
) -> list[fusedops.Kernel]:
    """Return kernels that are the op's references, and append (``name`` or "<name> backward", arguments) to ``ran``.

    Args:
        op: the op's name.
        name: the backend's.
        ran: one entry a call.
        *constraints: of the forward kernel.
        backward: the constraints of the backward kernel, or None for no such kernel.
    """
    contract = OPS[op]

    def noting(label: str, function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            ran.append((label, args))
            return contiguous(function(*args))

        parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in names]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    taken = (*contract.parameters, "save") if contract.saved else contract.parameters
    kernels = [fusedops.kernel(op, *constraints)(noting(name, contract.reference_with_saved, taken))]
    if backward is not None:
        run = noting(f"{name} backward", contract.backward, contract.backward_parameters)
        kernels.append(fusedops.kernel(op, *backward, direction="backward")(run))
    return kernels


def noting_backend(op: str, name: str, ran: list[tuple[Any, ...]], priority: int = -9) -> None:
    """Register a backend for the CPU whose kernels are :func:`reference_kernels`."""
    fusedops.register(fusedops.Backend(name, ("cpu",), priority, tuple(reference_kernels(op, name, ran))))


def linear_call(
    dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (3, 7), size: int = 33, classes: int = 57
) -> list[Tensor]:
    """Return x, weight, target and bias of a loss of a linear layer; of 21 rows three are ignored."""
    numbers = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, generator=numbers) for shape in ((*rows, size), (classes, size)))
    bias = torch.randn(classes, generator=numbers)
    target = torch.randint(classes, rows, generator=numbers)
    target.view(-1)[1::9] = -100
    return [x.to(dtype), weight.to(dtype), target, bias.to(dtype)]
