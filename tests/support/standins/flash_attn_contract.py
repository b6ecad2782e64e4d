"""The parameters of flash-attn's functions, release by release, read from a clone of its repository.

    git clone https://github.com/Dao-AILab/flash-attention
    python tests/support/standins/flash_attn_contract.py flash-attention            # writes flash_attn_signatures.json
    python tests/support/standins/flash_attn_contract.py flash-attention --check    # fails where the file differs

The file has for each line of releases (2, 3, 4) those in which a signature differs from the release before.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("flash_attn_signatures.json")


class Line(NamedTuple):
    """A line of releases: its tags, or the file of its version where it has none, and where its functions are."""

    tags: str
    source: str
    functions: tuple[str, ...]
    version: str = ""


LINES = {
    "2": Line(
        "v2.*",
        "flash_attn/flash_attn_interface.py",
        (
            "_flash_attn_forward",
            "_flash_attn_backward",
            "_flash_attn_varlen_forward",
            "_flash_attn_varlen_backward",
        ),
    ),
    "3": Line(
        "", "hopper/flash_attn_interface.py", ("_flash_attn_forward", "_flash_attn_backward"), "hopper/__init__.py"
    ),
    "4": Line("fa4-v4.*", "flash_attn/cute/interface.py", ("_flash_attn_fwd", "_flash_attn_bwd")),
}


def read() -> dict[str, dict[str, dict[str, str]]]:
    """Return the file: by line of releases and release, the parameters of each function as they are written."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def signature(parameters: str) -> inspect.Signature:
    """Return a signature whose defaults are texts."""
    function = ast.parse(f"def function({parameters}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    args, defaults = function.args.args, function.args.defaults
    first = len(args) - len(defaults)
    return inspect.Signature(
        [
            inspect.Parameter(
                arg.arg,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if at < first else ast.unparse(defaults[at - first]),
            )
            for at, arg in enumerate(args)
        ]
    )


def collect(clone: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return what the file is to have, from a clone with all tags."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, line in LINES.items():
        releases = found[name] = {}
        last: dict[str, str] = {}
        for release, commit in _releases(clone, line):
            source = _git(clone, "show", f"{commit}:{line.source}")
            given = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
            parameters = {function: _parameters(given[function]) for function in line.functions}
            if parameters != last:
                releases[release] = last = parameters
    return found


def _releases(clone: str, line: Line) -> Iterator[tuple[str, str]]:
    """Yield the releases of a line with their commits, the oldest first."""
    if line.tags:
        for tag in _git(clone, "tag", "--list", line.tags, "--sort=v:refname").split():
            yield tag.rpartition("v")[2], tag
        return
    for entry in _git(clone, "log", "--reverse", "--format=%h %as", "--", line.source, line.version).splitlines():
        commit, day = entry.split()
        version = re.search(r'"(.+)"', _git(clone, "show", f"{commit}:{line.version}"))
        yield f"{version[1] if version else ''} of {day}, {commit[:8]}", commit


def _parameters(function: ast.FunctionDef) -> str:
    for arg in function.args.args:
        arg.annotation = None
    return ast.unparse(function.args)


def _git(clone: str, *arguments: str) -> str:
    return subprocess.run(["git", "-C", clone, *arguments], check=True, capture_output=True, text=True).stdout


def main() -> int:
    """Write or check the file."""
    text = json.dumps(collect(sys.argv[1]), indent=1) + "\n"
    if "--check" not in sys.argv:
        FILE.write_text(text, encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text:
        print(f"{FILE.name} differs: run it without --check, and read what changed")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
