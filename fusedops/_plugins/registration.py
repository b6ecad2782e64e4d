"""The public functions on the registry: register, unregister, backends."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, overload

from fusedops._contract.backend import Backend
from fusedops._contract.kernel import ops_of
from fusedops._plugins.record import Record, State
from fusedops._plugins.registry import registry
from fusedops._report.table import html_table


@dataclass(frozen=True)
class BackendInfo:
    """One row of :func:`backends`.

    Attributes:
        name: as written in a policy.
        state: "ready", "unavailable" (it loaded, but cannot run on this machine) or "failed" (it did not load).
        why: one sentence, empty when ready.
        fix: what to do, empty when ready.
        device_types: what it serves; ("*",) is every device.
        priority: its place in the default order, high first.
        ops: the ops that it has kernels for.
        distribution: the installed package that it comes from, with ``version`` and ``file``.
        error: the whole traceback of a failed one.

    >>> import fusedops
    >>> fusedops.BackendInfo("mine", "ready", device_types=("cpu",), priority=5, ops=("bias_gelu",))
    <mine, for cpu, priority 5, 1 ops, ready>
    """

    name: str
    state: State
    why: str = ""
    fix: str = ""
    device_types: tuple[str, ...] = ()
    priority: int = 0
    ops: tuple[str, ...] = ()
    distribution: str = ""
    version: str = ""
    file: str = ""
    error: str = ""

    def __repr__(self) -> str:
        serves = ", ".join(self.device_types) or "no device"
        state = self.state if self.state == "ready" else f"{self.state}: {self.why}; to fix: {self.fix}"
        return f"<{self.name}, for {serves}, priority {self.priority}, {len(self.ops)} ops, {state}>"


class BackendList(list[BackendInfo]):
    """A list of :class:`BackendInfo` that a notebook shows as a table."""

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no backends"

    def _repr_html_(self) -> str:
        rows = [(i.name, i.state, ", ".join(i.device_types), i.priority, i.why, i.fix) for i in self]
        return html_table("backends", ("name", "state", "devices", "priority", "why", "fix"), rows)


@overload
def register(plugin: Backend, name: str | None = None) -> Backend: ...
@overload
def register(plugin: Any, name: str | None = None) -> Backend | None: ...
def register(plugin: Any, name: str | None = None) -> Backend | None:
    """Add a backend, an op, or a plugin with hooks, to this process.

    Args:
        plugin: a :class:`fusedops.Backend`, a :class:`fusedops.Op`, or a module or object with functions marked
            ``@fusedops.hookimpl``: ``fusedops_backend``, ``fusedops_op``, ``fusedops_observe``.
        name: the plugin's name in messages, and for :func:`unregister` where it has no backend. None: the name of the
            module or class.

    Returns:
        The backend, or None where the plugin has none.

    Raises:
        PluginError: a name is taken, or a kernel does not fit the op.

    >>> import fusedops
    >>> backend = fusedops.register(fusedops.Backend("mine", ("cpu",), -1, ()))
    >>> [info.state for info in fusedops.backends() if info.name == "mine"]
    ['ready']
    >>> fusedops.unregister("mine")
    """
    return registry.register(plugin, name)


def unregister(name: str) -> None:
    """Remove a backend (with the ops of its plugin), an op, or a plugin that observes, from this process.

    Raises:
        PluginError: no backend, op or plugin has that name.

    >>> import fusedops
    >>> backend = fusedops.register(fusedops.Backend("mine", ("cpu",), -1, ()))
    >>> fusedops.unregister("mine")
    """
    registry.unregister(name)


def backends() -> BackendList:
    """Return every backend of this process, in the default order, with its state and, if not ready, why and the fix.

    >>> import fusedops
    >>> any(info.state == "ready" for info in fusedops.backends())
    True
    """
    return BackendList(_info(record) for record in registry.whole() if not record.has_only_ops)


def _info(record: Record) -> BackendInfo:
    reason = record.refusal()
    error = record.error
    backend = record.backend
    return BackendInfo(
        name=record.name,
        state="ready" if reason is None else "failed" if error is not None else "unavailable",
        why=reason.given if reason else "",
        fix=reason.fix if reason else "",
        device_types=backend.device_types if backend else (),
        priority=backend.priority if backend else 0,
        ops=ops_of(backend.kernels) if backend else (),
        distribution=record.distribution,
        version=record.version,
        file=record.file,
        error="".join(traceback.format_exception(type(error), error, error.__traceback__)) if error else "",
    )
