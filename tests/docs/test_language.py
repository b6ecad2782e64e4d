"""The language rules of the sources and pages, and the examples in docstrings."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pathlib
import re
from collections.abc import Iterator

import pytest
import torch
from pages import public_objects
from repository import DOCS, ROOT, nodes

BANNED = re.compile(
    r"\b(wish(?:es|ed)?|told|said|say|says|saying|shall|nobody|learnt|mend|loud|news|so many times as fast)\b",
    re.IGNORECASE,
)
SOURCES = sorted([*(ROOT / "fusedops").rglob("*.py"), *(ROOT / "backends").rglob("*.py")])
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", *(ROOT / "backends").glob("*.md")])


def relative(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_banned_word() -> None:
    # a name with an underscore is one word to \b: each part of it counts
    hits = [
        f"{relative(path)}:{number}: {found.group()}: {line.strip()}"
        for path in (*SOURCES, *PAGES)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for found in BANNED.finditer(line.replace("_", " "))
    ]
    assert not hits


def test_the_search_finds_words_and_parts_of_names() -> None:
    assert BANNED.search("What the user Said")
    assert BANNED.search("what_is_told".replace("_", " "))
    assert not BANNED.search("essays, commendable, aloud, newsletter, mended")


def docstrings(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yield each docstring of a file with its line."""
    for node in nodes(path.read_text("utf-8")):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def test_a_docstring_starts_with_a_verb_or_a_name() -> None:
    wrong = [
        f"{relative(path)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in docstrings(path)
        if re.match(r"(What|Whether|How|Who)\b", text)
    ]
    assert not wrong


# ----------------------------------------------------------------------------------------------------------- examples


#: The public functions and classes, but exceptions, which the library raises, and Philox's, which kernels call.
OBJECTS = {
    name: value
    for name, value in public_objects().items()
    if not (inspect.isclass(value) and issubclass(value, BaseException)) and not name.startswith("fusedops.philox.")
}


def test_there_are_public_objects_in_every_module() -> None:
    modules = {name.rpartition(".")[0] for name in OBJECTS}
    assert {
        "fusedops",
        "fusedops.constraints",
        "fusedops.nn",
        "fusedops.testing",
        "fusedops.compat.megatron",
        "fusedops.integrations.transformers",
    } <= modules


def test_a_public_name_has_an_example() -> None:
    assert [name for name, value in OBJECTS.items() if ">>> " not in (value.__doc__ or "")] == []


def modules_of(package: str) -> list[str]:
    root = ROOT / package
    parts = [path.relative_to(root).with_suffix("").parts for path in sorted(root.rglob("*.py"))]
    return [".".join((package, *each)).removesuffix(".__init__") for each in parts if each[-1] != "__main__"]


def with_examples(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return ">>> " in (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in modules_of("fusedops") if with_examples(name)])
def test_the_examples_run(name: str) -> None:
    if ".integrations.megatron" in name:
        pytest.importorskip("megatron.core", reason="needs megatron-core; install the dev dependencies")
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    output: list[str] = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        torch.manual_seed(0)
        runner.run(test, out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)
