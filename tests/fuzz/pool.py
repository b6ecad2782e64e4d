"""Calls whose results are known, for runs of many threads and processes: what each backend gives, bit for bit."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedops
from fusedops._plugins.registry import registry
from fusedops.testing import OPS
from tests.fuzz.call import Made
from tests.fuzz.generate import generate
from tests.fuzz.machine import SMALL, Target

Bits = tuple[bytes, ...]


@dataclass(frozen=True)
class Known:
    """A call and its results.

    Attributes:
        target: its op and the backend that takes it.
        args: every argument, in the op's order, complete.
        bits: of the outputs and gradients, by the backend of the outputs.
    """

    target: Target
    args: tuple[Any, ...]
    bits: dict[str, Bits]

    @property
    def outputs(self) -> int:
        """The number of outputs, which come first in ``bits``."""
        leaves = sum(isinstance(arg, Tensor) and arg.requires_grad for arg in self.args)
        return len(next(iter(self.bits.values()))) - leaves

    def run(self, backend: str | None = None) -> Bits:
        """Make the call with its gradients, and return the bytes of all results."""
        op = OPS[self.target.op]
        outputs = [y for y in op.as_tuple(op.call_public(*self.args, backend=backend)) if y is not None]
        leaves = [arg for arg in self.args if isinstance(arg, Tensor) and arg.requires_grad]
        with_gradient = [y for y in outputs if y.is_floating_point()]
        grads = [torch.full_like(y, 0.5) for y in with_gradient]
        found = torch.autograd.grad(with_gradient, leaves, grads) if leaves else ()
        return tuple(_bytes(each) for each in (*outputs, *found))

    def decision(self, backend: str | None = None) -> Any:
        """Return the decision for the call."""
        return fusedops.explain(self.target.op, **dict(zip(OPS[self.target.op].parameters, self.args)), backend=backend)


_TRIES = 200  # for a call that a backend takes: one that takes large calls alone is left out


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def known_calls(aims: Sequence[Target], others: Sequence[str], dice: random.Random, count: int) -> list[Known]:
    """Return ``count`` calls for each target that its backend takes, forward and, where it has a kernel, backward.

    With the results of a backend that is slower than the target's none is compared: an interpreter is never selected.

    Args:
        aims: the targets.
        others: backends whose results are wanted besides those of the targets.
        dice: draws the calls.
        count: for each target.
    """
    calls: list[Known] = []
    for aim in aims:
        with_backward = _has_backward(aim)
        added = 0
        for _ in range(_TRIES * count):
            if added == count:
                break
            args = _arguments(aim, dice, with_backward)
            if args is None:
                continue
            known = Known(aim, args, {})
            for name in dict.fromkeys((aim.backend, *aim.others, *others)):
                if known.decision(name).backend == name:
                    known.bits[name] = known.run(name)
            taken = aim.backend in known.bits
            if taken and (not with_backward or known.decision(aim.backend).backward == aim.backend):
                calls.append(known)
                added += 1
    return calls


def _has_backward(aim: Target) -> bool:
    record = registry.find(aim.backend)
    assert record is not None
    return any(each.kernel.op == aim.op and each.kernel.direction == "backward" for each in record.kernels)


def _arguments(aim: Target, dice: random.Random, gradients: bool) -> tuple[Any, ...] | None:
    """Return the arguments of a small valid call, with ``gradients`` of every tensor that has one; None for others."""
    op = OPS[aim.op]
    call = generate(aim._replace(elements=min(aim.elements, SMALL)), f"pool:{dice.random()}")
    if any(made.alias for made in call.tensors().values()):
        return None
    lines = [line for name, made in call.tensors().items() for line in made.lines(name)]
    space: dict[str, Any] = {"torch": torch, "math": math, "fusedops": fusedops}
    exec("\n".join(lines), space)
    values = {name: space[name] if isinstance(value, Made) else value for name, value in call.args.items()}
    try:
        args = op.prepared(op.bind((), values))
        op.validate(args)
    except fusedops.InvalidInputError:
        return None
    wanted = (*op.differentiable, op.passed_through) if gradients else ()
    return tuple(
        arg.detach().requires_grad_() if isinstance(arg, Tensor) and name in wanted else arg
        for name, arg in zip(op.parameters, args)
    )
