"""The explorer's page: its modules, style and data in one piece of HTML, which needs no server.

A browser loads no module from a file of its own, so the modules become one script: their imports and the word export
are removed, each after those that it imports.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # a backend may list other devices under an interpreter

from explorer.data import everything, missing_kinds

HERE = Path(__file__).parent
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.M)
_TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function|class|const|let) \[?(\w+)", re.M)


def fragment() -> str:
    """Return the HTML of the page's content.

    Raises:
        ValueError: a constraint is of a type that the page has no function for, or a formula cannot be written.
    """
    style = "".join((HERE / f"{name}.css").read_text(encoding="utf-8") for name in ("answer", "explorer"))
    return (
        f"<style>\n{style}</style>\n"
        '<div id="call-explorer"><p>Without JavaScript: <code>fusedops explain OP</code>.</p></div>\n'
        f'<script type="application/json" id="explorer-data">{data_text(everything())}</script>\n'
        f'<script type="module">\n{script()}</script>\n'
    )


def data_text(data: Mapping[str, Any]) -> str:
    """Return the data as JSON that may stand in a script element; ValueError where the page cannot evaluate it."""
    missing = missing_kinds(data)
    if missing:
        raise ValueError(
            f"got constraints of the types {', '.join(missing)}, expected those of docs/explorer/kinds_*.js; to fix: "
            f"write a function for each, which returns what its reasons() returns"
        )
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")


def script() -> str:
    """Return the page's modules as one, from main.js on; ValueError where two of them share a name."""
    texts: dict[str, str] = {}
    _collect("main", texts)
    names: dict[str, str] = {}
    for module, text in texts.items():
        for name in _TOP_LEVEL.findall(text):
            if name in names:
                raise ValueError(f"got {name} in {names[name]}.js and {module}.js, expected one; to fix: rename one")
            names[name] = module
    return "\n".join(re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.M) for text in texts.values())


def _collect(module: str, texts: dict[str, str]) -> None:
    """Add a module after those that it imports."""
    text = (HERE / f"{module}.js").read_text(encoding="utf-8")
    for name in _IMPORT.findall(text):
        if name not in texts:
            _collect(name, texts)
    texts[module] = text
