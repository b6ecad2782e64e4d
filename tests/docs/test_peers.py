"""The versions of other libraries are those of one table, and what the comparison lists is what fusedops has."""

from __future__ import annotations

import re

from pages import PAGES
from repository import DOCS, ROOT, load

import fusedops

SOURCES = load(DOCS / "parts" / "sources.py").SOURCES
NAMES = {"Liger": "Liger-Kernel", "liger-kernel": "Liger-Kernel", "PEFT": "peft", **{name: name for name in SOURCES}}
NAMED = re.compile(rf"\b({'|'.join(NAMES)})(?: |==)(\d+(?:\.\d+)+)(?![\d.]*\d| or (?:newer|later))")
FILES = [*PAGES, ROOT / "Makefile", ROOT / "pyproject.toml", *sorted((ROOT / "benchmarks").rglob("*.py"))]


def others(text: str) -> list[str]:
    """Return the versions in a text that are not those of the table."""
    named = [(name, number, version_of(NAMES[name])) for name, number in NAMED.findall(text)]
    return [f"{name} {number}" for name, number, version in named if not f"{version}.".startswith(f"{number}.")]


def version_of(name: str) -> str:
    return re.sub(r"^\D*([\d.]*\d).*", r"\1", SOURCES[name][1])


def test_no_page_names_another_version() -> None:
    assert {path.name: others(path.read_text("utf-8")) for path in FILES if others(path.read_text("utf-8"))} == {}
    assert others("Liger 0.8.5, trl 1.16 and peft==0.21.2") == []
    assert others("Liger 0.8.4, trl 1.1 and PEFT 0.22") == ["Liger 0.8.4", "trl 1.1", "PEFT 0.22"]


def test_the_comparison_has_each_loss_and_no_op_that_is_not_there() -> None:
    page = (DOCS / "comparison.md").read_text("utf-8")
    assert (
        re.findall(r"`(\w+)`", page[page.index("fusedops has `") : page.index("([losses]")]) == fusedops.losses.__all__
    )
    assert not [name for name in ("orpo", "tvd") if any(name in each for each in fusedops.losses.__all__)]
