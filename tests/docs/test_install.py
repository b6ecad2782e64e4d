"""README.md and docs/start.md, followed word for word in a clean clone and an empty environment.

The environment has what its installation declares and nothing else: instead of an index, which tests do not use, it
sees the packages of this Python that fusedops, its build and the extras require, and pip resolves them there.
"""

from __future__ import annotations

import doctest
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import venv
from collections.abc import Iterator
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from pages import blocks, commands
from repository import DOCS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("git") is None, reason="needs git")]
PAGES = (ROOT / "README.md", DOCS / "start.md")
INSTALLATIONS = sorted(
    {line for page in PAGES for line in commands(page.read_text("utf-8")).shown if line[:4] == "pip "}
)
#: What the index would give: the build's requirement, and those of the extras that can be installed here.
REQUIRED = (
    "torch",
    "pluggy",
    "hatchling",
    "hatch-fancy-pypi-readme",
    "packaging",
    "triton",
    "transformers",
    "megatron-core",
    "numpy",
)
PIP = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull}
NOT_HERE = {"npu": "torch_npu needs an Ascend machine"}


def distributions(names: Iterator[str] | tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Return the installed distributions of these names and of everything that they require."""
    found: dict[str, metadata.Distribution] = {}
    left = list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found or name == "fusedops":
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # pip reports it where it is needed
        required = map(Requirement, found[name].requires or ())
        left += [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a copy of the files that git has or would add, and of the compiled libraries, by their contents."""
    folder = tmp_path_factory.mktemp("clone") / "fusedops"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip(f"not a clone: {listed.stderr}")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    if (ROOT / "build" / "cpu").is_dir():  # a minute of two cores, where this tree's installation has compiled the same
        shutil.copytree(ROOT / "build" / "cpu", folder / "build" / "cpu")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return a virtual environment that has the packages of REQUIRED, and theirs, and no others."""
    folder = tmp_path_factory.mktemp("environment")
    index = folder / "index"
    index.mkdir()
    for each in distributions(REQUIRED).values():
        for top in {file.parts[0] for file in each.files or () if file.parts[0] not in ("..", "__pycache__")}:
            source = pathlib.Path(str(each.locate_file(top)))
            if source.exists() and not (index / top).exists():
                (index / top).symlink_to(source)
    venv.create(folder / "venv", symlinks=True, with_pip=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    for each in site.iterdir():
        if not each.name.startswith("pip"):  # setuptools of Python's own, older than torch requires
            shutil.rmtree(each) if each.is_dir() else each.unlink()
    (site / "index.pth").write_text(f"{index}\n")
    return folder / "venv"


def run(environment: pathlib.Path, folder: pathlib.Path, *command: str, **variables: str) -> str:
    """Run a command in the environment, without what these tests set."""
    names = ("PYTHON", "FUSEDOPS_", "PYTEST_", "PIP_", "TRITON_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    environ["PATH"] = f"{environment / 'bin'}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        command, cwd=folder, env={**environ, **variables}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(environment: pathlib.Path, clone: pathlib.Path) -> pathlib.Path:
    """Return the environment after the first command, ``pip install .``."""
    assert INSTALLATIONS[0] == "pip install '.[megatron]'"
    assert INSTALLATIONS[-1] == "pip install ."
    run(environment, clone, "pip", "install", ".", **PIP)
    return environment


def test_the_environment_has_nothing_else(environment: pathlib.Path) -> None:
    code = "import importlib.util as u; print([name for name in ('fusedops', 'pytest', 'sphinx') if u.find_spec(name)])"
    assert run(environment, environment, "python", "-c", code) == "[]\n"


@pytest.mark.parametrize("command", INSTALLATIONS[:-1])
def test_an_extra_is_found(installed: pathlib.Path, clone: pathlib.Path, command: str) -> None:
    (extra,) = re.findall(r"\[(\w+)\]", command)
    if extra in NOT_HERE:
        pytest.skip(NOT_HERE[extra])
    assert "Would install fusedops-" in run(installed, clone, *shlex.split(command), **PIP, PIP_DRY_RUN="1")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_in_order(installed: pathlib.Path, tmp_path: pathlib.Path, page: pathlib.Path) -> None:
    examples = [block for block in blocks(page.read_text("utf-8")) if not block.why_not]
    assert examples
    mark = "print('--- end of a block')\n"
    out = run(installed, tmp_path, "python", "-W", "error", "-c", mark.join(f"{block.code}\n" for block in examples))
    outputs = out.split("--- end of a block\n")
    for block, got in zip(examples, outputs, strict=True):
        right = doctest.OutputChecker().check_output(block.output or "", got, doctest.ELLIPSIS)
        assert right, f"{page.name}:{block.line} prints\n{got}\nand the page has\n{block.output}"


def test_the_installation_has_the_compiled_library_and_no_problem(
    installed: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    assert "no problem" in run(installed, tmp_path, "fusedops", "doctor")
    code = "import fusedops; print(fusedops.__file__, {info.name: info.state for info in fusedops.backends()})"
    where, _, states = run(installed, tmp_path, "python", "-c", code).partition(" ")
    assert pathlib.Path(where).is_relative_to(installed)
    assert "'eager': 'ready'" in states
    assert "'cpu': 'ready'" in states or not any(map(shutil.which, ("g++", "clang++", "c++")))
