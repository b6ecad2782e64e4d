"""The part of a module's repr that all modules share."""

from __future__ import annotations


def backend_repr(backend: str | None) -> str:
    """Return the backend's part of a repr."""
    return "" if backend is None else f", backend={backend!r}"
