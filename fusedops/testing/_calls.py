"""Calls of an op: as specs, and with random tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.evidence import Case
from fusedops._contract.op import Op
from fusedops._contract.tensor_spec import TensorSpec
from fusedops.dtypes import STORAGE
from fusedops.quantization import FORMATS, SCALED
from fusedops.testing._packed import random_packed, random_part
from fusedops.testing._roles import (
    between,
    classes,
    dtype_of,
    indices,
    lengths,
    masks,
    offsets,
    one_elements,
    packed_parts,
    packed_rows,
    slots,
)

Call = dict[str, Any]  # a forward call by parameter, in the op's order; each tensor as a TensorSpec

_SEED = 2**40 + 7  # the value of a tensor of one integer, such as a seed: it needs more than 32 bits


def shrunk(case: Case, elements: int, rows: int = 32) -> Case:
    """Return the case with its leading sizes cut until no tensor has more than ``elements`` elements.

    For slow devices. The last dimension is kept. The second last is not cut below ``rows``: with 32 it stays a multiple
    of 32 where it was one, so that constraints are still met.

    >>> from fusedops import testing
    >>> testing.shrunk(testing.Case("large", {"x": (8, 1024, 768)}), 2**16).args
    {'x': (1, 64, 768)}
    """
    shapes: dict[str, list[int]] = {n: [*value] for n, value in case.args.items() if isinstance(value, tuple)}
    for name in sorted(shapes, key=lambda each: -prod(shapes[each])):
        _shrink(shapes, shapes[name], elements, rows)
    return Case(case.name, {**case.args, **{name: tuple(shape) for name, shape in shapes.items()}}, case.source)


def _shrink(shapes: dict[str, list[int]], largest: list[int], elements: int, rows: int) -> None:
    """Cut one of the shapes, and the same sizes of the others."""
    rank = len(largest)
    first_dim = {name: 0 if _leads(shape, largest) else rank - len(shape) for name, shape in shapes.items()}
    for dim in range(rank - 1):
        while prod(largest) > elements and largest[dim] > (rows if dim == rank - 2 else 1):
            before = largest[dim]
            for name, shape in shapes.items():
                at = dim - first_dim[name]
                if 0 <= at < len(shape) and shape[at] == before:
                    shape[at] = before // 2
            largest[dim] = before // 2


def _leads(shape: list[int], largest: list[int]) -> bool:
    """Return True for a tensor that has the leading sizes of the largest one, such as a class for each row."""
    broadcasts = all(size in (1, full) for size, full in zip(reversed(shape), reversed(largest)))
    return not broadcasts and shape == largest[: len(shape)]


def arguments(op: Op, case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Any, ...]:
    """Return the arguments of a call, in the op's order, with random tensors of the case's shapes.

    A mask has about a third of its positions set and, where it has several rows, one fully masked row.

    >>> import torch
    >>> from fusedops import testing
    >>> x, bias, approximate = testing.arguments(
    ...     testing.OPS["bias_gelu"], testing.Case("small", {"x": (2, 3)}), torch.float32
    ... )
    >>> x.shape, bias, approximate
    (torch.Size([2, 3]), None, 'tanh')
    """
    return op.prepared(op.bind((), tensors(op, specs(op, case, dtype, device), seed)))


def specs(op: Op, case: Case, dtype: torch.dtype, device: str = "cpu") -> Call:
    """Return the case's arguments by name, with a TensorSpec of ``dtype``, where accepted, for each tensor.

    In a case that was cut, sizes that a constraint takes from another tensor follow it.
    """
    call: Call = {}
    for name, value in case.args.items():
        if isinstance(value, tuple):
            shape = cast("tuple[int, ...]", value)
            call[name] = TensorSpec(shape, dtype_of(op, name, dtype), device)
        else:
            call[name] = value.replace(device=device) if isinstance(value, TensorSpec) else value
    defaults = dict(zip(op.parameters, op.defaults))
    for constraint in op.constraints:
        if isinstance(call.get(constraint.name), TensorSpec):
            call[constraint.name] = constraint.follow({**defaults, **call}) or call[constraint.name]
    return call


def tensors(op: Op, call: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """Return the call with a random tensor for each spec."""
    generator = torch.Generator().manual_seed(seed)
    first: TensorSpec = call[op.parameters[0]]
    real: dict[str, Any] = {}
    for name, value in call.items():
        real[name] = _random(op, name, value, first, generator) if isinstance(value, TensorSpec) else value
    defaults = dict(zip(op.parameters, op.defaults))
    for constraint in classes(op):
        target = real.get(constraint.name)
        if isinstance(target, Tensor) and isinstance(call[constraint.name], TensorSpec):
            count = call[constraint.of or op.parameters[0]].shape[constraint.dim]
            values = target.cpu() % max(count, 1)
            if constraint.ignored is not None:
                values.view(-1)[2::5] = call.get(constraint.ignored, defaults[constraint.ignored])
            if constraint.sentinels:
                values.view(-1)[2::5] = count
                values.view(-1)[3::11] = -1
            real[constraint.name] = values.to(target.device)
    for constraint in offsets(op):
        spec = call.get(constraint.name)
        if isinstance(spec, TensorSpec):
            rows = (*call[constraint.of or op.parameters[0]].shape[constraint.dim :], 0)[0]
            real[constraint.name] = random_offsets(spec.shape, rows, generator).to(spec.dtype).to(spec.device)
    for constraint in lengths(op):
        spec = call.get(constraint.name)
        if isinstance(spec, TensorSpec):
            most = prod(call[of].shape[dim] for of, dim in constraint.sizes)
            real[constraint.name] = random_lengths(spec.shape, most, generator).to(spec.dtype).to(spec.device)
    for constraint in slots(op):
        spec = call.get(constraint.name)
        if isinstance(spec, TensorSpec):
            real[constraint.name] = random_slots(spec.shape, prod(call[constraint.of].shape[:2]), generator).to(
                spec.device
            )
    for constraint in indices(op):
        spec = call.get(constraint.name)
        if isinstance(spec, TensorSpec):
            available = (*call[constraint.of].shape[constraint.dim :], 0)[0]
            chosen = random_indices(spec.shape, available, generator)
            real[constraint.name] = chosen.to(spec.dtype).to(spec.device)
    for constraint in between(op):
        if isinstance(call.get(constraint.name), TensorSpec):
            real[constraint.name] = moved_between(real[constraint.name], constraint.low, constraint.high)
    for constraint in packed_rows(op):
        spec, format = call[constraint.name], call.get(constraint.format, defaults.get(constraint.format))
        if isinstance(spec, TensorSpec) and format in (*FORMATS, *SCALED):
            real[constraint.name] = random_packed(spec.shape, format, generator).to(spec.device)
    for constraint in packed_parts(op):
        spec, format = call.get(constraint.name), call.get(constraint.format, defaults.get(constraint.format))
        if isinstance(spec, TensorSpec) and format in SCALED:
            part = random_part(constraint.part, spec.shape, spec.dtype, format, generator)
            real[constraint.name] = part.to(spec.device)
    return real


def random_offsets(shape: tuple[int, ...], rows: int, generator: torch.Generator) -> Tensor:
    """Return the ends of random groups of rows, int64: every third group is empty, and often some rows have none.

    >>> import torch
    >>> from fusedops.testing._calls import random_offsets
    >>> random_offsets((5,), 9, torch.Generator().manual_seed(0))
    tensor([0, 3, 3, 4, 9])
    """
    ends = torch.randint(rows + 1, shape, generator=generator).sort(-1).values
    flat = ends.view(-1)
    if ends.dim() == 1:
        flat[2::3] = flat[1::3][: flat[2::3].numel()]
    return ends


def random_lengths(shape: tuple[int, ...], most: int, generator: torch.Generator) -> Tensor:
    """Return random numbers of rows, int64: every third one is 0, and the first one is the largest.

    >>> import torch
    >>> from fusedops.testing._calls import random_lengths
    >>> random_lengths((5,), 9, torch.Generator().manual_seed(0))
    tensor([9, 9, 0, 0, 3])
    """
    lengths = torch.randint(most + 1, shape, generator=generator)
    lengths.view(-1)[2::3] = 0
    lengths.view(-1)[:1] = most
    return lengths


def random_slots(shape: tuple[int, ...], available: int, generator: torch.Generator) -> Tensor:
    """Return the places of tokens, each once; -1 for every fifth, and for those that find no place.

    >>> import torch
    >>> from fusedops.testing._calls import random_slots
    >>> random_slots((4,), 3, torch.Generator().manual_seed(0))
    tensor([ 2,  0, -1, -1])
    """
    count = prod(shape)
    found = torch.full((count,), -1)
    each = torch.randperm(available, generator=generator)[:count]
    found[: len(each)] = each
    found[2::5] = -1
    return found.view(shape)


def random_indices(shape: tuple[int, ...], available: int, generator: torch.Generator) -> Tensor:
    """Return places of rows in random order, each once in the last dim; -1 for every fifth, and where all are used.

    >>> import torch
    >>> from fusedops.testing._calls import random_indices
    >>> random_indices((2, 3), 4, torch.Generator().manual_seed(0))
    tensor([[ 2,  3, -1],
            [ 0,  2,  1]])
    """
    size = shape[-1] if shape else 0
    order = torch.rand((*shape[:-1], max(available, size)), generator=generator).argsort(-1)
    found = order[..., :size].masked_fill(order[..., :size] >= available, -1).reshape(shape)
    found.view(-1)[2::5] = -1
    return found


def moved_between(numbers: Tensor, low: float | None, high: float) -> Tensor:
    """Return random numbers between two bounds from normal ones of a size of 3, in their dtype.

    Where ``low`` is None, the distances from ``high`` differ by column, from about 1 to 1/1000, and some numbers are
    -inf.

    >>> import torch
    >>> from fusedops.testing._calls import moved_between
    >>> moved_between(torch.tensor([-3.0, 0.0, 3.0]), 0.0, 1.0)
    tensor([0.0474, 0.5000, 0.9526])
    """
    wide = numbers.cpu().double()
    if low is not None:
        return (low + (high - low) * wide.sigmoid()).to(numbers)
    columns = torch.arange(numbers.shape[-1] if numbers.dim() else 1) % 4
    below = (high - (wide / 3).abs() * 0.1 ** columns.double()).reshape(numbers.shape).contiguous()
    below.view(-1)[13::97] = -math.inf
    return below.to(numbers)


def _random(op: Op, name: str, spec: TensorSpec, first: TensorSpec, generator: torch.Generator) -> Tensor:
    if spec.is_floating_point():
        tensor = torch.randn(spec.shape, generator=generator) * 3
    elif name in one_elements(op):
        tensor = torch.full(spec.shape, _SEED)
    elif name in masks(op) or spec.dtype == torch.bool:
        tensor = torch.rand(spec.shape, generator=generator) < 0.35
        if tensor.dim() > 1 and tensor.shape[-2] > 1:
            tensor[..., -1, :] = True
    elif spec.dtype == torch.int8:
        tensor = torch.randint(-127, 128, spec.shape, generator=generator)
    else:  # integers are positions in the last dimension of the first tensor, such as classes
        most = 2**31 if name in [constraint.name for constraint in classes(op)] else max(first.shape[-1], 1)
        tensor = torch.randint(most, spec.shape, generator=generator)
    return tensor.to(spec.dtype).to(spec.device)


def followed(op: Op, call: Call, name: str, shape: tuple[int, ...]) -> Call:
    """Return the call with one tensor of another shape; tensors that had its sizes, or its rank, follow."""
    old: tuple[int, ...] = call[name].shape
    following = [c for c in op.constraints if c.name != name and c.follow(call) is not None]
    fixed = (*one_elements(op), *(constraint.name for constraint in following))
    changed: Call = {}
    for other, value in call.items():
        if other == name:
            changed[other] = value.replace(shape=shape)
        elif isinstance(value, TensorSpec) and other not in fixed:
            changed[other] = value.replace(shape=_following(value.shape, old, shape))
        else:
            changed[other] = value
    for constraint in following:
        changed[constraint.name] = constraint.follow(changed) or changed[constraint.name]
    return changed


def _following(sizes: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    if sizes == old:
        return new
    # dims before those of the changed tensor stay; one of its rank keeps its rank
    lead = sizes[: max(len(sizes) - len(old), 0)] or (new[: len(new) - len(old)] if len(sizes) == len(old) else ())
    inner = sizes[-len(old) :] if old else ()
    aligned = range(-min(len(inner), len(new)), 0)
    return (*lead, *(new[at] if inner[at] == old[at] else inner[at] for at in aligned))


def is_of_numbers(value: Any) -> bool:
    """Return True for the spec of a floating tensor that torch computes with: not of codes of 8 bits.

    >>> import fusedops, torch
    >>> from fusedops.testing._calls import is_of_numbers
    >>> is_of_numbers(fusedops.TensorSpec((2,))), is_of_numbers(fusedops.TensorSpec((2,), torch.float8_e4m3fn))
    (True, False)
    """
    return isinstance(value, TensorSpec) and value.dtype in STORAGE


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """Return the call with every floating tensor in ``dtype``."""
    return {name: value.replace(dtype=dtype) if is_of_numbers(value) else value for name, value in call.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32``, without torch's name before it."""
    return str(dtype).removeprefix("torch.")
