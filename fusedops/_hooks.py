"""The plugin hooks, in pluggy's terms. Imported only when plugins are loaded: pluggy is not needed before."""

from __future__ import annotations

import pluggy

from fusedops._backend import Backend

PROJECT = "fusedops"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """What a plugin may implement."""

    @hookspec(firstresult=True)
    def fusedops_backend(self) -> Backend | None:  # pyright: ignore[reportReturnType]
        """Returns the plugin's backend. Called once, when a call or a user first needs backends."""
