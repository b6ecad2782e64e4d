"""The supported versions: the page, the package's metadata, and the command that runs both ends have the same."""

from __future__ import annotations

import re
import subprocess

import pytest
from repository import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
PAGE = (ROOT / "docs" / "versions.md").read_text("utf-8")


def supported() -> dict[str, tuple[str, str]]:
    """Return the oldest and the newest version of each package of the page's table."""
    rows = re.findall(r"^\| (Python|torch|triton|transformers) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.M)
    return {name: (oldest, newest) for name, oldest, newest in rows}


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))[:2]


def test_the_metadata_have_the_oldest_versions() -> None:
    python, torch, triton = (supported()[name][0] for name in ("Python", "torch", "triton"))
    assert f'requires-python = ">={python}"' in PROJECT
    assert {release(version) for version in re.findall(r'"torch>=([\d.]+)"', PROJECT)} == {release(torch)}
    assert {release(version) for version in re.findall(r'"triton>=([\d.]+)"', PROJECT)} == {release(triton)}
    assert f'"transformers>={".".join(supported()["transformers"][0].split(".")[:2])}"' in PROJECT
    assert f'pythonVersion = "{python}"' in PROJECT
    assert f'target-version = "py{python.replace(".", "")}"' in PROJECT
    start = (ROOT / "docs" / "start.md").read_text("utf-8")
    assert f"with Python {python} or later" in start
    assert f"torch {'.'.join(torch.split('.')[:2])} or later is required" in start


def test_the_classifiers_are_the_versions_of_the_table() -> None:
    oldest, newest = map(release, supported()["Python"])
    classified = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert [release(version) for version in classified] == [(3, minor) for minor in range(oldest[1], newest[1] + 1)]


@pytest.mark.skipif(not (ROOT / ".ci").exists(), reason="needs a clone: the archive of the source has no .ci")
def test_the_run_at_both_ends_has_the_versions_of_the_table() -> None:
    text = (ROOT / ".ci" / "run-versions").read_text("utf-8")
    ends = re.findall(r"PYTHON=([\d.]+) .*?torch==([\d.]+)\S* TRITON=triton==([\d.]+)", text)
    assert ends == [tuple(supported()[name][end] for name in ("Python", "torch", "triton")) for end in (0, 1)]
    assert tuple(re.findall(r"TRANSFORMERS=transformers==([\d.]+)", text)) == supported()["transformers"]
    assert ".ci/run-versions" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_the_files_of_the_run_exist() -> None:
    text = (ROOT / "tests" / "at_versions.sh").read_text("utf-8")
    named = subprocess.run(
        ["bash", "-c", "echo " + " ".join(re.findall(r"\btests/\S+", text.partition("\nrun ")[2]))],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_a_python_that_is_not_installed_has_a_fix() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "tests" / "at_versions.sh")],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "3.99", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("at_versions: got PYTHON=3.99, expected an interpreter that is installed; to fix: ")
    assert "pyenv install 3.99" in done.stderr
