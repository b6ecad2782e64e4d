"""What a test of a backend needs: real calls of an op, the float64 answer, and the op's own tolerance.

Import it explicitly (``import fusedops.testing``); ``import fusedops`` does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusedops._op import OPS, Case, Op, Tolerance
from fusedops.ops._philox import keep_mask

__all__ = ["OPS", "Expected", "arguments", "assert_within", "expected", "keep_mask", "shrunk"]


def shrunk(case: Case, elements: int) -> Case:
    """The case with its leading sizes cut until no tensor has more than ``elements`` elements, for slow devices.

    The last dimension is kept, and the second last is kept a multiple of 32 where it was one: limits still hold.
    """
    shapes: dict[str, list[int]] = {n: [*value] for n, value in case.args.items() if isinstance(value, tuple)}
    largest = max(shapes.values(), key=prod)
    rank = len(largest)
    for dim in range(rank - 1):
        while prod(largest) > elements and largest[dim] > (32 if dim == rank - 2 else 1):
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
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for name, value in case.args.items():
        if not isinstance(value, tuple):
            made[name] = value
            continue
        shape: list[int] = [*value]
        if name == "mask":
            mask = torch.rand(shape, generator=generator) < 0.35
            mask[..., -1, :] |= mask.shape[-2] > 1
            made[name] = mask.to(device)
        else:
            made[name] = (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)
    return op.complete(op.bind((), made))


@dataclass(frozen=True)
class Expected:
    """The float64 answer for a call: the output, the output's gradient used, and the gradients by parameter name."""

    y: Tensor
    grad: Tensor
    gradients: dict[str, Tensor]


def expected(op: Op, args: Sequence[Any], seed: int = 1) -> Expected:
    """Computes the answer and gradients of a call in float64 on the CPU, by the op's reference."""
    wide: list[Any] = []
    wanted = (*op.differentiable, *([op.passed_through] if op.passed_through else []))
    for name, arg in zip(op.parameters, args):
        if isinstance(arg, Tensor):
            arg = arg.detach().cpu()
            if arg.is_floating_point():
                arg = arg.double().requires_grad_(name in wanted)
        wide.append(arg)
    y = op.call_reference(wide)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    # the gradient that a backend gets is rounded to its dtype: round it here too, so that only the kernel is judged
    grad = grad.to(args[0].dtype).double()
    names = [name for name in wanted if wide[op.parameters.index(name)] is not None]
    inputs = [wide[op.parameters.index(name)] for name in names]
    return Expected(y.detach(), grad, dict(zip(names, torch.autograd.grad(y, inputs, grad))))


def assert_within(got: Tensor, want: Tensor, allowed: Tolerance, what: str) -> None:
    """Asserts ``|got - want| <= absolute + relative * |want|``; NaN equals NaN."""
    torch.testing.assert_close(
        got.detach().cpu().double(),
        want.double(),
        atol=allowed.absolute,
        rtol=allowed.relative,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )
