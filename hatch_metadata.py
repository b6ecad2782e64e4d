"""Metadata hook: the project's URLs, and README.md for the page of a package index.

An index shows README.md without the files beside it, so a link to one of them leads nowhere there. With the address of
the repository in pyproject.toml such links become absolute, and the metadata have the address. Without it a link is its
text and the path: ``[start](docs/start.md)`` is ``start (docs/start.md)``, which is in the source distribution. A
picture is then left out; with the address it is the file itself, not the repository's page of it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A block or a piece of code, which stays; or a link to a file.
_LINK = re.compile(
    r"(?P<code>^```.*?^```$|`[^`\n]+`)|(?P<picture>!?)\[(?P<text>[^\]]+)\]\((?![a-z]+:|#)(?P<path>[^()\s]+)\)",
    re.M | re.S,
)


class Urls(MetadataHookInterface):
    """Sets ``readme`` and ``urls``. pyproject.toml has ``repository``, empty or not, and ``file``, a URL's form."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the fields to the table ``project``."""
        repository = self.config["repository"].rstrip("/")
        file = self.config["file"].replace("{repository}", repository).replace("{version}", metadata["version"])
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": without_relative_links(text, file if repository else None),
        }
        if repository:
            pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
            addresses = {name: file.replace("{path}", path) for name, path in pages.items()}
            metadata["urls"] = {"Repository": repository, **addresses}


def without_relative_links(text: str, file: str | None) -> str:
    """Return a page whose links to files are absolute, or text where the address of the files is unknown.

    Args:
        text: Markdown.
        file: the URL of a file, with ``{path}`` in it, or None.

    >>> without_relative_links("see [a page](docs/a.md)", None)
    'see a page (docs/a.md)'
    """

    def changed(found: re.Match[str]) -> str:
        if found["code"] is not None:
            return found[0]
        if found["picture"]:
            return f"![{found['text']}]({file.replace('{path}', found['path'])}?raw=true)" if file else ""
        if file is None:
            return f"{found['text']} ({found['path']})"
        return f"[{found['text']}]({file.replace('{path}', found['path'])})"

    return _LINK.sub(changed, text)
