"""The plugin hooks, in pluggy's terms. Imported only when plugins are loaded, as pluggy is not needed before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from fusedops._contract.backend import Backend
    from fusedops._contract.op import Op
    from fusedops._report.event import Event

PROJECT = "fusedops"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """The functions that a plugin may implement."""

    @hookspec(firstresult=True)
    def fusedops_backend(self) -> Backend | None:  # pyright: ignore[reportReturnType]
        """Return the plugin's backend. Called once, when a call or a user first needs backends."""

    @hookspec(firstresult=True)
    def fusedops_op(self) -> Op | Sequence[Op] | None:  # pyright: ignore[reportReturnType]
        """Return the plugin's own ops: one, or several. Called once, before ``fusedops_backend``."""

    @hookspec
    def fusedops_observe(self, event: Event) -> None:
        """Receive each first use and each fallback, see :class:`fusedops.Event`. Not called for every call.

        An exception that it raises becomes a warning, once, and does not affect the call.
        """
