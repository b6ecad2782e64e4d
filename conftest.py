"""Options and hooks of all tests: the process, the garbage collector, the summary.

The fixtures are in ``tests/support/shared_fixtures.py``, and helper modules in that folder and its folders, which
pyproject.toml puts on the path.
"""

from __future__ import annotations

import atexit
import gc
import os
import pathlib
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

# before triton is imported: the triton backend then serves CPU tensors
os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: several processes of several threads each wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for the tests of threads: a thread that waits takes no core
elif "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # else what an earlier state of these sources compiled may be run
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fusedops-compiled-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import pytest

# before they are imported: a failed assert in a helper shows its values, as one in a test does
pytest.register_assert_rewrite(*(path.stem for path in (pathlib.Path(__file__).parent / "tests/support").rglob("*.py")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-texts", action="store_true", help="write the texts of the tables that have changed")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported and collected
    # collects five times at pytest's end otherwise; the interpreter's own end frees what is imported, or a library
    # reports it as leaked
    atexit.register(gc.unfreeze)
    if "PYTEST_XDIST_WORKER" in os.environ or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("shared_fixtures")  # this process runs tests: it takes four seconds


def pytest_collection_finish() -> None:
    """Leave what is imported out of each later collection, which took half a second where a test asks for one.

    With Python's threshold, 700 objects, it takes 7% of the time of tests that compile, and 4% of the kit's.
    """
    _freeze()
    gc.set_threshold(10_000)
    gc.enable()


_modules = 0  # that were imported at the last freeze


def _freeze() -> None:
    global _modules
    _modules = len(sys.modules)
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """Leave out what a file's tests have imported and keep too, such as the trees of all sources: each collection that
    a later test asks for takes as long as all that is not frozen.
    """
    result = yield
    if nextitem is None or nextitem.path != item.path or len(sys.modules) > _modules + 100:
        gc.collect()
        _freeze()
    return result


# ------------------------------------------------------------------------------------------------------- the summary


_NO_REASON = (
    "",
    "Skipped",
    "unconditional skip",
    "<Skipped instance>",
)  # pytest writes these


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
    """Count the skipped tests by reason."""
    reports = [report for report in terminalreporter.stats.get("skipped", []) if hasattr(report, "longrepr")]
    counts = Counter(_reason(report) for report in reports)
    if counts:
        terminalreporter.section("not shown on this machine")
        for reason, count in counts.most_common():
            terminalreporter.write_line(f"{count:5}  {reason}")
