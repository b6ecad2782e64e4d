"""docs/add-a-backend.md, followed word for word: its files written, its commands run, in an installation apart."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "add-a-backend.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^\*\*`([^`]+)`\*\*\n\n```\w+\n(.*?)^```$", PAGE, re.M | re.S))
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S) for line in block.splitlines()]
EXIT_CODES = {"fusedops explain": 1}  # as the page says; the others end with 0


def test_the_page_is_the_example_plugin() -> None:
    plugins = ROOT / "tests" / "plugins"
    there = [p for p in (plugins / "fusedops-backend-example").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert {str(path.relative_to(plugins)): path.read_text(encoding="utf-8") for path in there} == FILES
    assert [command.split()[0] for command in COMMANDS] == ["pip", "fusedops", "fusedops", "fusedops", "pytest"]


@pytest.mark.slow
def test_the_page_word_for_word(tmp_path: pathlib.Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    for name, text in FILES.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FUSEDOPS_", "PYTEST_"))}
    environ["PYTHONPATH"] = os.pathsep.join([str(site), environ.get("PYTHONPATH", "")])
    environ["OMP_NUM_THREADS"] = "1"  # these sizes are small: on a busy machine threads wait for each other
    # into a folder of its own, from what is installed already, and without an index
    pip = ["pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target", str(site)]

    def run(*command: str, expected: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=work, env=environ, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == expected, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    run(*pip, str(ROOT))
    said: dict[str, str] = {}
    for line in COMMANDS:
        program, *rest = shlex.split(line)
        code = next((code for start, code in EXIT_CODES.items() if line.startswith(start)), 0)
        if program == "pip":
            assert rest.pop(0) == "install"
            run(*pip, *rest)
        else:
            said[line] = run(program, *rest, expected=code)
    info, explained, checked, tested = said.values()
    assert re.search(r"^example +ready .* fusedops-backend-example 1\.0\.0$", info, re.M)
    assert "dim -1 of x is 2000; needs a size of at most 1024" in explained
    words = " ".join(checked.split())
    assert re.search(
        r"none of \d+ checks failed, none of \d+ cases; excused by a declared deviation: finite-fill$", words
    )
    checks = int(re.findall(r"none of (\d+) checks", checked)[0])
    assert f"= {checks} passed" in tested
    assert (work / "report.xml").read_text().count("<testcase ") == checks
