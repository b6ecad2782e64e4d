"""docs/add-a-backend.md and docs/add-an-op.md, followed word for word.

Their files are written and their commands are run, in an installation of its own.
"""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from repository import EXAMPLE_PLUGIN, ROOT

Run = Callable[..., str]
# from what is installed, and without an index
PIP = ("pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target")
EXIT_CODES = {"fusedops explain scaled_masked_softmax": 1}  # as on the page; the others end with 0


class Page:
    """A page: its files, its shell commands, and its last Python block with the output."""

    def __init__(self, name: str) -> None:
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        self.files: dict[str, str] = dict(re.findall(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", text, re.M | re.S))
        shell = re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
        self.commands: list[str] = [line for block in shell for line in block.splitlines()]
        before, _, self.output = text.rpartition("```\n\n```text\n")
        self.output = self.output.partition("```")[0]
        self.example = before.rpartition("```python\n")[2]


BACKEND, OP = Page("add-a-backend.md"), Page("add-an-op.md")
OP_PLUGIN = EXAMPLE_PLUGIN.with_name("fusedops-op-example")


@pytest.mark.parametrize(("page", "plugin"), [(BACKEND, EXAMPLE_PLUGIN), (OP, OP_PLUGIN)], ids=["backend", "op"])
def test_the_page_is_the_example_plugin(page: Page, plugin: pathlib.Path) -> None:
    sources = [p for p in plugin.rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert {str(p.relative_to(plugin.parent)): p.read_text(encoding="utf-8") for p in sources} == page.files


def test_an_op_takes_at_most_80_lines() -> None:
    assert len(OP.files["fusedops-op-example/fusedops_norm/my_rms_norm.py"].splitlines()) <= 80


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a folder with fusedops installed."""
    site = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", *PIP, str(site), str(ROOT)], check=True, timeout=300)
    return site


@pytest.fixture
def run(tmp_path: pathlib.Path, installed: pathlib.Path, program: Any) -> Run:
    """Run a command of a page in a folder with its files, with fusedops installed, and plugins in their own folder."""
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()

    def run(*command: str, expected: int = 0) -> str:
        if command[0] == "pip":
            words = [sys.executable, "-m", *PIP, str(site), *command[2:]]
            done = subprocess.run(words, cwd=work, capture_output=True, text=True, timeout=300)
        else:  # where torch is imported: it takes half of the time of a short command
            words = command if command[0] == "-c" else ("-m", *command)
            done = program(*words, path=[site, installed], folder=work)
        assert done.returncode == expected, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def follow(page: Page, run: Run, work: pathlib.Path) -> list[str]:
    """Write the files of a page, run its commands, and return their outputs, of pip left out."""
    for name, text in page.files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text, encoding="utf-8")
    outputs: list[str] = []
    for line in page.commands:
        code = next((code for start, code in EXIT_CODES.items() if line.startswith(start)), 0)
        output = run(*shlex.split(line), expected=code)
        if not line.startswith("pip"):
            outputs.append(output)
    return outputs


@pytest.mark.slow
def test_add_a_backend_word_for_word(run: Run, tmp_path: pathlib.Path) -> None:
    info, explained, checked, tested = follow(BACKEND, run, tmp_path / "work")
    assert re.search(r"^example +ready .* fusedops-backend-example", info, re.M)
    assert "version 1.0.0" in info
    assert "dim -1 of x = 2000, expected a size of at most 1024" in explained
    words = " ".join(checked.split())
    assert re.search(
        r"none of \d+ checks failed, none of \d+ cases; excused by a declared deviation: finite-fill$", words
    )
    checks = int(re.findall(r"none of (\d+) checks", checked)[0])
    assert f"= {checks} passed" in tested
    assert (tmp_path / "work" / "report.xml").read_text().count("<testcase ") == checks


@pytest.mark.slow
def test_add_an_op_word_for_word(run: Run, tmp_path: pathlib.Path) -> None:
    explained, checked, measured = follow(OP, run, tmp_path / "work")
    assert explained.startswith("my_rms_norm: served by norm (backward: norm)")
    assert re.search(r"none of \d+ checks failed", checked)
    assert re.search(r"^forward +norm ", measured, re.M)
    assert re.search(r"^backward +norm ", measured, re.M)
    assert run("-c", OP.example) == OP.output
