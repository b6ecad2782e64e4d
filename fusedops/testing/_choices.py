"""What says whether two runs, or the ranks of one, choose alike."""

from __future__ import annotations

import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from fusedops._dispatch import plan_for
from fusedops._in_force import get_policy
from fusedops._op import OPS
from fusedops._plan import backward_plan
from fusedops._registry import backends, registry

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def fingerprint() -> dict[str, Any]:
    """What decides how the ops run here, as JSON-ready data: a checkpoint can carry it, and a later run compare.

    Returns:
        ``fusedops`` and ``torch``: their versions. ``packages``: the version of each package that fusedops or a
        backend's distribution declares to need, None where it is not installed. ``policy``: the policy in force, its
        texts by channel, its fallback level and adapt setting. ``backends``: each one's name, state, distribution and
        version. The same in every process of one installation under one policy.
    """
    import fusedops

    infos = sorted(backends(), key=lambda info: info.name)
    policy = get_policy()
    needed = {name for info in infos for name in _requirements(info.distribution)}
    return {
        "fusedops": fusedops.__version__,
        "torch": str(torch.__version__),
        "packages": {name: _version(name) for name in sorted(needed)},
        "policy": {
            "texts": [{"channel": layer.channel, "text": layer.text} for layer in policy.layers if layer.text],
            "fallback": policy.fallback,
            "adapt": policy.adapt,
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
