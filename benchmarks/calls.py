"""The calls that are measured: their shapes, from the data of the ops, and their tensors, made on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from benchmarks import headline
from fusedops import Case, Op, TensorSpec, testing
from fusedops.testing._calls import moved_between, specs
from fusedops.testing._roles import (
    between,
    classes,
    indices,
    masks,
    offsets,
    one_elements,
    packed_parts,
    packed_rows,
    slots,
)

SWEEPS = ("large", "cases", "headline", "length", "length-masked", "size")
_SEED = 2**40 + 7
_LIMIT = 2**20  # the largest tensor that testing.arguments makes, on the CPU


def cases(op: Op, sweep: str, elements: int, grow: bool = False) -> Iterator[Case]:
    """Yield the calls of a sweep. No tensor has more than ``elements`` elements.

    Args:
        op: the op.
        sweep: "large", "cases": those of the op. "headline": those of ``headline.CALLS``. "length", "length-masked":
            rows of 64 columns and more, without and with a mask. "size": 1024 columns.
        elements: of the largest tensor.
        grow: the calls of the op get more rows, until their largest tensor has about that size.
    """
    if sweep in ("large", "cases", "headline"):
        of_op = {"large": op.evidence.measured, "cases": op.evidence.cases, "headline": headline.CALLS.get(op.name, ())}
        for case in of_op[sweep]:
            fitted = testing.shrunk(enlarged(case, elements) if grow else case, elements)
            if op.invalid(op.prepared(op.bind((), specs(op, fitted, torch.float32)))) is None:
                yield fitted  # else a size of one tensor was cut alone, such as the keys of a mask
        return
    if op.evidence.sweep is None:
        return
    masked = masks(op)
    if sweep == "length-masked" and not masked:
        return
    widths = [2**n for n in range(6, 18 if elements >= 2**26 else 16)]
    points = [(2**n, 1024) for n in range(0, 19, 2)] if sweep == "size" else [(elements // w, w) for w in widths]
    for rows, width in points:
        if not 0 < rows * width <= elements:
            continue
        call: Mapping[str, Any] = op.evidence.sweep(rows, width)
        if sweep == "length" and any(name in call for name in masked):
            call = {name: value for name, value in call.items() if name not in masked and name != "scale"}
        yield Case(f"{'size' if sweep == 'size' else 'length'} {width if sweep != 'size' else rows * width}", call)


def enlarged(case: Case, elements: int) -> Case:
    """Return the case with its first dim larger, until its largest tensor has about ``elements`` elements."""
    shapes = {name: value for name, value in case.args.items() if isinstance(value, tuple)}
    largest = max(shapes.values(), key=prod)
    factor = max(1, elements // prod(largest))
    grown = {
        name: (shape[0] * factor, *shape[1:])
        for name, shape in shapes.items()
        if shape[0] == largest[0] and (len(shape) == len(largest) or shape == largest[: len(shape)])
    }
    return Case(case.name, {**case.args, **grown}, case.source)


def arguments(op: Op, case: Case, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Return the arguments of a call, made on the device. A third of a mask is set, and no row is fully masked."""
    call = specs(op, case, dtype, device)
    if max(value.numel() for value in call.values() if isinstance(value, TensorSpec)) <= _LIMIT:
        args = testing.arguments(op, case, dtype, device)
    else:
        args = op.prepared(op.bind((), {name: _made(op, call, name) for name in call}))
    for name in masks(op):
        mask = args[op.parameters.index(name)]
        if isinstance(mask, Tensor):
            mask[..., 0] = False
    orders = headline.ORDERS.get((op.name, case.name), {})
    return tuple(_in_order(arg, orders.get(name)) for name, arg in zip(op.parameters, args))


def _in_order(arg: Any, order: tuple[int, ...] | None) -> Any:
    """Return an argument; a tensor with its dims in memory in this order, where there is one."""
    if order is None:
        return arg
    return arg.permute(order).contiguous().permute(*sorted(range(len(order)), key=order.__getitem__))


def _made(op: Op, call: Mapping[str, Any], name: str) -> Any:
    """Return an argument: a random tensor for a spec."""
    spec = call[name]
    if not isinstance(spec, TensorSpec):
        return spec
    for part in packed_parts(op):
        if part.name == name:
            return testing.random_part(part.part, spec.shape, spec.dtype, call[part.format]).to(spec.device)
    for each in slots(op):
        if each.name == name:
            return torch.randperm(prod(call[each.of].shape[:2]), device=spec.device)[: spec.shape[0]]
    for each in indices(op):
        if each.name == name:
            of_row = torch.rand((*spec.shape[:-1], call[each.of].shape[each.dim]), device=spec.device)
            index = of_row.argsort(-1)[..., : spec.shape[-1]].to(spec.dtype)
            return torch.nn.functional.pad(index, (0, spec.shape[-1] - index.shape[-1]), value=-1)
    if spec.is_floating_point():
        numbers = torch.randn(spec.shape, dtype=spec.dtype, device=spec.device)
        bounds = [(each.low, each.high) for each in between(op) if each.name == name]
        return moved_between(3 * numbers, *bounds[0]) if bounds else numbers
    if name in one_elements(op):
        return torch.full(spec.shape, _SEED, dtype=spec.dtype, device=spec.device)
    if name in masks(op) or spec.dtype == torch.bool:
        return torch.empty(spec.shape, dtype=torch.bool, device=spec.device).bernoulli_(1 / 3).to(spec.dtype)
    if spec.dtype == torch.int8:
        return torch.randint(-127, 128, spec.shape, dtype=spec.dtype, device=spec.device)
    for each in packed_rows(op):
        if each.name == name:
            return testing.random_packed(spec.shape, call[each.format]).to(spec.device)
    for each in offsets(op):
        if each.name == name:
            rows = call[each.of or op.parameters[0]].shape[each.dim]
            before = int(each.bounds)  # the start of the first group; the groups are alike
            ends = torch.arange(1 - before, spec.shape[0] + 1 - before, dtype=spec.dtype, device=spec.device)
            return ends * rows // max(spec.shape[0] - before, 1)
    of = {each.name: call[each.of or op.parameters[0]].shape[each.dim] for each in classes(op)}
    most = of.get(name, call[op.parameters[0]].shape[-1])
    return torch.randint(max(most, 1), spec.shape, dtype=spec.dtype, device=spec.device)
