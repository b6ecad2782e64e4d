"""pytest plugin: the conformance kit as tests (``pytest --fusedops-backend NAME``), and the fixture fusedops_isolated.

It is outside of the package: pytest imports it in every run, and it imports neither torch nor fusedops until the option
or the fixture is used.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fusedops.testing import Check


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("fusedops", "conformance of fusedops's backends")
    group.addoption("--fusedops-backend", metavar="NAME", help="also run the conformance kit on this backend")
    group.addoption("--fusedops-device", metavar="DEVICE", help="default: the CPU if served, else its first")
    group.addoption("--fusedops-elements", metavar="N", type=int, default=2**17, help="size of named cases")
    group.addoption("--fusedops-case", metavar="CHECK::CASE", help="run this case alone, as a failure prints it")


@pytest.fixture
def fusedops_isolated() -> Iterator[None]:
    """Undo a test's changes to fusedops at its end: backends, ops, policy, variables and reported fallbacks."""
    from fusedops.testing import isolated

    with isolated():
        yield


@pytest.hookimpl(tryfirst=True)  # before -k and other options select tests
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add one test for each check."""
    name = config.getoption("--fusedops-backend")
    if name is None:
        return
    import fusedops
    from fusedops import testing

    device: str | None = config.getoption("--fusedops-device")
    elements: Any = config.getoption("--fusedops-elements")
    try:
        checks = testing.checks(name, device, elements=elements)
    except fusedops.FusedOpsError as error:
        raise pytest.UsageError(str(error)) from error
    kit = _Kit.from_parent(session, name=name, nodeid=f"fusedops/{name}")
    only: str | None = config.getoption("--fusedops-case")
    if only is None:
        items += [_Item.from_parent(kit, name=check.id, check=check) for check in checks]
    else:
        items[:] = [_Case.from_parent(kit, name=only, backend=name)]


class _Kit(pytest.Collector):
    """The parent of the tests; collects nothing itself."""

    def collect(self) -> list[pytest.Item]:
        return []


class _FailedError(Exception):
    """A failed check; its text is the report."""


class _Case(pytest.Item):
    """One case of one check."""

    def __init__(self, *, backend: str, **fields: Any) -> None:
        super().__init__(**fields)
        self._backend = backend

    def runtest(self) -> None:
        from fusedops import testing

        check, _, case = self.name.partition("::")
        options = self.config.option
        testing.reproduce(self._backend, check, case, options.fusedops_device, options.fusedops_elements)


class _Item(pytest.Item):
    """One check."""

    def __init__(self, *, check: Check, **fields: Any) -> None:
        super().__init__(**fields)
        self._check = check

    def runtest(self) -> None:
        result = self._check.run(self._command)
        if result.failures:
            raise _FailedError(str(result))

    def _command(self, case: str) -> str:
        """Return a command that runs a case alone with the same conftest files, which may register the backend."""
        check = self._check
        options = {"backend": check.backend, "device": check.device, "elements": check.elements}
        options["case"] = f"{check.id}::{case}"
        words = [f"--fusedops-{name}={value}" for name, value in options.items()]
        return shlex.join(["python", "-m", "pytest", *self.config.args, *words])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, _FailedError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.nodeid
