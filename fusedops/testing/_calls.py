"""Real calls of an op, the float64 answer, and the comparison within the op's own tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from fusedops._op import Case, Op, Tolerance
from fusedops._spec import TensorSpec

_SEED = 2**40 + 7  # of a dropout whose call gives a spec for it


def shrunk(case: Case, elements: int, rows: int = 32) -> Case:
    """The case with its leading sizes cut until no tensor has more than ``elements`` elements, for slow devices.

    The last dimension is kept; the second last is not cut below ``rows``, and with 32 it is kept a multiple of 32 where
    it was one: limits still hold.
    """
    shapes: dict[str, list[int]] = {n: [*value] for n, value in case.args.items() if isinstance(value, tuple)}
    largest = max(shapes.values(), key=prod)
    rank = len(largest)
    for dim in range(rank - 1):
        while prod(largest) > elements and largest[dim] > (rows if dim == rank - 2 else 1):
            before = largest[dim]
            for shape in shapes.values():
                at = dim - rank + len(shape)
                if at >= 0 and shape[at] == before:
                    shape[at] = before // 2
            largest[dim] = before // 2
    return Case(case.name, {**case.args, **{name: tuple(shape) for name, shape in shapes.items()}}, case.source)


def arguments(op: Op, case: Case, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Any, ...]:
    """A call's arguments, in the op's order, with random tensors of the case's shapes.

    A parameter called ``mask`` gets a bool tensor with about a third set and, where it has room, one fully masked row.
    """
    made = tensors(specs(op, case, dtype, device), seed)
    return op.complete(op.bind((), made))


def specs(op: Op, case: Case, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """The case's arguments by name, with a TensorSpec for each tensor: ``mask`` is bool, the others are ``dtype``."""
    found: dict[str, Any] = {}
    for name in case.args:
        value: Any = case.args[name]
        kind = torch.bool if name == "mask" else dtype
        found[name] = TensorSpec(cast("tuple[int, ...]", value), kind, device) if isinstance(value, tuple) else value
    return found


def tensors(call: Mapping[str, Any], seed: int = 0) -> dict[str, Any]:
    """The call with a random tensor for each spec: floating ones, masks of bool and uint8, and a dropout's seed."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for name, value in call.items():
        if not isinstance(value, TensorSpec):
            made[name] = value
            continue
        if value.dtype == torch.int64:
            tensor = torch.full(value.shape, _SEED)
        elif value.is_floating_point():
            tensor = (torch.randn(value.shape, generator=generator) * 3).to(value.dtype)
        else:
            mask = torch.rand(value.shape, generator=generator) < 0.35
            if mask.dim() > 1 and mask.shape[-2] > 1:
                mask[..., -1, :] = True
            tensor = mask.to(value.dtype)
        made[name] = tensor.to(value.device)
    return made


@dataclass(frozen=True)
class Expected:
    """The float64 answer for a call: the output, the output's gradient used, and the gradients by parameter name."""

    y: Tensor
    grad: Tensor
    gradients: dict[str, Tensor]


def expected(op: Op, args: Sequence[Any], seed: int = 1, grad: Tensor | None = None) -> Expected:
    """Computes the answer and gradients of a call in float64 on the CPU, by the op's reference.

    ``grad`` is the output's gradient. None: random, by ``seed``.
    """
    wide: list[Any] = []
    wanted = (*op.differentiable, *([op.passed_through] if op.passed_through else []))
    for name, arg in zip(op.parameters, args):
        if isinstance(arg, Tensor):
            arg = arg.detach().cpu()
            if arg.is_floating_point():
                arg = arg.double().requires_grad_(name in wanted)
        wide.append(arg)
    y = op.call_reference(wide)
    if grad is None:
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        grad = grad.to(args[0].dtype)  # what a backend gets is rounded to its dtype: only the kernel is to be judged
    grad = grad.cpu().double()
    names = [name for name in wanted if wide[op.parameters.index(name)] is not None]
    inputs = [wide[op.parameters.index(name)] for name in names]
    return Expected(y.detach(), grad, dict(zip(names, torch.autograd.grad(y, inputs, grad))))


def assert_within(got: Tensor, want: Tensor, allowed: Tolerance, what: str) -> None:
    """Asserts ``|got - want| <= absolute + relative * |want|``; NaN equals NaN.

    Raises:
        AssertionError: how many elements are off, and the worst of them: where, what it is and what it should be.
    """
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if got.shape != want.shape:
        raise AssertionError(f"{what} has shape {tuple(got.shape)}; needs {tuple(want.shape)}")
    off = ~torch.isclose(got, want, rtol=allowed.relative, atol=allowed.absolute, equal_nan=True)
    count = int(off.sum())
    if count:
        distance = (got - want).abs().nan_to_num(nan=float("inf")).where(off, -1.0)
        at = tuple(int(i) for i in torch.unravel_index(distance.argmax(), distance.shape))
        raise AssertionError(
            f"{what} is off in {count} of {off.numel()} elements; the worst is {float(got[at]):.9g} at {at}, needs "
            f"{float(want[at]):.9g} within {allowed.absolute:g} + {allowed.relative:g} of it"
        )
