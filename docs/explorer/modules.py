"""The modules of the explorer page as one script.

A browser loads no module from a file of its own, so they become one: each after those that it imports, without its
imports and the word export. Names at the top level of a module are therefore names of all modules.
"""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.js";\n', re.M)
_TOP_LEVEL = re.compile(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", re.M)


def script(folder: Path = HERE) -> str:
    """Return the page's modules as one, from main.js on; ValueError where two of them share a name."""
    texts: dict[str, str] = {}
    _collect(folder, "main", texts)
    names: dict[str, str] = {}
    for module, text in texts.items():
        for name in _TOP_LEVEL.findall(text):
            if name in names:
                raise ValueError(f"got {name} in {names[name]}.js and {module}.js, expected one; to fix: rename one")
            names[name] = module
    return "\n".join(re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.M) for text in texts.values())


def _collect(folder: Path, module: str, texts: dict[str, str]) -> None:
    """Add a module after those that it imports."""
    text = (folder / f"{module}.js").read_text(encoding="utf-8")
    for name in _IMPORT.findall(text):
        if name not in texts:
            _collect(folder, name, texts)
    texts[module] = text
