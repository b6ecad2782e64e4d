"""The block of docs/pytorch.md that is made of the outcomes of tests, and the pytest plugin that collects them.

Every test with a ``feature`` mark and a parameter ``op`` counts. An op has a feature if all tests of the two passed. It
is listed beside them with the reason if a test was skipped. A failed or missing test is an error. ``OUTCOMES``: the
files that runs of ``pytest --features FILE`` wrote; without them the tests are run.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

import fusedops

TESTS = Path(__file__).parents[2] / "tests"
OPS = fusedops.ops.__all__
OUTCOMES: list[Path] = []
FEATURES = (
    "compile static",
    "compile dynamic",
    "export",
    "AOTInductor",
    "gradgradcheck",
    "jvp",
    "vmap",
    "AMP",
    "checkpoint, reentrant",
    "checkpoint, non-reentrant",
    "DTensor",
    "FSDP2",
)


class Outcomes:
    """A pytest plugin that collects, for each (feature, op), the number of passed tests and the reasons of skips.

    Args:
        path: file to write at the end of a whole run, if no test of a feature failed.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.passed: dict[tuple[str, str], int] = defaultdict(int)
        self.reasons: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.failed = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Add the cell of each test to its properties. Its report transfers them from the process that ran it."""
        for item in items:
            marker = item.get_closest_marker("feature")
            if marker is None:
                continue
            assert isinstance(item, pytest.Function)
            assert "op" in item.callspec.params, f"{item.nodeid} has a feature mark and no parameter `op`"
            assert marker.args[0] in FEATURES, f"{item.nodeid}: {marker.args[0]!r} is none of {FEATURES}"
            item.user_properties.append(("feature", [marker.args[0], item.callspec.params["op"]]))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count passed tests, and store the reason of a test that was skipped or failed as expected."""
        feature_and_op = dict(report.user_properties).get("feature")
        if not isinstance(feature_and_op, list):
            return
        cell: tuple[str, str] = (feature_and_op[0], feature_and_op[1])
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.reasons[cell].add(getattr(report, "wasxfail", "") or re.sub(r"^Skipped: ", "", reason))
        elif report.failed:
            self.failed = True
        elif report.when == "call":
            self.passed[cell] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write the file, in the process that receives all reports."""
        whole = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not session.shouldfail
        if self.path is not None and whole and not self.failed and not hasattr(session.config, "workerinput"):
            cells = sorted({*self.passed, *self.reasons})
            rows = [[*cell, self.passed[cell], sorted(self.reasons[cell])] for cell in cells]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(rows), encoding="utf-8")

    @classmethod
    def read(cls, *paths: Path) -> Outcomes:
        """Read the files that runs wrote, each with tests of its own."""
        outcomes = cls()
        for path in paths:
            for feature, op, passed, reasons in json.loads(path.read_text(encoding="utf-8")):
                outcomes.passed[feature, op] += passed
                outcomes.reasons[feature, op] |= set(reasons)
        return outcomes


def table(outcomes: Outcomes) -> str:
    """Return the table: for each feature the ops with it, and those without it, with the reasons."""
    lines = ["| feature | ops | not, or in part |", "|---|---|---|"]
    notes: list[str] = []
    for feature in FEATURES:
        works: list[str] = []
        left: list[str] = []
        for op in OPS:
            reasons, passed = outcomes.reasons[feature, op], outcomes.passed[feature, op]
            if not reasons and not passed:
                raise SystemExit(f"no test shows {feature!r} of {op}: a test needs the mark feature({feature!r})")
            if not reasons:
                works.append(f"`{op}`")
                continue
            text = "; ".join(sorted(reasons))
            if text not in notes:
                notes.append(text)
            left.append(f"{'in part' if passed else 'not'} `{op}` [{notes.index(text) + 1}]")
        names = f"all {len(OPS)}" if not left else ", ".join(works) or "none"
        lines.append(f"| {feature} | {names} | {', '.join(left) or 'none'} |")
    return "\n".join([*lines, "", *(f"[{number}] {text}.\n" for number, text in enumerate(notes, 1))])


def block(_: str = "") -> str:
    """Return the table, from the files of outcomes or from a run of the tests."""
    if OUTCOMES:
        return table(Outcomes.read(*OUTCOMES))
    outcomes = Outcomes()
    if pytest.main(["-q", "-m", "feature", "--show-capture=no", str(TESTS)], plugins=[outcomes]):
        raise SystemExit("docs/pytorch.md was not changed: a test of a feature failed")
    return table(outcomes)
