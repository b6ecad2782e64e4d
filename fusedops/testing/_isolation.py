"""isolated: a block whose changes to backends, ops, policy, environment and reports are undone at its end."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

from fusedops._dispatch.selection.fallback import forget_reports
from fusedops._plugins.registry import registry
from fusedops._policy import context


@contextmanager
def isolated() -> Generator[None]:
    """Run a block, such as a test, apart from others.

    Inside, no FUSEDOPS variable is set, no policy but the default one is in effect, and each fallback is reported
    again. At the end the backends, ops and observers, the variables and the default policy are restored. pytest users
    have it as the fixture ``fusedops_isolated``.

    >>> import fusedops
    >>> from fusedops import testing
    >>> with testing.isolated():
    ...     backend = fusedops.register(fusedops.Backend("mine", ("cpu",), -1, ()))
    >>> any(info.name == "mine" for info in fusedops.backends())
    False
    """
    variables = {name: value for name, value in os.environ.items() if name.startswith("FUSEDOPS_")}
    snapshot = registry.snapshot()
    for name in variables:
        del os.environ[name]
    _reset()
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("FUSEDOPS_")]:
            del os.environ[name]
        os.environ.update(variables)
        registry.restore(snapshot)
        _reset()


def _reset() -> None:
    context.reset()
    forget_reports()
