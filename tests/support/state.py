"""The private names and state of the core that tests need. No other module of the tests touches the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fusedops._contract.evidence import Tolerance as Tolerance
from fusedops._contract.op import Op as Op
from fusedops._dispatch.selection import fallback
from fusedops._plugins.registry import registry
from fusedops._policy import context
from fusedops._policy.policy import AUTO as AUTO
from fusedops._policy.policy import PolicySource as PolicySource
from fusedops._policy.policy import parse as parse
from fusedops.testing import isolated as isolated

#: The environment variables of the core and of the backends here.
VARIABLES: tuple[str, ...] = tuple(context.variables())

#: Source of a function that takes every lock of the core and of a backend.
ALL_LOCKS = """
    import contextlib
    from fusedops._dispatch.selection import stats
    from fusedops._policy import context
    from fusedops._plugins.registry import registry
    def all_locks():
        held = contextlib.ExitStack()
        for lock in (registry._lock, context._lock, stats._reading, registry.find("eager").lock):
            held.enter_context(lock)
        return held
"""


# ------------------------------------------------------------------------------------------------------------- policies


def forget_warnings() -> None:
    """Let each warning be given again."""
    fallback.forget_reports()
    context.drop_plans()


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that grows by one for each plan that is made."""
    plans: list[Any] = []
    real = fallback.make_plan
    monkeypatch.setattr(fallback, "make_plan", lambda *args, **kwargs: plans.append(args) or real(*args, **kwargs))
    return plans


# ------------------------------------------------------------------------------------------------------------- backends


def keep_backends(*names: str) -> None:
    """Remove all backends but these."""
    _replace_records([record for record in registry.records() if record.name in names])


def only_own_backends() -> None:
    """Remove the backends that are not in the distribution ``fusedops``."""
    _replace_records([record for record in registry.records() if record.distribution == "fusedops"])


def no_optional_backends() -> None:
    """Remove the optional backends: which of them serves depends on what was compiled at the installation."""
    _replace_records([record for record in registry.records() if not (record.backend and record.backend.optional)])


def remove_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the plugins that observe events, until the end of the test."""
    monkeypatch.setattr(registry, "_observers", {})


def rediscover() -> None:
    """Let backends be discovered again at the next call that needs them."""
    _replace_records(None)


def discovery_errors(entry_points: list[Any]) -> list[BaseException]:
    """Return the errors of the backends that these entry points give."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusedops._plugins.discovery.entry_points", lambda group: entry_points)
        patch.setattr(registry, "_records", None)
        return [record.error for record in registry.records() if record.error is not None]


def fail_backend(name: str, error: BaseException) -> None:
    """Replace a backend by one that failed to load."""
    record = backend_record(name)
    failed = type(record)(name, error=error, distribution="fusedops")
    _replace_records([*(r for r in registry.records() if r is not record), failed])


def probe_again(name: str) -> None:
    """Let a backend be probed again: the outcome depends on what is installed."""
    record = backend_record(name)
    record._probed = False
    record.unavailable = None
    record.error = None
    forget_warnings()


def backend_names() -> list[str]:
    """Return the names of the registered backends, loaded or not."""
    return list(registry.names())


def backend_record(name: str) -> Any:
    """Return what the registry keeps of a backend."""
    record = registry.find(name)
    assert record is not None, name
    return record


def backend_records() -> list[Any]:
    """Return what the registry keeps of each backend."""
    return list(registry.records())


def kernel_entry(backend: str, op: str, direction: str = "forward") -> Any:
    """Return a backend's kernel for the first of its device types, prepared for calls."""
    record = backend_record(backend)
    return record.kernel(op, direction, record.backend.device_types[0])


def problems() -> list[Any]:
    """Return the problems that ``python -m fusedops doctor`` reports."""
    from fusedops._cli import doctor

    return list(doctor.problems())


def _replace_records(records: list[Any] | None) -> None:
    registry._records = records
    registry.changed()


def without_backends(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return ``call`` for a process in which no backend is installed."""

    def run() -> Any:
        keep_backends()
        return call()

    return run


def active_plans() -> dict[Any, Any]:
    """Return the plans of the policy in effect, by op and device type."""
    return context.active_policy().plans
