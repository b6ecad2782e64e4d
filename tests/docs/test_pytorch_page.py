"""The table in docs/pytorch.md: it is made from outcomes of tests, and no cell is empty."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
from repository import DOCS, load

import fusedops

pytest_plugins = ["pytester"]

TESTS = """
import pytest
every = pytest.mark.parametrize("op", ["one", "two"])

@every
@pytest.mark.feature("export")
def test_a(op):
    pass

@every
@pytest.mark.feature("export")
def test_b(op):
    if op == "two":
        pytest.skip("needs what is not here")

@every
@pytest.mark.feature("vmap")
def test_c(op):
    pytest.skip("torch has no rule for it")

def test_of_no_feature():
    pass
"""


@pytest.fixture(scope="module")
def make() -> ModuleType:
    return load(DOCS / "parts" / "features.py")


def outcomes(make: ModuleType, pytester: pytest.Pytester, text: str) -> object:
    pytester.makeini("[pytest]\nmarkers = feature(name): a cell")
    pytester.makepyfile(text)
    seen = make.Outcomes()
    pytester.inline_run("-p", "no:cacheprovider", plugins=[seen]).assertoutcome(passed=4, skipped=3)
    return seen


def test_a_cell_shows_the_outcome_of_its_tests(
    make: ModuleType, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = outcomes(make, pytester, TESTS)
    monkeypatch.setattr(make, "FEATURES", ("export", "vmap"))
    monkeypatch.setattr(make, "OPS", ("one", "two"))
    assert make.table(seen).splitlines() == [
        "| feature | ops | not, or in part |",
        "|---|---|---|",
        "| export | `one` | in part `two` [1] |",
        "| vmap | none | not `one` [2], not `two` [2] |",
        "",
        "[1] needs what is not here.",
        "",
        "[2] torch has no rule for it.",
    ]


def test_a_cell_without_a_test_is_an_error(
    make: ModuleType, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = outcomes(make, pytester, TESTS)
    monkeypatch.setattr(make, "FEATURES", ("export", "jvp", "vmap"))
    monkeypatch.setattr(make, "OPS", ("one", "two"))
    with pytest.raises(SystemExit, match="no test shows 'jvp' of one"):
        make.table(seen)


@pytest.mark.parametrize(
    ("fails", "options", "written"),
    [
        ("test_of_no_feature", [], True),
        ("test_a", [], False),
        ("test_of_no_feature", ["--maxfail=1"], False),
    ],
)
def test_the_file_is_of_a_whole_run_in_which_no_feature_failed(
    make: ModuleType, pytester: pytest.Pytester, fails: str, options: list[str], written: bool
) -> None:
    pytester.makeini("[pytest]\nmarkers = feature(name): a cell")
    body = re.sub(rf"(def {fails}\(.*\):)\n    pass", r"\1\n    raise AssertionError", TESTS)
    pytester.makepyfile(body)
    path = pytester.path / "features.json"
    pytester.inline_run("-p", "no:cacheprovider", *options, plugins=[make.Outcomes(path)])
    assert path.exists() == written


def test_the_page_has_every_feature_of_every_op(make: ModuleType) -> None:
    page = (DOCS / "pytorch.md").read_text(encoding="utf-8")
    made = "\n" + load(DOCS / "make.py").block(page, "torch features")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in made.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows[2:]] == list(make.FEATURES)
    for name, ops, left in rows[2:]:
        if left == "none":
            assert ops == f"all {len(fusedops.ops.__all__)}", name
            continue
        listed = [*re.findall(r"`(\w+)`", ops), *re.findall(r"(?:not|in part) `(\w+)` \[\d+\]", left)]
        assert sorted(listed) == sorted(fusedops.ops.__all__), name
        for number in re.findall(r"\[(\d+)\]", left):
            assert f"\n[{number}] " in made, f"{name}: {left!r} has no reason"
