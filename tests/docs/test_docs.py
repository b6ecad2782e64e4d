"""The pages: every example runs and prints the output on the page, and every link has a target.

Every ```python block is run, those of a page in order and in one namespace, on a CPU. Its output is in the ```text
block after it, where ``...`` matches anything. A block that cannot run here has a comment before it with the reason:
``<!-- not run: it takes two processes -->``.
"""

from __future__ import annotations

import doctest
import importlib
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
from pages import FENCE, PAGES, Block, blocks, commands, public_objects
from repository import DOCS, ROOT, load

import fusedops
from fusedops import errors

LINKED = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "backends").glob("*.md"))]
RUN_HERE = [path for path in PAGES if path.name != "add-an-op.md"]  # test_template runs it, with the op installed
ids = [str(path.relative_to(ROOT)) for path in RUN_HERE]

RUN = """
import contextlib, io, json, sys, traceback, warnings

import torch

import fusedops

warnings.simplefilter("error")
torch.set_num_threads(1)
for info in fusedops.backends():
    if info.distribution != "fusedops":  # others may be installed beside it, as the example of the tests is
        fusedops.unregister(info.name)
known = {info.name for info in fusedops.backends()}
outputs = {}
for page, blocks in json.loads(sys.argv[1]).items():
    outputs[page] = []
    names = {"__name__": "__main__"}
    for line, code in blocks:
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(compile("\\n" * line + code, page, "exec"), names)
        except Exception:
            traceback.print_exc(file=out)  # differs from every output on a page
        outputs[page].append(out.getvalue())
    fusedops.set_policy(None)
    for info in fusedops.backends():
        if info.name not in known:
            fusedops.unregister(info.name)
print(json.dumps(outputs))
"""


def test_a_page_is_read_as_it_looks() -> None:
    page = "a\n```python\nprint(1)\n```\n\n```text\n1\n```\nb\n<!-- not run: no\nmeans -->\n\n  ```python\n  x\n  ```\n"
    assert list(blocks(page)) == [Block(2, "print(1)\n", "1\n", ""), Block(13, "x\n", None, "no\nmeans")]


@pytest.fixture(scope="module")
def printed(python: Callable[..., Any]) -> dict[str, list[str]]:
    """Return the output of the examples of each page."""
    to_run = {
        str(page.relative_to(ROOT)): [(b.line, b.code) for b in blocks(page.read_text("utf-8")) if not b.why_not]
        for page in RUN_HERE
    }
    code = f"import sys; sys.argv = ['', {json.dumps(json.dumps(to_run))}]\n{RUN}"
    return python(code, *_here())


def _here() -> list[str]:
    """Return the folders from which fusedops and its backends are imported, for another process."""
    import fusedops_eager

    return [str(pathlib.Path(module.__file__ or "").parents[1]) for module in (fusedops, fusedops_eager)]


@pytest.mark.parametrize("page", RUN_HERE, ids=ids)
def test_the_examples_print_the_output_on_the_page(page: pathlib.Path, printed: dict[str, list[str]]) -> None:
    missing = [info for info in fusedops.backends() if info.name == "cpu" and info.state != "ready"]
    if missing:
        pytest.skip(f"the pages show an installation with the compiled library: {missing[0].why}")
    run = [block for block in blocks(page.read_text("utf-8")) if not block.why_not]
    for block, got in zip(run, printed[str(page.relative_to(ROOT))], strict=True):
        where = f"{page.name}:{block.line}"
        assert got == "" or block.output is not None, f"{where} prints, and the page has no output for it:\n{got}"
        if block.output is not None:
            right = doctest.OutputChecker().check_output(block.output, got, doctest.ELLIPSIS)
            assert right, f"{where} prints\n{got}\nand the page has\n{block.output}"


def test_every_page_has_an_example_that_runs() -> None:
    others = {"add-an-op.md", "recipes.md"}  # run by test_template, test_recipes
    without = []
    for page in PAGES:
        text = page.read_text("utf-8")
        runs = any(not block.why_not for block in blocks(text)) or any(
            line.startswith("fusedops ")
            for line in commands(text).shown  # run by test_page_commands
        )
        if not runs and page.name not in others:
            without.append(page.name)
    assert without == []


# ---------------------------------------------------------------------------------------------------------------- links


def links(text: str) -> list[str]:
    """Return the targets of the links and images of a page that are not on the network."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    found = re.findall(r"\]\(([^()\s]+)\)", text)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: pathlib.Path) -> None:
    for target in links(page.read_text("utf-8")):
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name} links to {target}: there is no such file"
        if anchor:
            assert anchor in anchors(there.read_text("utf-8")), f"{page.name} links to {target}: no such heading"


def test_links_and_anchors_are_read() -> None:
    text = "# A `b_c`: d, e\n[x](y.md#z) ![p](q.png)\n```python\n[no](no.md)\n```\n`[no](no)` [h](https://x.y)\n"
    assert links(text) == ["y.md#z", "q.png"]
    assert anchors(text) == {"a-b_c-d-e"}


def test_every_page_is_linked_from_the_index() -> None:
    index = (DOCS / "index.md").read_text("utf-8")
    there = {target.partition("#")[0] for target in links(index)}
    assert {page.name for page in PAGES[1:]} - there == {"index.md"}


# ----------------------------------------------------------------------------------------------- tables and references


def test_the_made_blocks_are_current(python: Any) -> None:
    """Without Triton's interpreter, with which triton serves the CPU too. test_transformers_families compares the
    lists of families.
    """
    names = "[name for name in make.PARTS if name not in ('families', 'accuracy')]"
    assert python(f"import json, make; print(json.dumps(make.stale({names})))", DOCS) == [], "run `make docs`"


def test_a_stale_block_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    make = load(DOCS / "make.py")
    text = (DOCS / "ops.md").read_text("utf-8")
    without = text.replace(", [swiglu](#swiglu)", "")
    assert without != text
    (tmp_path / "ops.md").write_text(without, "utf-8")
    monkeypatch.setattr(make, "DOCS", tmp_path)
    monkeypatch.setattr(make, "PARTS", {"ops": "tables:ops"})
    assert make.stale(["ops"]) == ["ops.md"]
    with pytest.raises(SystemExit, match="got other, expected blocks of pages that PARTS names"):
        make.stale(["other"])


def test_the_page_of_the_ops_has_a_section_for_every_op() -> None:
    page = (DOCS / "ops.md").read_text("utf-8")
    headings = re.findall(r"^## (\w+)$", FENCE.sub("", page), re.M)
    assert sorted(headings) == fusedops.ops.__all__


def test_every_public_name_has_a_reference_entry() -> None:
    made = load(DOCS / "reference.py")
    files = made.files()
    entries = "".join(files.values())
    assert re.findall(r"api/(\w+)", (DOCS / "api.rst").read_text("utf-8")) == [path.stem for path in files]
    documented = set(re.findall(r"^\.\. auto(?:function|class|data):: ([\w.]+)$", entries, re.M))
    for name in fusedops.ops.__all__:
        assert f"fusedops.{name}" in documented
    values = [resolved(path) for path in documented]
    objects = public_objects()
    assert len(objects) > 150
    assert [name for name, value in objects.items() if not any(value is each for each in values)] == []
    for name in errors.__all__:
        assert f"fusedops.errors.{name}" in documented


def test_a_public_name_without_an_entry_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    made = load(DOCS / "reference.py")
    monkeypatch.setattr(fusedops, "__all__", [*fusedops.__all__, "forgotten"])
    monkeypatch.setattr(fusedops, "forgotten", lambda: None, raising=False)
    with pytest.raises(ValueError, match="got forgotten in no group, expected each public name in GROUPS"):
        made.files()


def resolved(path: str) -> Any:
    value: Any = fusedops
    for part in path.split(".")[1:]:
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(path.rpartition(".")[0])
    return value
