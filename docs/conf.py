"""The Sphinx configuration of the documentation site: ``make site``. The pages are plain Markdown.

The site loads no external resources: fonts are those of the system, and formulas are MathML, converted from LaTeX here.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import fusedops

sys.path.insert(0, str(Path(__file__).parent))
import reference

project = "fusedops"
author = "the fusedops authors"
copyright = "the fusedops authors, Apache-2.0"
version = release = fusedops.__version__
root_doc = "index"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "parts"]
nitpicky = False  # links to torch's names would need its inventory, and so a network

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # --json and "upper_left" are written as they are typed
html_theme = "furo"
html_title = f"fusedops {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
copybutton_exclude = ".linenos, .gp, .go"


def _contents(text: str) -> str:
    """Return the navigation: for each heading of index.md, the pages that its section links to, in order."""
    lines: list[str] = []
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        caption, _, body = part.partition("\n")
        pages = re.findall(r"^- \[[^\]]+\]\(([\w-]+)\.\w+\)", body, flags=re.M)
        if pages:
            lines += ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]
    return "\n".join(lines)


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += _contents(source[0])


def _break_lines(block: re.Match[str]) -> str:
    """Return an output with each line in an element, so that site.css can indent what is wrapped."""
    return "".join(f'<span class="line">{line}</span>' for line in block[0].splitlines(keepends=True))


def _break_names(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Let a long name in code break between its parts instead of anywhere, and mark the cells that hold a number."""
    code = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
    part = re.compile(r"(?<=\w[_./=(])(?=\w)|(?<=[\])]\.)(?=\w)|(?<=[a-z])(?=[A-Z])")
    if "body" in context:
        output = r'(?<=<div class="highlight-text notranslate"><div class="highlight"><pre><span></span>)[^<]+'
        context["body"] = re.sub(output, _break_lines, context["body"])
        context["body"] = code.sub(lambda name: part.sub("<wbr/>", name[0]), context["body"])
        names = re.compile(r"(<td><p>(?:<a [^>]*>(?:<span[^>]*>)?)?)(\w+)")
        context["body"] = names.sub(lambda cell: cell[1] + cell[2].replace("_", "_<wbr/>"), context["body"])
        numbers = re.compile(r"<td>(?=<p>(?:<strong>)?[\d.]*(?:</strong>)?</p></td>)")
        context["body"] = numbers.sub('<td class="number">', context["body"])


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>\n')
    raise nodes.SkipNode


def _write_reference(app: Sphinx) -> None:
    """Write the pages of the API reference; raise an ExtensionError where a public name has no entry."""
    try:
        reference.write()
    except ValueError as error:
        raise ExtensionError(str(error)) from None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extensions of this file; Sphinx calls this hook."""
    app.connect("builder-inited", _write_reference)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.connect("source-read", _read)
    app.connect("html-page-context", _break_names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
