"""The registry: the backends, ops and observers of this process."""

from __future__ import annotations

import keyword
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fusedops._contract.op import Op
from fusedops._named_tuple import NamedTuple
from fusedops._report.foreign_text import error_text
from fusedops._report.suggestion import DEVICE_TYPES, TORCH_DEVICE_TYPES, unknown_name
from fusedops.errors import FusedOpsError, PluginError, PolicyError

if TYPE_CHECKING:  # what is imported in a function is not needed before the first call: 5 ms
    from fusedops._contract.backend import Backend
    from fusedops._plugins.discovery import Observer
    from fusedops._plugins.record import Record

REGISTERED = "(registered)"  # the distribution of what fusedops.register() added


class Snapshot(NamedTuple):
    """A state of the registry."""

    records: list[Record] | None
    ops: dict[str, Op]
    observers: dict[str, Observer]


class Registry:
    """All backends and ops of this process, and the plugins that observe them.

    Attributes:
        ops: every op by name.
        on_change: functions called after the backends or ops have changed.
        on_new_op: functions called with each op that is added.
    """

    def __init__(self) -> None:
        self.ops: dict[str, Op] = {}
        self.on_change: list[Callable[[], None]] = []
        self.on_new_op: list[Callable[[Op], None]] = []
        self.on_removed_op: list[Callable[[Op], None]] = []
        self._lock = threading.RLock()
        self._records: list[Record] | None = None
        self._loading_thread: int | None = None
        self._observers: dict[str, Observer] = {}  # of plugins without a backend

    def records(self) -> list[Record]:
        """Return every record in the default order, ready or not, by priority. Loads the plugins on first use."""
        records = self._records
        if records is None:
            from fusedops._plugins.discovery import discover

            with self._lock:
                if self._records is None:
                    if self._loading_thread == threading.get_ident():
                        raise PluginError(
                            "got a request for backends from a plugin that is being imported, expected none before all "
                            "plugins are known; to fix: register, set policies and call ops from its probe or kernels"
                        )
                    self._loading_thread = threading.get_ident()
                    before = set(self.ops)
                    try:
                        self._records = _in_order(discover(self.ops, self._add_ops, self._remove_ops))
                    except BaseException:  # an interrupt: the next discovery adds these ops again
                        self._remove_ops(tuple(op for name, op in self.ops.items() if name not in before))
                        raise
                    finally:
                        self._loading_thread = None
                records = self._records
        return records

    def whole(self) -> list[Record]:
        """Return every record with all its kernels imported, for what shows or checks them all."""
        for record in self.records():
            _ = record.kernels
        return self.records()

    def observers(self) -> list[tuple[str, Observer]]:
        """Return every plugin's observing hook with the plugin's name. Loads nothing."""
        hooks = [(record.name, record.observe) for record in self._records or () if record.observe is not None]
        return [*self._observers.items(), *hooks]

    def names(self) -> list[str]:
        """Return the names of backends that a policy may use."""
        from fusedops._plugins.validation import is_backend_name

        records = (record for record in self.records() if not record.has_only_ops)
        return list(dict.fromkeys(record.name for record in records if is_backend_name(record.name)))

    def unknown_backend(self, name: str, *others: str) -> str:
        """Return the text of an error about a backend that does not exist; for a device type, with its backends.

        Args:
            name: as given.
            *others: names besides backends that are valid there.
        """
        kind, fix = DEVICE_TYPES.get(name.lower(), name.lower()), ""
        try:
            is_device = kind == torch.device(kind).type
        except RuntimeError:
            is_device = False
        if is_device:
            serving = [item.name for item in self.records() if item.backend and item.backend.serves(kind)]
            if serving:
                fix = f"write {serving[0]!r}: {kind} is a device type, and its backends are {', '.join(serving)}"
        return unknown_name("backend", name, [*self.names(), *others], fix=fix)

    def unknown_device_type(self, kind: str) -> str:
        """Return the text of an error about a device type that neither torch nor a backend has; empty for others.

        Args:
            kind: a device without its index. This machine need not have one.
        """
        served = [item for record in self.records() if record.backend for item in record.backend.device_types]
        known = list(dict.fromkeys([*TORCH_DEVICE_TYPES, *(item for item in served if item != "*")]))
        if kind in known:
            return ""
        try:
            torch.device(kind)
        except (RuntimeError, ValueError):
            near = DEVICE_TYPES.get(kind.lower())
            return unknown_name("device type", kind, known, fix=f"write {near!r}" if near else "")
        return ""

    def find(self, name: str) -> Record | None:
        """Return the record of a backend by its name, else by an alias: the one that loaded, if several claim it."""
        records = [record for record in self.records() if not record.has_only_ops]
        claims = [record for record in records if record.name == name]
        claims = claims or [record for record in records if record.backend and name in record.backend.aliases]
        return next((record for record in claims if record.backend is not None), claims[0] if claims else None)

    def ready(
        self, name: str, caller: str, others: Sequence[str] = (), error: type[FusedOpsError] = PolicyError
    ) -> Record:
        """Return the record of a backend that can run here.

        Args:
            name: of the backend.
            caller: the function whose argument the name is, for the messages.
            others: names besides backends that the argument may be, for the suggestion.
            error: raised for a backend that cannot run here.

        Raises:
            PolicyError: no backend has that name.
        """
        record = self.find(name)
        if record is None:
            raise PolicyError(f"{caller}: {self.unknown_backend(name, *others)}")
        refusal = record.refusal()
        if refusal is not None and "; to fix: " in refusal.given:  # the error of a plugin has its fix
            raise error(f"{caller}: {refusal.given}")
        if refusal is not None:
            raise error(
                f"{caller}: got backend {name!r}, which cannot run here ({refusal.detail}), expected one that can; to "
                f"fix: {refusal.fix}"
            )
        return record

    def add_op(self, op: Op) -> None:
        """Add an op; PluginError where its name is taken."""
        if op.name in self.ops:
            raise PluginError(
                f"op {op.name!r}: got a second op of this name, expected a free name; to fix: rename one of "
                f"the two, or register it once"
            )
        _check_op_name(op)
        self.ops[op.name] = op
        try:
            for notify in self.on_new_op:
                notify(op)
        except Exception as error:  # torch refuses the name or an annotation
            self._remove_ops((op,))
            raise PluginError(
                f"op {op.name!r}: got {error_text(error)} from its registration in torch, expected a signature that "
                f"torch can register; to fix: annotate the parameters as in docs/add-an-op.md"
            ) from error
        except BaseException:
            self._remove_ops((op,))
            raise

    def _add_ops(self, ops: tuple[Op, ...]) -> None:
        """Add the ops of a plugin, all or none."""
        for count, op in enumerate(ops):
            try:
                self.add_op(op)
            except BaseException:
                self._remove_ops(ops[:count])
                raise

    def _add_plugin(self, ops: tuple[Op, ...], backend: Backend | None) -> None:
        """Add the ops of a plugin and check its backend against them; where it does not fit, the ops are not added."""
        from fusedops._plugins.validation import check_backend

        self._add_ops(ops)
        try:
            if backend is not None:
                check_backend(backend, self.ops)
        except BaseException:
            self._remove_ops(ops)
            raise

    def register(self, plugin: Any, name: str | None = None) -> Backend | None:
        """Implement :func:`fusedops.register`."""
        from fusedops._contract.backend import Backend
        from fusedops._plugins.discovery import Hooked, hooks_of
        from fusedops._plugins.record import Record

        if isinstance(plugin, Op):
            hooked = Hooked(None, (plugin,), None)
        elif isinstance(plugin, Backend):
            hooked = Hooked(plugin, (), None)
        else:
            hooked = hooks_of(plugin, name)
        backend = hooked.backend
        label = name or getattr(plugin, "__name__", None) or getattr(plugin, "name", type(plugin).__name__)
        with self._lock:
            records = self.records()  # a discovered op or backend has the older claim
            if backend is not None and any(record.name == backend.name and record.backend for record in records):
                raise _taken("backend", backend.name)
            if backend is None and (label in self._observers or any(r.name == label and r.ops for r in records)):
                raise _taken("plugin", label)
            self._add_plugin(hooked.ops, backend)
            if backend is None and hooked.observe is not None:
                self._observers = {**self._observers, label: hooked.observe}
            if backend is not None or hooked.ops:
                module = sys.modules.get(getattr(plugin, "__name__", "") or type(plugin).__module__)
                file = getattr(module, "__file__", "") or ""
                ops = tuple(op.name for op in hooked.ops)
                observe = None if backend is None else hooked.observe
                record = Record(
                    backend.name if backend else label, backend, None, None, REGISTERED, "", file, observe, ops
                )
                record.prepare(self.ops)
                self._records = _in_order([*records, record])
        if backend is not None or hooked.ops:
            self.changed()
        return backend

    def unregister(self, name: str) -> None:
        """Implement :func:`fusedops.unregister`."""
        with self._lock:
            records = self.records()
            removed = [record for record in records if record.name == name]
            ops = {op for record in removed for op in record.ops}
            if not removed and any(name in record.ops for record in records):
                ops = {name}  # the plugin's record stays if it has a backend or another op
            if name not in self._observers and not removed and not ops:
                known = ", ".join(self.names())
                raise PluginError(
                    f"unregister: got {name!r}, expected a registered backend, op or plugin, such as {known}; to fix: "
                    f"name one of these"
                )
            self._observers = {key: value for key, value in self._observers.items() if key != name}
            kept = [record.without_ops(ops) for record in records if record not in removed]
            self._records = [record for record in kept if not record.is_empty]
            self._remove_ops(tuple(self.ops[op] for op in ops if op in self.ops))
        self.changed()

    def snapshot(self) -> Snapshot:
        """Return the present state, for :meth:`restore`. Loads nothing."""
        return Snapshot(self._records, dict(self.ops), self._observers)

    def restore(self, snapshot: Snapshot) -> None:
        """Return to an earlier state. Plugins that were discovered since stay."""
        with self._lock:
            if snapshot.records is not None:
                self._records, kept = snapshot.records, set(snapshot.ops)
            else:
                self._records = self._records and [r for r in self._records if r.distribution != REGISTERED]
                kept = {*snapshot.ops, *(op for record in self._records or () for op in record.ops)}
            self._observers = snapshot.observers
            self._remove_ops(tuple(op for name, op in self.ops.items() if name not in kept))
            for name in set(snapshot.ops) - set(self.ops):
                self.add_op(snapshot.ops[name])
        self.changed()

    def _remove_ops(self, ops: tuple[Op, ...]) -> None:
        for op in ops:
            del self.ops[op.name]
            for notify in self.on_removed_op:
                notify(op)

    def changed(self) -> None:
        """Call every function of ``on_change``."""
        for notify in self.on_change:
            notify()

    def renew_locks(self) -> None:
        """Replace all locks, in a forked child: one that another thread of the parent held is never released."""
        self._lock = threading.RLock()
        self._loading_thread = None
        for record in self._records or ():
            record.lock = threading.RLock()


def _check_op_name(op: Op) -> None:
    """Raise PluginError where torch cannot register an op under its name."""
    name: Any = op.name
    valid = isinstance(name, str) and name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    suffix = "_backward" if valid and name.endswith("_backward") else ""
    if not valid or suffix:
        kind = f"a name that ends in {suffix!r}, as torch's function for the gradient does" if suffix else "that name"
        raise PluginError(
            f"op {name!r}: got {kind}, expected an ASCII identifier that is no keyword of Python, such as 'my_op'; to "
            f"fix: rename the op's function"
        )


def _in_order(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda r: (-(r.backend.priority if r.backend else -(10**9)), r.name))


def _taken(kind: str, name: str) -> PluginError:
    return PluginError(
        f"{kind} {name!r}: got a name that is already registered, expected a free one; to fix: choose another name, or "
        f"call fusedops.unregister({name!r}) first"
    )


registry = Registry()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=registry.renew_locks)
