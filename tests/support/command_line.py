"""Running the command line in this process, and the keys of its JSON as docs/command-line.md has them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from repository import ROOT

from fusedops._cli.main import main

PAGE = ROOT / "docs" / "command-line.md"
NPU_CALL = ["explain", "scaled_masked_softmax", "--x", "8,16,512,500:bf16@npu", "--mask", "8,1,512,500"]


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code and the output of a command."""
    code = main(argv)
    return code, capsys.readouterr().out


def exit_code(*argv: str) -> int:
    """Return the exit code of a command, also of one that ends by SystemExit, as --help does."""
    try:
        return main(argv)
    except SystemExit as end:
        return int(end.code or 0)


def flat(output: str) -> str:
    """Return the text without the line breaks that the width of the terminal makes."""
    return " ".join(output.split())


def documented(command: str) -> set[str]:
    """Return the keys that the page documents for a command's JSON, the outermost and those of its rows."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## JSON\n")[2]
    (item,) = re.findall(rf"^- `{command}`(.*?)(?=^- |\Z)", section, re.M | re.S)
    own, *parts = item.split("\n  - ")
    found = {*re.findall(r"`(.+?)`", own)}
    for part in parts:
        of, _, rest = part.partition(":")
        for prefix in re.findall(r"`(.+?)`", of):
            parents = [prefix[: each.start()] for each in re.finditer(r"\.|\[\]|$", prefix)]
            found |= {parent for parent in parents if parent and not parent.endswith(("[]", "<op>"))}
            found |= {f"{prefix}.{key}" for key in re.findall(r"`(.+?)`", rest)}
    return found


def documented_codes() -> dict[tuple[str, int], str]:
    """Return the page's meaning of each exit code of each command; Ctrl-C is above the table."""
    lines = PAGE.read_text(encoding="utf-8").split("| command | 0 |", 1)[1].split("\n\n", 1)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {(row[0].strip("`"), code): text for row in rows for code, text in enumerate(row[1:]) if text}


def keys(data: Any, under: str = "") -> set[str]:
    """Return the keys of JSON data as the page writes them: a.b, and a[].b for what a list holds."""
    if isinstance(data, list):
        return set().union(*(keys(item, f"{under}[]") for item in data)) if data else set()
    if not isinstance(data, dict):
        return set()
    names: set[str] = set()
    for key, value in data.items():
        name = f"{under}.{key}" if under else key
        # what is keyed by names (of packages, devices, variables, ops) is one entry
        open_ended = name in ("versions", "devices", "variables")
        names |= {name} | (set() if open_ended else keys(value, name))
    return names
