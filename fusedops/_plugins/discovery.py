"""Discovery: the plugins of installed distributions, loaded when first needed. A failed one does not affect others."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

from fusedops._contract.backend import Backend, Unavailable
from fusedops._contract.op import Op
from fusedops._named_tuple import NamedTuple
from fusedops._plugins.record import Record, failure_of
from fusedops._plugins.validation import check_backend
from fusedops.errors import PluginError

GROUP = "fusedops.backends"
OWN_DISTRIBUTION = "fusedops"
ALLOW_LIST = "FUSEDOPS_PLUGINS"
Observer = Callable[..., Any]
ChangeOps = Callable[[tuple[Op, ...]], None]


class Hooked(NamedTuple):
    """The backend, the ops and the observing hook of one plugin."""

    backend: Backend | None
    ops: tuple[Op, ...]
    observe: Observer | None


def discover(ops: Mapping[str, Op], add_ops: ChangeOps, remove_ops: ChangeOps) -> list[Record]:
    """Return the record of every installed plugin, loaded or with the reason why not.

    All ops are added before the first backend is checked: a backend may have kernels for another plugin's op.

    Args:
        ops: the ops of this process.
        add_ops: adds the ops that a plugin brings, all or none.
        remove_ops: removes the ops of a plugin that fails.
    """
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        claims = points.setdefault(point.name, [])
        if all((_distribution(point), point.value) != (_distribution(other), other.value) for other in claims):
            claims.append(point)  # one distribution may be on the path twice, as an installation and as its sources
    records: list[Record] = []
    loaded: list[tuple[EntryPoint, Hooked]] = []
    for name, claims in points.items():
        ours = [point for point in claims if _distribution(point) == OWN_DISTRIBUTION]
        if len(claims) > 1 and ours:
            why = f"got the name {name!r}, which belongs to fusedops, expected another; to fix: rename it"
            # not `point not in ours`: entry points of two distributions are equal if they name the same module
            records += [_rival(point, why) for point in claims if _distribution(point) != OWN_DISTRIBUTION]
        elif len(claims) > 1:
            owners = " and ".join(sorted(_distribution(point) for point in claims))
            why = f"got {owners}, which both claim the name {name!r}, expected one of them; to fix: uninstall one"
            records += [_rival(point, why) for point in claims]
            continue
        result = _load(ours[0] if ours else claims[0], add_ops)
        if isinstance(result, Record):
            records.append(result)
        else:
            loaded.append((ours[0] if ours else claims[0], result))
    return records + _check_all(loaded, ops, remove_ops)


def _rival(point: EntryPoint, why: str) -> Record:
    return _record(point, error=PluginError(f"backend {point.name!r} of {_distribution(point)} is not loaded: {why}"))


def _load(point: EntryPoint, add_ops: ChangeOps) -> Record | Hooked:
    """Import a plugin and add its ops. Return what it provides, or a record with the reason why it is not loaded."""
    if not _allowed(point):
        record = _record(point)
        record.unavailable = Unavailable(
            f"{_distribution(point)} is not in {ALLOW_LIST}={os.environ[ALLOW_LIST]!r}",
            f"add {point.name} to {ALLOW_LIST}, or unset it",
        )
        return record
    try:
        hooked = hooks_of(point.load(), point.name)
        if hooked.backend is None and not hooked.ops:
            raise PluginError(
                f"plugin {point.name!r}: got an observing hook alone, expected a backend or an op too; to fix: "
                f"register it with fusedops.register()"
            )
        if hooked.backend is not None and hooked.backend.name != point.name:
            raise PluginError(
                f"entry point {point.name!r}: got a backend named {hooked.backend.name!r}, expected the same name; to "
                f"fix: rename either"
            )
        add_ops(hooked.ops)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # one broken plugin must not affect the others; the error is kept and shown
        return _record(point, error=failure_of(point.name, error))
    return hooked


def _check_all(plugins: list[tuple[EntryPoint, Hooked]], ops: Mapping[str, Op], remove_ops: ChangeOps) -> list[Record]:
    """Return the records of plugins whose ops are added.

    The ops of a plugin that fails are removed. A backend with kernels for one of them then fails too.
    """
    failed: list[Record] = []
    while True:
        records = [_checked(point, hooked, ops) for point, hooked in plugins]
        removed = tuple(op for (_, hooked), record in zip(plugins, records) if record.error for op in hooked.ops)
        if not removed:
            return failed + records
        remove_ops(removed)
        failed += [record for record in records if record.error]
        plugins = [plugin for plugin, record in zip(plugins, records) if not record.error]


def _checked(point: EntryPoint, hooked: Hooked, ops: Mapping[str, Op]) -> Record:
    """Return the record of a plugin whose ops are added; a failed one where its backend does not fit the ops."""
    record = _record(point, backend=hooked.backend)
    record.observe, record.ops = hooked.observe, tuple(op.name for op in hooked.ops)
    record.file = getattr(sys.modules.get(point.module), "__file__", "") or ""
    try:
        if hooked.backend is not None:
            check_backend(hooked.backend, ops, named_too=bool(hooked.ops))
        record.prepare(ops)
    except Exception as error:
        return _record(point, error=error)
    return record


def _allowed(point: EntryPoint) -> bool:
    allow = os.environ.get(ALLOW_LIST, "all").strip()
    if allow in ("", "all") or _distribution(point) == OWN_DISTRIBUTION:
        return True
    return allow != "none" and point.name in {name.strip() for name in allow.split(",")}


def _record(point: EntryPoint, backend: Backend | None = None, error: BaseException | None = None) -> Record:
    return Record(point.name, backend, error, None, *_name_and_version(point.dist))


def _distribution(point: EntryPoint) -> str:
    return _name_and_version(point.dist)[0]


@lru_cache(1)  # the plugins of a distribution follow each other; each question reads its description again
def _name_and_version(distribution: Distribution | None) -> tuple[str, str]:
    return (distribution.name, distribution.version) if distribution else ("unknown", "")


def hooks_of(plugin: Any, name: str | None) -> Hooked:
    """Return the backend, the ops and the observing hook of one plugin.

    Each plugin gets its own manager, so that a broken one cannot affect how others load.
    """
    import pluggy

    from fusedops._plugins.hookspecs import PROJECT, Hooks

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    label = f"plugin {name or getattr(plugin, '__name__', plugin)!r}"
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        hooks = "fusedops_backend, fusedops_op and fusedops_observe"
        raise PluginError(f"{label}: got {error}, expected hooks of {hooks}; to fix: correct its functions") from error
    ops = _ops(label, manager.hook.fusedops_op())
    backend = manager.hook.fusedops_backend()
    observe = manager.hook.fusedops_observe if manager.hook.fusedops_observe.get_hookimpls() else None
    if not isinstance(backend, Backend) and not (backend is None and (observe is not None or ops)):
        raise PluginError(
            f"{label}: got {type(backend).__name__} from fusedops_backend, expected a fusedops.Backend; to fix: add a "
            f"function marked @fusedops.hookimpl that returns one, as in docs/add-a-backend.md"
        )
    return Hooked(backend, ops, observe)


def _ops(label: str, result: Any) -> tuple[Op, ...]:
    if result is None:
        return ()
    ops: tuple[Any, ...] = tuple(result) if isinstance(result, (list, tuple)) else (result,)  # pyright: ignore
    for op in ops:
        if not isinstance(op, Op):
            raise PluginError(
                f"{label}: got {type(op).__name__} from fusedops_op, expected a fusedops.Op, or a list of them; to "
                f"fix: return that, as in docs/add-an-op.md"
            )
    return ops
