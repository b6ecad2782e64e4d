"""Comparison of what selects backends, between two runs and between the ranks of one."""

from __future__ import annotations

import re
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from fusedops._dispatch.selection.plan import Plan, make_plan
from fusedops._plugins.registration import backends
from fusedops._plugins.registry import registry
from fusedops._policy.context import active_policy, get_policy
from fusedops._report.direction import call_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def fingerprint() -> dict[str, Any]:
    """Return what decides how the ops run here, as JSON-ready data, for a checkpoint that a later run compares.

    Returns:
        ``fusedops`` and ``torch``: their versions. ``packages``: the version of each package that fusedops or a
        backend's distribution requires, None where it is not installed. ``policy``: the policy in effect, its texts by
        channel, its fallback level, adapt and rows settings. ``backends``: the name, state, distribution and version of
        each. The same in every process of one installation under one policy.

    >>> from fusedops import testing
    >>> [*testing.fingerprint()]
    ['fusedops', 'torch', 'packages', 'policy', 'backends']
    """
    from fusedops._version import __version__

    infos = sorted(backends(), key=lambda info: info.name)
    policy = get_policy()
    required = {name for info in infos for name in _requirements(info.distribution)}
    return {
        "fusedops": __version__,
        "torch": str(torch.__version__),
        "packages": {name: _version(name) for name in sorted(required)},
        "policy": {
            "texts": [{"channel": source.channel, "text": source.text} for source in policy.sources if source.text],
            "fallback": policy.fallback,
            "adapt": policy.adapt,
            "rows": policy.rows,
        },
        "backends": [
            {"name": i.name, "state": i.state, "distribution": i.distribution, "version": i.version} for i in infos
        ],
    }


def _requirements(distribution: str) -> list[str]:
    try:
        requirements = metadata.requires(distribution) or []
    except (metadata.PackageNotFoundError, ValueError):  # ValueError: a backend registered by hand has no name
        return []
    return [re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def assert_same_choices(group: ProcessGroup | None = None) -> dict[str, str]:
    """Assert that every rank would run every op, forward and backward, by the same backends in the same order.

    The adapt, fallback and rows settings are compared too: with them one call may run by other backends.

    Considers tensors of the device that the group's ranks compute on, and the policy in effect in this thread. All
    ranks of the group call it together: it gathers their choices.

    Args:
        group: the ranks to compare. None: all.

    Returns:
        For each op and its backward the backends, each with its distribution and version, the first one first.

    Raises:
        AssertionError: on every rank, where two differ in a choice, or in the policy's adapt, fallback or rows setting:
            the ranks, the op or the setting, both values, and the fix.

    >>> from torch import distributed
    >>> from fusedops import testing
    >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    >>> choices = testing.assert_same_choices()
    >>> distributed.destroy_process_group()
    >>> "bias_gelu backward" in choices
    True
    """
    from torch import distributed

    mine, policy = _choices(), get_policy()
    settings = {"adapt": policy.adapt, "fallback": policy.fallback, "rows": policy.rows}
    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    gathered: list[tuple[dict[str, str], dict[str, str]]] = [({}, {}) for _ in ranks]
    distributed.all_gather_object(gathered, (mine, settings), group=group)
    first, first_settings = gathered[0]
    differences = [
        f"rank {rank} would run {call} by {theirs.get(call, 'no backend')}, rank {ranks[0]} by "
        f"{first.get(call, 'no backend')}"
        for rank, (theirs, _) in zip(ranks, gathered)
        for call in dict.fromkeys((*theirs, *first))
        if theirs.get(call) != first.get(call)
    ]
    differences += [
        f"rank {rank} has {name}={value!r}, rank {ranks[0]} {first_settings[name]!r}"
        for rank, (_, theirs) in zip(ranks, gathered)
        for name, value in theirs.items()
        if value != first_settings[name]
    ]
    if differences:
        raise AssertionError(
            f"got other choices on some ranks: {'; '.join(differences)}; expected the same on every rank; to fix: call "
            f"fusedops.set_policy with the same arguments everywhere, set FUSEDOPS_BACKEND for all ranks, and compare "
            f"the states in fusedops.backends()"
        )
    return mine


def _choices() -> dict[str, str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = accelerator.type if accelerator else "cpu"
    active = active_policy()
    registry.records()  # loads the plugins, whose ops count too
    choices: dict[str, str] = {}
    for op in registry.ops.values():
        plan = make_plan(op, active, device_type)  # not plan_for, which reports fallbacks: nothing runs here
        prefer = plan.first.backend if plan.first else None
        backward = make_plan(op, active, device_type, "backward", prefer=prefer)
        choices[op.name], choices[call_name(op.name, "backward")] = _order(plan), _order(backward)
    return choices


def _order(plan: Plan) -> str:
    names = dict.fromkeys(kernel.backend for kernel in plan.kernels)
    records = [registry.find(name) for name in names]
    texts = [f"{record.name} ({record.distribution} {record.version})" for record in records if record]
    return ", then ".join(texts) or "no backend"
