"""The fixtures of all tests: isolation of fusedops, plugin distributions, Python processes.

``conftest.py`` loads this plugin in each process that runs tests, but not in that of pytest-xdist that only distributes
them: it imports torch.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import pytest
from fakes import Fakes
from fork_server import ForkServer
from hypothesis import settings
from loopback import loopback
from standin import npu_device
from state import isolated, no_optional_backends, only_own_backends, rediscover

# the same examples on every run: a change is judged by what it changed
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

with suppress(ImportError):  # without Triton
    import checked_interpreter
    import quick_interpreter

    quick_interpreter.install()
    checked_interpreter.install()
npu_device.register()  # before the first backward: autograd counts the devices then
for _name in [name for name in os.environ if name.startswith("FUSEDOPS_")]:
    del os.environ[_name]


@pytest.fixture(autouse=True)
def clean_fusedops() -> Iterator[None]:
    """Run each test with no policy, no variables, no warning given before, and the backends of the process."""
    with isolated():
        yield


@pytest.fixture(autouse=True)
def loopback_where_it_is_named(request: pytest.FixtureRequest) -> Iterator[None]:
    """Register the backend "loopback", the ops' references, for the tests with a parameter of that name."""
    callspec = getattr(request.node, "callspec", None)
    with loopback() if callspec and callspec.params.get("backend") == "loopback" else nullcontext():
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine the threads' barriers cost ten times what small sizes do; restores a test's own number too."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fakes() -> Fakes:
    """Register backends for the duration of the test, beside fusedops's own without the optional ones."""
    only_own_backends()
    no_optional_backends()
    return Fakes()


@pytest.fixture
def log_of() -> Iterator[Callable[[str, int], list[logging.LogRecord]]]:
    """Return the list that a logger's records of a level and above are added to, until the end of the test."""
    with ExitStack() as undo:

        def records(name: str, level: int) -> list[logging.LogRecord]:
            found: list[logging.LogRecord] = []
            logger, handler = logging.getLogger(name), logging.Handler()
            handler.emit = found.append  # type: ignore[method-assign]
            undo.callback(logger.setLevel, logger.level)
            undo.callback(logger.removeHandler, handler)
            logger.setLevel(level)
            logger.addHandler(handler)
            return found

        yield records


@pytest.fixture
def no_compiled_backend() -> None:
    """Remove the optional backends, so that one backend serves the CPU on every machine."""
    no_optional_backends()


# ------------------------------------------------------------------------------------------------ plugins and Pythons


@pytest.fixture
def distribution(tmp_path: pathlib.Path) -> Callable[..., pathlib.Path]:
    """Write an installed distribution, and return the folder to put on the path.

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
    """Discover plugins again, with one more folder on the path, without optional ones; undone after the test."""
    modules = set(sys.modules)

    def look(site: pathlib.Path) -> None:
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        rediscover()
        with suppress(KeyboardInterrupt):  # of a plugin of the test, which raises it again
            no_optional_backends()

    yield look
    for name in set(sys.modules) - modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if "/site/" in file and "site-packages" not in file:
            del sys.modules[name]


@pytest.fixture(scope="session")
def forks_with_torch() -> Iterator[Callable[[], ForkServer]]:
    """Return the server that has imported torch, which takes two seconds, and nothing else."""
    servers: list[ForkServer] = []

    def server() -> ForkServer:
        if not servers:
            servers.append(ForkServer("os.environ.pop('TRITON_INTERPRET', None); import torch", {}))
        return servers[0]

    yield server
    for each in servers:
        each.close()


@pytest.fixture(scope="session")
def program(forks_with_torch: Callable[[], ForkServer]) -> Callable[..., Any]:
    """Run ``python *argv`` as :meth:`ForkServer.program` does, in a fork of a process that has imported torch."""
    return lambda *argv, **options: forks_with_torch().program(*argv, **options)


@pytest.fixture(scope="session")
def python(forks_with_torch: Callable[[], ForkServer]) -> Callable[..., Any]:
    """Run a program in a new Python process and return what it prints, read as JSON.

    Where only ``-W ignore`` is given and no variable of Python, and it is not to be ``fresh``, the process is a fork of
    one that has imported torch.
    """

    def run(
        code: str, *path: pathlib.Path | str, flags: tuple[str, ...] = (), fresh: bool = False, **environ: str
    ) -> Any:
        forks = hasattr(os, "fork") and flags in ((), ("-W", "ignore"))
        if forks and not fresh and not any(name.startswith("PYTHON") for name in environ):
            quiet = "import warnings; warnings.simplefilter('ignore')\n" if flags else ""
            return forks_with_torch().run(quiet + textwrap.dedent(code), *path, **environ)
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
