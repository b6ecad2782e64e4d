"""Write the blocks of the pages that are made: tables from declarations and from committed runs.

    python docs/make.py                          # all
    python docs/make.py sharding                 # that one
    python docs/make.py --check                  # fail if a block is stale

A block stands between ``<!-- made: NAME -->`` and ``<!-- end -->``; the text around it is kept.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # a backend may list other devices under an interpreter

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS), str(ROOT / "tests" / "support" / "makers")]

#: The function that returns each block, in docs/parts/. It is given the block that the page has.
PARTS = {
    "ops": "tables:ops",
    "sharding": "tables:sharding",
    "constraints": "limits:constraints",
    "peers": "limits:peers",
    "sources": "sources:block",
    "families": "families:lists_block",
    "accuracy": "families:accuracy_block",
    "plans": "families:plans_block",
    "speed": "speed:speed",
    "slower": "speed:slower",
    "packed weights": "speed:packed_weights",
    "gpu headline": "speed:gpu_headline",
    "gpu runs": "speed:gpu_runs",
    "shared ops": "speed:shared_ops_block",
    "packed peers": "speed:packed_peers_block",
}
_BLOCK = re.compile(r"<!-- made: ([\w ]+) -->\n(.*?)<!-- end -->\n", re.S)


def block(text: str, name: str) -> str:
    """Return the text of a block of a page."""
    return next(match[2].strip() for match in _BLOCK.finditer(text) if match[1] == name)


def with_blocks(text: str, made: Callable[[str, str], str]) -> str:
    """Return a page with other blocks: ``made`` is called with the name and the text of each."""
    return _BLOCK.sub(
        lambda each: f"<!-- made: {each[1]} -->\n\n{made(each[1], each[2].strip())}\n\n<!-- end -->\n", text
    )


def made(name: str, old: str) -> str:
    """Return a block, made again."""
    module, function = PARTS[name].split(":")
    return getattr(importlib.import_module(f"parts.{module}"), function)(old).strip()


def files(names: Sequence[str]) -> dict[Path, str]:
    """Return the pages with the named blocks made again, and the picture of the speed-ups."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}
    found = {name for text in pages.values() for name, _ in _BLOCK.findall(text)}
    if unknown := {*names} - found | found - PARTS.keys():
        raise SystemExit(
            f"got {', '.join(sorted(unknown))}, expected blocks of pages that PARTS names; to fix: add them"
        )
    chosen = {
        path: with_blocks(text, lambda name, old: made(name, old) if name in names else old)
        for path, text in pages.items()
    }
    if "speed" in names:
        from parts import speed

        chosen[speed.picture.FILE] = speed.drawn()
    return chosen


def stale(names: Sequence[str]) -> list[str]:
    """Return the names of the files whose blocks are not as made now."""
    return [path.name for path, text in files(names).items() if path.read_text(encoding="utf-8") != text]


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"blocks: {', '.join(PARTS)}")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    names = options.names or list(PARTS)
    if options.check:
        found = stale(names)
        print(f"{', '.join(found)}: stale: run `make docs`" if found else "the pages are up to date")
        return int(bool(found))
    for path, text in files(names).items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
