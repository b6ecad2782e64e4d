"""Which backends there are: registered, or found by ``_plugins``; probed when needed, failures kept as a state."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from fusedops._backend import Backend, Unavailable, check_backend
from fusedops._entry import Entry
from fusedops._op import OPS, Direction
from fusedops.errors import PluginError

if TYPE_CHECKING:
    from fusedops._constraint import Reason

OWN_DISTRIBUTION = "fusedops"

State = Literal["ready", "unavailable", "failed"]
Observer = Callable[..., Any]
_ANOTHER = "needs a free name; choose another name, or fusedops.unregister({!r}) first"


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
    observe: Observer | None = None
    probed: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @cached_property
    def entries(self) -> dict[tuple[str, Direction], Entry]:
        """The kernels, ready for the hot path, by op and direction."""
        kernels = self.backend.kernels if self.backend else ()
        return {(item.op, item.direction): Entry(self.name, item) for item in kernels}

    def probe(self) -> None:
        """Finds out, once, whether the backend can run here. A probe that raises is a failed backend."""
        with self.lock:
            if self.probed or self.backend is None or self.unavailable is not None:
                return
            try:
                found = self.backend.probe()
                good = isinstance(found, Unavailable) and found.why and found.fix
                if found is not None and not good:
                    raise TypeError(f"it gave {found!r}; needs None where it can run, or Unavailable(why, fix)")
                self.unavailable = found
            # a plugin's probe must not take the program down, by sys.exit() neither; the error is kept and shown
            except (Exception, SystemExit) as error:
                self.error = PluginError(f"backend {self.name!r}: its probe raised {_words(error)}")
                self.error.__cause__ = error
            self.probed = True

    def refusal(self) -> Reason | None:
        """Why this backend serves nothing here, or None. Probes."""
        from fusedops._constraint import Reason, ReasonCode

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
    """All backends of this process, and the plugins that observe them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: list[Record] | None = None
        self._loading: int | None = None  # the thread that loads the plugins
        self._observers: dict[str, Observer] = {}  # of plugins without a backend
        self.on_change: list[Callable[[], None]] = []

    def records(self) -> list[Record]:
        """Every record, in the default order: ready or not, by priority. Loads the plugins on first use."""
        records = self._records
        if records is None:
            with self._lock:
                if self._records is None:
                    if self._loading == threading.get_ident():
                        raise PluginError(
                            "a backend's plugin asks for backends while it is imported, when not all are known; needs "
                            "to wait: register, set policies and call ops from its probe, its kernels or the program"
                        )
                    from fusedops._plugins import discover  # which knows this class

                    self._loading = threading.get_ident()
                    try:
                        self._records = _in_order(discover())
                    finally:
                        self._loading = None
                records = self._records
        return records

    def observers(self) -> list[tuple[str, Observer]]:
        """Every plugin's observing hook, by the plugin's name. Loads nothing."""
        of_backends = [(r.name, r.observe) for r in self._records or () if r.observe is not None]
        return [*self._observers.items(), *of_backends]

    def names(self) -> list[str]:
        """Names that a policy may use."""
        return list(dict.fromkeys(record.name for record in self.records()))

    def find(self, name: str) -> Record | None:
        """The record that ``name`` stands for: the one that loaded, where several claim the name."""
        claims = [record for record in self.records() if record.name == name]
        return next((record for record in claims if record.backend is not None), claims[0] if claims else None)

    def register(self, plugin: Any, name: str | None = None) -> Backend | None:
        """See :func:`fusedops.register`."""
        from fusedops._plugins import hooks_of

        backend, observe = (plugin, None) if isinstance(plugin, Backend) else hooks_of(plugin, name)
        if backend is None:
            called = name or getattr(plugin, "__name__", type(plugin).__name__)
            assert observe is not None
            with self._lock:
                if called in self._observers:
                    raise PluginError(f"plugin {called!r} is already registered; {_ANOTHER.format(called)}")
                self._observers = {**self._observers, called: observe}
            return None
        with self._lock:
            records = self.records()
            if any(record.name == backend.name and record.backend is not None for record in records):
                raise PluginError(f"backend {backend.name!r} is already registered; {_ANOTHER.format(backend.name)}")
            check_backend(backend, OPS)
            module = sys.modules.get(getattr(plugin, "__name__", "") or type(plugin).__module__)
            file = getattr(module, "__file__", "") or ""
            record = Record(backend.name, backend, distribution="(registered)", file=file, observe=observe)
            record.entries  # noqa: B018  # now, so that a limit that cannot be compiled is said here
            self._records = _in_order([*records, record])
        self._changed()
        return backend

    def unregister(self, name: str) -> None:
        """See :func:`fusedops.unregister`."""
        with self._lock:
            if name in self._observers:
                self._observers = {key: value for key, value in self._observers.items() if key != name}
                return
            kept = [record for record in self.records() if record.name != name]
            if len(kept) == len(self.records()):
                raise PluginError(
                    f"no backend is called {name!r}; registered are {', '.join(self.names())}; name one of these"
                )
            self._records = kept
        self._changed()

    def _changed(self) -> None:
        for notify in self.on_change:
            notify()

    def renew_locks(self) -> None:
        """In a forked child: a lock that another thread of the parent held would never be released."""
        self._lock = threading.RLock()
        for record in self._records or ():
            record.lock = threading.RLock()


def _in_order(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (-(r.backend.priority if r.backend else -(10**9)), r.name))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


registry = Registry()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=registry.renew_locks)


@overload
def register(plugin: Backend, name: str | None = None) -> Backend: ...
@overload
def register(plugin: Any, name: str | None = None) -> Backend | None: ...
def register(plugin: Any, name: str | None = None) -> Backend | None:
    """Adds a backend, or a plugin that observes, to this process.

    Args:
        plugin: a :class:`Backend`, or a module or object with a function ``fusedops_backend``, ``fusedops_observe``
            (see :class:`fusedops.Event`) or both, marked ``@fusedops.hookimpl``.
        name: what to call the plugin in messages, and for :func:`unregister` where it has no backend. None: the name
            of the module or class.

    Returns:
        The backend, or None where the plugin only observes.

    Raises:
        PluginError: its name is taken, or one of its kernels does not fit the op.
    """
    return registry.register(plugin, name)


def unregister(name: str) -> None:
    """Removes a backend, or a plugin that observes, from this process.

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
