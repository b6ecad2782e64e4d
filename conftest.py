"""What every test shares: a clean fusedops before each, real plugin distributions, Pythons of their own, the summary.

Helper modules of the tests lie in ``tests/``, which pyproject.toml puts on the path.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

# before anything imports triton: the triton backend then serves CPU tensors
os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: several processes of several threads each wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings
from loopback import loopback
from standin import npu_device

import fusedops
from fusedops import _in_force, _plan
from fusedops._op import OPS
from fusedops._registry import registry
from fusedops.constraints import Constraint

# the same examples on every run: a change is judged by what it changed
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

npu_device.register()  # before the first backward: autograd counts the devices then
for _name in [name for name in os.environ if name.startswith("FUSEDOPS_")]:
    del os.environ[_name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--features", type=pathlib.Path, help="write what docs/make_features.py makes its table of")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--features")
    if path is not None:
        spec = importlib.util.spec_from_file_location("make_features", config.rootpath / "docs" / "make_features.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config.pluginmanager.register(module.Outcomes(path))


@pytest.fixture(autouse=True)
def clean_fusedops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No policy, no environment, no warning said, and the backends that were there before, for each test."""
    before = list(registry.records())
    yield
    for name in [name for name in os.environ if name.startswith("FUSEDOPS_")]:
        monkeypatch.delenv(name)
    if registry.records() != before:
        registry._records = before
    _in_force.process = None
    _in_force.frame.set(None)
    _plan.forget_warnings()


@pytest.fixture(autouse=True)
def loopback_where_it_is_named(request: pytest.FixtureRequest) -> Iterator[None]:
    """The backend that is the ops' references, for the tests that run on several backends and on this one too."""
    callspec = getattr(request.node, "callspec", None)
    with loopback() if callspec and callspec.params.get("backend") == "loopback" else nullcontext():
        yield


class Fakes:
    """Backends made for a test: plain torch behind given limits, which write down that they ran."""

    op = OPS["scaled_masked_softmax"]

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(
        self,
        name: str,
        *limits: Constraint,
        backward: Sequence[Constraint] | None = (),
        priority: int = 50,
        devices: tuple[str, ...] = ("cpu",),
        run: Callable[..., Any] | None = None,
        **fields: Any,
    ) -> fusedops.Backend:
        """Registers one; ``backward`` are its limits there, or None where it has no backward kernel."""
        kernels = [fusedops.kernel(self.op.name, *limits)(self._noting(name, run or self.op.reference))]
        if backward is not None:
            noting = self._noting(f"{name} backward", self.op.backward)
            kernels.append(fusedops.kernel(self.op.name, *backward, direction="backward")(noting))
        return fusedops.register(fusedops.Backend(name, devices, priority, tuple(kernels), **fields))

    def _noting(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.ran.append(what)
            return function(*args, **kwargs)

        noting.__signature__ = inspect.signature(  # type: ignore[attr-defined]
            self.op.backward if what.endswith("backward") else self.op.reference
        )
        return noting


@pytest.fixture
def fakes() -> Fakes:
    """A maker of backends that leave with the test; only fusedops's own are there beside them."""
    registry._records = [record for record in registry.records() if record.distribution == "fusedops"]
    registry._changed()
    return Fakes()


# ------------------------------------------------------------------------------------------------ plugins and Pythons


@pytest.fixture
def distribution(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Writes an installed distribution, and returns the folder that makes it seen once it is on the path.

    ``importlib.metadata`` finds entry points in any folder of the path that holds NAME-VERSION.dist-info.
    """

    def write(name: str, entry_points: dict[str, str], *, version: str = "1.0", **modules: str) -> pathlib.Path:
        site = tmp_path / "site"
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        points = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
        (info / "entry_points.txt").write_text(f"[fusedops.backends]\n{points}")
        for module, source in modules.items():
            (site / f"{module}.py").write_text(textwrap.dedent(source))
        return site

    return write


@pytest.fixture
def rediscovered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[pathlib.Path], None]]:
    """Makes this process look for plugins again, with one more folder on the path; undone after the test."""
    modules = set(sys.modules)

    def look(site: pathlib.Path) -> None:
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        registry._records = None
        registry._changed()

    yield look
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "/site/" in file and "site-packages" not in file:
            del sys.modules[name]


@pytest.fixture(scope="session")
def python() -> Callable[..., Any]:
    """Runs a text in a Python of its own and returns what it prints, read as JSON."""

    def run(code: str, *path: pathlib.Path | str, flags: tuple[str, ...] = (), **environ: str) -> Any:
        known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        known["PYTHONPATH"] = os.pathsep.join([*map(str, path), *filter(None, [known.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, *flags, "-c", textwrap.dedent(code)],
            env={**known, **environ},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


# ------------------------------------------------------------------------------------------------------- the summary


_NO_REASON = ("", "Skipped", "unconditional skip", "<Skipped instance>")  # as pytest says it for skip() and mark.skip


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return re.sub(r"^Skipped: ", "", text).strip()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and _reason(report) in _NO_REASON:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped without a reason; needs one that names what is missing"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts, by reason, what this machine could not show."""
    reports = [report for report in terminalreporter.stats.get("skipped", []) if hasattr(report, "longrepr")]
    counts = Counter(_reason(report) for report in reports)
    if counts:
        terminalreporter.section("not shown on this machine")
        for reason, count in counts.most_common():
            terminalreporter.write_line(f"{count:5}  {reason}")
