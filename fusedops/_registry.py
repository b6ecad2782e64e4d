"""Which backends there are: found through entry points, checked, probed when first needed, failures kept as a state."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Literal

from fusedops._backend import Backend, Kernel, Unavailable, check_backend
from fusedops._op import OPS, Direction
from fusedops.errors import PluginError

if TYPE_CHECKING:
    from fusedops.constraints import Constraint, Reason

GROUP = "fusedops.backends"
OWN_DISTRIBUTION = "fusedops"

State = Literal["ready", "unavailable", "failed"]


class Entry:
    """A kernel made ready for the hot path: its compiled check and its positional function."""

    __slots__ = ("backend", "call", "check", "kernel")

    def __init__(self, backend: str, kernel: Kernel) -> None:
        from fusedops.constraints import compile_check  # not at import, where it would cost 5 ms

        op = OPS[kernel.op]
        parameters = op.parameters if kernel.direction == "forward" else op.backward_parameters
        self.backend = backend
        self.kernel = kernel
        self.check: Callable[..., Constraint | None] | None = compile_check(parameters, kernel.limits)
        self.call = op.positional(kernel.function) if kernel.direction == "forward" else kernel.function


@dataclass(eq=False)
class Record:
    """One backend as the registry knows it: loaded, or failed with its error."""

    name: str
    backend: Backend | None = None
    error: Exception | None = None
    unavailable: Unavailable | None = None
    distribution: str = ""
    version: str = ""
    file: str = ""
    probed: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @cached_property
    def entries(self) -> dict[tuple[str, Direction], Entry]:
        """The kernels, ready for the hot path, by op and direction."""
        kernels = self.backend.kernels if self.backend else ()
        return {(item.op, item.direction): Entry(self.name, item) for item in kernels}

    def probe(self) -> None:
        """Finds out, once, whether the backend can run here. A probe that raises is a failed backend."""
        with self._lock:
            if self.probed or self.backend is None or self.unavailable is not None:
                return
            try:
                self.unavailable = self.backend.probe()
            except Exception as error:  # a plugin's probe must not take the program down; the error is kept and shown
                self.error = PluginError(f"backend {self.name!r}: its probe raised {_words(error)}")
                self.error.__cause__ = error
            self.probed = True

    def refusal(self) -> Reason | None:
        """Why this backend serves nothing here, or None. Probes."""
        from fusedops.constraints import Reason, ReasonCode

        self.probe()
        if self.error is not None:
            why = _words(self.error)
            fix = f"fix or uninstall {self.distribution or self.name}; fusedops.backends() shows the traceback"
            return Reason(ReasonCode.FAILED, f"failed: {why}", why, "a plugin that loads", fix)
        if self.unavailable is not None:
            why, fix = self.unavailable.why, self.unavailable.fix
            needed = self.backend.needs if self.backend and self.backend.needs else "an installation that runs here"
            return Reason(ReasonCode.UNAVAILABLE, f"unavailable: {why}", why, needed, fix)
        return None


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
        ops: the ops it has kernels for.
        distribution: the installed package it comes from, with ``version`` and ``file``.
        error: the whole traceback of a failed one.
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


class Registry:
    """All backends of this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: list[Record] | None = None
        self.on_change: list[Callable[[], None]] = []

    def records(self) -> list[Record]:
        """Every record, in the default order: ready or not, by priority. Loads the plugins on first use."""
        records = self._records
        if records is None:
            with self._lock:
                if self._records is None:
                    self._records = _in_order(_discover())
                records = self._records
        return records

    def names(self) -> list[str]:
        """Names that a policy may use."""
        return list(dict.fromkeys(record.name for record in self.records()))

    def find(self, name: str) -> Record | None:
        """The record that ``name`` stands for: the one that loaded, where several claim the name."""
        claims = [record for record in self.records() if record.name == name]
        return next((record for record in claims if record.backend is not None), claims[0] if claims else None)

    def register(self, plugin: Any, name: str | None = None) -> Backend:
        """See :func:`fusedops.register`."""
        backend = plugin if isinstance(plugin, Backend) else _backend_of(plugin, name)
        with self._lock:
            records = self.records()
            if any(record.name == backend.name and record.backend is not None for record in records):
                raise PluginError(
                    f"backend {backend.name!r} is already registered; choose another name, or "
                    f"fusedops.unregister({backend.name!r}) first"
                )
            check_backend(backend, OPS)
            module = sys.modules.get(getattr(plugin, "__name__", "") or type(plugin).__module__)
            record = Record(
                backend.name, backend, distribution="(registered)", file=getattr(module, "__file__", "") or ""
            )
            self._records = _in_order([*records, record])
        self._changed()
        return backend

    def unregister(self, name: str) -> None:
        """See :func:`fusedops.unregister`."""
        with self._lock:
            kept = [record for record in self.records() if record.name != name]
            if len(kept) == len(self.records()):
                raise PluginError(f"no backend is called {name!r}; registered are {', '.join(self.names())}")
            self._records = kept
        self._changed()

    def _changed(self) -> None:
        for notify in self.on_change:
            notify()


def _in_order(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (-(r.backend.priority if r.backend else -(10**9)), r.name))


def _discover() -> list[Record]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        claims = found.setdefault(point.name, [])
        if all((_distribution(point), point.value) != (_distribution(other), other.value) for other in claims):
            claims.append(point)  # one distribution may be on the path twice, as an installation and as its sources
    records: list[Record] = []
    for name, claims in found.items():
        own = [point for point in claims if _distribution(point) == OWN_DISTRIBUTION]
        if len(claims) == 1:
            records.append(_load(claims[0]))
        elif own:
            records.append(_load(own[0]))
            records += [_rival(point, f"the name {name!r} is fusedops's own") for point in claims if point not in own]
        else:
            sides = " and ".join(sorted(_distribution(point) for point in claims))
            records += [_rival(point, f"{sides} both claim the name {name!r}; uninstall one") for point in claims]
    return records


def _rival(point: EntryPoint, why: str) -> Record:
    error = PluginError(f"backend {point.name!r} of {_distribution(point)} is not loaded: {why}")
    return _record(point, error=error)


def _load(point: EntryPoint) -> Record:
    if not _allowed(point):
        record = _record(point)
        record.unavailable = Unavailable(
            f"{_distribution(point)} is not in FUSEDOPS_PLUGINS={os.environ['FUSEDOPS_PLUGINS']!r}",
            f"add {point.name} to FUSEDOPS_PLUGINS, or unset it",
        )
        return record
    try:
        plugin = point.load()
        backend = _backend_of(plugin, point.name)
        if backend.name != point.name:
            raise PluginError(f"entry point {point.name!r} gives a backend named {backend.name!r}; needs one name")
        check_backend(backend, OPS)
    except Exception as error:  # one broken plugin must not take the others down; the error is kept and shown
        return _record(point, error=error)
    return _record(point, backend=backend, file=getattr(plugin, "__file__", "") or "")


def _allowed(point: EntryPoint) -> bool:
    allow = os.environ.get("FUSEDOPS_PLUGINS", "all").strip()
    if allow in ("", "all") or _distribution(point) == OWN_DISTRIBUTION:
        return True
    return allow != "none" and point.name in {name.strip() for name in allow.split(",")}


def _record(
    point: EntryPoint, backend: Backend | None = None, error: Exception | None = None, file: str = ""
) -> Record:
    version = point.dist.version if point.dist else ""
    return Record(point.name, backend, error, None, _distribution(point), version, file)


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "unknown"


def _backend_of(plugin: Any, name: str | None) -> Backend:
    """Asks one plugin for its backend, through a manager of its own: one broken plugin cannot spoil another's load."""
    import pluggy

    from fusedops._hooks import PROJECT, Hooks

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(f"plugin {name or plugin!r}: {error}") from error
    backend = manager.hook.fusedops_backend()
    if not isinstance(backend, Backend):
        raise PluginError(
            f"plugin {name or plugin!r} gives {type(backend).__name__} for fusedops_backend; needs a function "
            f"marked @fusedops.hookimpl that returns a fusedops.Backend"
        )
    return backend


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


registry = Registry()


def register(plugin: Any, name: str | None = None) -> Backend:
    """Adds a backend to this process.

    Args:
        plugin: a :class:`Backend`, or a module or object with a ``fusedops_backend`` function marked
            ``@fusedops.hookimpl``.
        name: what to call the plugin in messages.

    Returns:
        The backend.

    Raises:
        PluginError: its name is taken, or one of its kernels does not fit the op.
    """
    return registry.register(plugin, name)


def unregister(name: str) -> None:
    """Removes a backend from this process.

    Raises:
        PluginError: there is none of that name.
    """
    registry.unregister(name)


def backends() -> list[BackendInfo]:
    """Every backend of this process, in the default order, with its state and, where not ready, why and what to do."""
    return [_info(record) for record in registry.records()]


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
        ops=tuple(dict.fromkeys(item.op for item in backend.kernels)) if backend else (),
        distribution=record.distribution,
        version=record.version,
        file=record.file,
        error="".join(traceback.format_exception(type(error), error, error.__traceback__)) if error else "",
    )
