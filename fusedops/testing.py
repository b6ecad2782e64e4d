"""What a test of a backend needs: real calls of an op, the float64 answer, and the op's own tolerance. And what says
whether two runs can be compared: :func:`fingerprint`, and :func:`assert_same_choices` for the ranks of one.

Import it explicitly (``import fusedops.testing``); ``import fusedops`` does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedops import _policy
from fusedops._dispatch import plan_for
from fusedops._op import OPS, Case, Op, Tolerance
from fusedops._plan import backward_plan
from fusedops._registry import backends, registry
from fusedops.ops._philox import keep_mask

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "OPS",
    "Expected",
    "arguments",
    "assert_same_choices",
    "assert_within",
    "expected",
    "fingerprint",
    "keep_mask",
    "shrunk",
]


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


def fingerprint() -> dict[str, Any]:
    """What decides how the ops run here, as JSON-ready data: a checkpoint can carry it, and a later run compare.

    Returns:
        ``fusedops`` and ``torch``: their versions. ``packages``: the version of each package that fusedops or a
        backend's distribution declares to need, None where it is not installed. ``policy``: the policy in force, its
        texts by channel, and its fallback level. ``backends``: each one's name, state, distribution and version. The
        same in every process of one installation under one policy.
    """
    import fusedops

    infos = sorted(backends(), key=lambda info: info.name)
    policy = _policy.get_policy()
    needed = {name for info in infos for name in _requirements(info.distribution)}
    return {
        "fusedops": fusedops.__version__,
        "torch": str(torch.__version__),
        "packages": {name: _version(name) for name in sorted(needed)},
        "policy": {
            "texts": [{"channel": layer.channel, "text": layer.text} for layer in policy.layers if layer.text],
            "fallback": policy.fallback,
        },
        "backends": [
            {"name": i.name, "state": i.state, "distribution": i.distribution, "version": i.version} for i in infos
        ],
    }


def _requirements(distribution: str) -> list[str]:
    try:
        given = metadata.requires(distribution) or []
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: a backend registered by hand has no name
        return []
    return [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in given]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def assert_same_choices(group: ProcessGroup | None = None) -> dict[str, str]:
    """Asserts that every rank would run every op, forward and backward, by the same backends in the same order.

    Looks at tensors of the device that the group's ranks compute on, and at the policy in force in this thread. All
    ranks of the group call it together: it gathers their choices.

    Args:
        group: the ranks to compare. None: all.

    Returns:
        For each op and its backward the backends, each with its distribution and version, the first one first.

    Raises:
        AssertionError: on every rank, where two differ: which ranks, which op, both choices, and what to do.
    """
    from torch import distributed

    mine = _choices()
    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    gathered: list[dict[str, str]] = [{} for _ in ranks]
    distributed.all_gather_object(gathered, mine, group=group)
    first = gathered[0]
    told = [
        f"rank {rank} would run {what} by {choice}, rank {ranks[0]} by {first[what]}"
        for rank, theirs in zip(ranks, gathered)
        for what, choice in theirs.items()
        if choice != first[what]
    ]
    if told:
        raise AssertionError(
            f"{'; '.join(told)}. Needs the same on every rank: call fusedops.set_policy with one text everywhere, set "
            f"FUSEDOPS_BACKEND for all ranks, and see in fusedops.backends() on both ranks why one backend is not ready"
        )
    return mine


def _choices() -> dict[str, str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    x = torch.empty(0, device=accelerator or "cpu")
    found: dict[str, str] = {}
    for op in OPS.values():
        plan = plan_for(op, x, None)
        backward = backward_plan(plan, plan.first.backend if plan.first else "")
        for what, each in ((op.name, plan), (f"{op.name} backward", backward)):
            records = [registry.find(entry.backend) for entry in each.entries]
            words = [f"{record.name} ({record.distribution} {record.version})" for record in records if record]
            found[what] = ", then ".join(words) or "nobody"
    return found
