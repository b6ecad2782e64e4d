"""The explorer's page: its modules, style and data in one piece of HTML, which needs no server."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # a backend may list other devices under an interpreter

from explorer.data import data_text, everything
from explorer.modules import script

HERE = Path(__file__).parent


def fragment(opens: str = "") -> str:
    """Return the HTML of the page's content.

    Args:
        opens: the call that the page shows first, as the part of its address after "#"; empty: the first op's.

    Raises:
        ValueError: a constraint is of a type that the page has no function for, or a formula cannot be written.
    """
    style = "".join((HERE / f"{name}.css").read_text(encoding="utf-8") for name in ("answer", "explorer"))
    return (
        f"<style>\n{style}</style>\n"
        f'<div id="call-explorer" data-opens="{escape(opens)}">'
        "<p>Without JavaScript: <code>fusedops explain OP</code>.</p></div>\n"
        f'<script type="application/json" id="explorer-data">{data_text(everything())}</script>\n'
        f'<script type="module">\n{script()}</script>\n'
    )
