"""The plugin hooks, in pluggy's terms. Imported only when plugins are loaded: pluggy is not needed before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from fusedops._backend import Backend
    from fusedops._stats import Event

PROJECT = "fusedops"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """What a plugin may implement."""

    @hookspec(firstresult=True)
    def fusedops_backend(self) -> Backend | None:  # pyright: ignore[reportReturnType]
        """Returns the plugin's backend. Called once, when a call or a user first needs backends."""

    @hookspec
    def fusedops_observe(self, event: Event) -> None:
        """Told of each first use and each fallback: what :class:`fusedops.Event` says, never of every call.

        What it raises is a warning, once, and hurts no call.
        """
