"""The examples and the shell commands of README.md and of the pages, and the public names that they have."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

from repository import DOCS, ROOT

import fusedops

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

FILE = re.compile(r"^\*\*`[^`]+`\*\*\n\n\Z", re.M)  # before a block: it is a file, which test_template writes
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\S*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$", re.S | re.M)

_PROGRAM = r"(?:[A-Z_]+=\S+ )*(?:make|pip|python3?|pytest|torchrun|fusedops) [-\w.']"
_IN_TEXT = re.compile(rf"`(?P<command>{_PROGRAM}[^`\n]*)`")
_INDENTED = re.compile(rf"^ {{4}}(?P<command>{_PROGRAM}.*)$", re.M)


class Block(NamedTuple):
    """A ```python block of a page: where it is, its code, its expected output, and the reason if it is not run."""

    line: int
    code: str
    output: str | None
    why_not: str


def blocks(text: str) -> Iterator[Block]:
    """Yield the Python blocks of a page that are examples."""
    fences = list(FENCE.finditer(text))
    for at, fence in enumerate(fences):
        if fence["kind"] != "python" or FILE.search(text[: fence.start()]):
            continue
        before = re.search(r"<!-- not run: (.+?) -->\s*$", text[: fence.start()], re.S)
        after = fences[at + 1] if at + 1 < len(fences) else None
        output = None
        if after is not None and after["kind"] == "text" and not text[fence.end() : after.start()].strip():
            output = textwrap.dedent(after["body"])
        yield Block(
            text.count("\n", 0, fence.start()) + 1, textwrap.dedent(fence["body"]), output, before[1] if before else ""
        )


class Commands(NamedTuple):
    """The shell commands of a page: those in ```sh blocks, and those in the text."""

    shown: list[str]
    in_text: list[str]


def commands(text: str) -> Commands:
    """Return the shell commands of a page, without comments."""
    shown = [line for fence in FENCE.finditer(text) if fence["kind"] == "sh" for line in fence["body"].splitlines()]
    rest = FENCE.sub("", text)
    assert not _INDENTED.search(rest), f"a command outside of a ```sh block: {_INDENTED.search(rest)}"
    return Commands(
        [stripped for line in shown if (stripped := re.sub(r"(^|\s+)# .*$", "", line).strip())],
        [found["command"] for found in _IN_TEXT.finditer(rest)],
    )


# -------------------------------------------------------------------------------------------------------- public names


def public_objects() -> dict[str, Any]:
    """Return the functions and classes of fusedops and of its public modules, by their full names."""
    modules: list[Any] = [fusedops]
    for package in (fusedops, fusedops.compat, fusedops.integrations):
        names = [each.name for each in pkgutil.iter_modules(package.__path__) if not each.name.startswith("_")]
        for name in names:
            try:
                modules.append(importlib.import_module(f"{package.__name__}.{name}"))
            except ModuleNotFoundError as error:  # of the peer that the module is for
                if (error.name or "").partition(".")[0] != "megatron":
                    raise
    return {name: value for module in modules for name, value in _public_of(module).items()}


def _public_of(module: Any) -> dict[str, Any]:
    """Return the functions and classes of a module and its private ones, or of its ``__all__``, by their full names."""
    own = module.__name__
    defined = [name for name, value in vars(module).items() if str(getattr(value, "__module__", "")).startswith(own)]
    names = [name for name in getattr(module, "__all__", defined) if not name.startswith("_")]
    values = {f"{own}.{name}": getattr(module, name) for name in names}
    return {name: value for name, value in values.items() if inspect.isfunction(value) or inspect.isclass(value)}
