"""Plugins: found through entry points, loaded when first needed, each one's failure its own."""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fusedops._backend import Backend, Unavailable, check_backend
from fusedops._op import OPS
from fusedops._registry import OWN_DISTRIBUTION, Observer, Record
from fusedops.errors import PluginError

GROUP = "fusedops.backends"


def discover() -> list[Record]:
    """Every installed plugin's record, loaded or with the reason why not."""
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
            why = f"the name {name!r} is fusedops's own; needs another; rename it"
            # not `point not in own`: entry points of two distributions are equal where they lead to one module
            records += [_rival(point, why) for point in claims if _distribution(point) != OWN_DISTRIBUTION]
        else:
            sides = " and ".join(sorted(_distribution(point) for point in claims))
            why = f"{sides} both claim the name {name!r}; needs one owner; uninstall one"
            records += [_rival(point, why) for point in claims]
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
        backend, observe = hooks_of(point.load(), point.name)
        if backend is None:
            raise PluginError(
                f"plugin {point.name!r} observes and has no backend; needs one too, or fusedops.register() instead of "
                f"an entry point"
            )
        if backend.name != point.name:
            raise PluginError(
                f"entry point {point.name!r} gives a backend named {backend.name!r}; needs one name; rename either"
            )
        check_backend(backend, OPS)
        record = _record(point, backend=backend)
        record.observe, record.file = observe, getattr(sys.modules.get(point.module), "__file__", "") or ""
        record.entries  # noqa: B018  # now: a limit that cannot be compiled is its plugin's failure, not each call's
    except Exception as error:  # one broken plugin must not take the others down; the error is kept and shown
        return _record(point, error=error)
    except SystemExit as error:
        left = PluginError(
            f"backend {point.name!r}: its import called sys.exit({error.code!r}); needs to raise an error; mend it"
        )
        left.__cause__ = error
        return _record(point, error=left)
    return record


def _allowed(point: EntryPoint) -> bool:
    allow = os.environ.get("FUSEDOPS_PLUGINS", "all").strip()
    if allow in ("", "all") or _distribution(point) == OWN_DISTRIBUTION:
        return True
    return allow != "none" and point.name in {name.strip() for name in allow.split(",")}


def _record(point: EntryPoint, backend: Backend | None = None, error: Exception | None = None) -> Record:
    version = point.dist.version if point.dist else ""
    return Record(point.name, backend, error, None, _distribution(point), version)


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "unknown"


def hooks_of(plugin: Any, name: str | None) -> tuple[Backend | None, Observer | None]:
    """Asks one plugin for its backend and for its observing hook, if it has them.

    Through a manager of its own: one broken plugin cannot spoil another's load.
    """
    import pluggy

    from fusedops._hooks import PROJECT, Hooks

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        known = "fusedops_backend and fusedops_observe"
        raise PluginError(f"plugin {name or plugin!r}: {error}; needs hooks of {known}; mend its functions") from error
    backend = manager.hook.fusedops_backend()
    observe = manager.hook.fusedops_observe if manager.hook.fusedops_observe.get_hookimpls() else None
    if not isinstance(backend, Backend) and not (backend is None and observe is not None):
        raise PluginError(
            f"plugin {name or plugin!r} gives {type(backend).__name__} for fusedops_backend; needs a function "
            f"marked @fusedops.hookimpl that returns a fusedops.Backend; add it, as in docs/add-a-backend.md"
        )
    return backend, observe
