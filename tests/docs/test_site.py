"""The documentation site in a headless Chromium, at the widths of a phone and of a laptop: no page is cut.

The site is built as ``make site`` builds it. Without a Chromium on the path the other tests are skipped.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import browser
import pytest
from repository import DOCS, ROOT

pytestmark = pytest.mark.slow
WIDTHS = (390, 1280)

# Texts of a page that a reader cannot reach: what is wider than the window outside a container that scrolls, and what
# a container without a scroll bar cuts.
CUT = """((width) => {
  const root = document.documentElement, overflow = (each) => getComputedStyle(each).overflowX;
  const scrolls = (each) => ["auto", "scroll"].includes(overflow(each));
  const inside = (each) => each && each.tagName !== "ARTICLE" && (scrolls(each) || inside(each.parentElement));
  const name = (each) => each.tagName.toLowerCase() + ": " + each.textContent.trim().slice(0, 40);
  const content = document.querySelector(".content");  // on a phone, the theme lets all of it scroll
  const wide = Math.max(root.scrollWidth, content.getBoundingClientRect().left + content.scrollWidth);
  const cut = wide > width ? [`the document is ${wide} px wide`] : [];
  for (const each of document.querySelectorAll("article, article *")) {
    const box = each.getBoundingClientRect();
    if (!box.width || each.closest("svg, math")) continue;
    if (box.right > width + 1 && !inside(each.parentElement)) cut.push("beyond the window: " + name(each));
    if (["hidden", "clip"].includes(overflow(each)) && each.scrollWidth > each.clientWidth + 1 && each.clientWidth > 1)
      cut.push("cut: " + name(each));
  }
  return cut;
})"""


# The tables whose first column is cut at its right, or whose first two columns are not both in view unless the first
# one stays in place when the table scrolls.
HIDDEN = """(() => {
  const hidden = [];
  for (const table of document.querySelectorAll("article .table-wrapper > table")) {
    const box = table.parentElement.getBoundingClientRect();
    const right = (n) => table.querySelector(`tbody td:nth-child(${n})`)?.getBoundingClientRect().right ?? 0;
    const stays = getComputedStyle(table.querySelector("tbody td")).position === "sticky";
    if (right(1) > box.left + 0.6 * box.width || (right(2) > box.right + 1 && !stays))
      hidden.push(table.textContent.trim().replace(/\\s+/g, " ").slice(0, 60));
  }
  return hidden;
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Return the folder of the whole site."""
    folder = tmp_path_factory.mktemp("site")
    options = ("--fail-on-warning", "--keep-going", "--quiet", "--doctree-dir", folder / "trees")
    command = [sys.executable, "-m", "sphinx", *options, DOCS, folder / "out"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def page() -> Iterator[browser.Page]:
    if browser.find() is None:
        pytest.skip("no Chromium on the path; apt-get install chromium")
    with browser.opened() as opened:
        yield opened


def test_the_site_is_built_without_a_warning(site: pathlib.Path) -> None:
    assert (site / "index.html").exists()


BLOCKS = "[...document.querySelectorAll('.highlight-sh pre')]"
WIDE = f"{BLOCKS}.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)"
PICTURES = "[...document.querySelectorAll('article img:not(.toggler)')].map((e) => [e.alt, e.naturalWidth])"


class Shown(NamedTuple):
    """A page in the browser: what is cut by width; of a phone's width the rest."""

    cut: dict[int, list[str]]
    hidden: list[str]
    commands: int
    wide: list[str]
    pictures: list[tuple[str, int]]


@pytest.fixture(scope="module")
def shown(site: pathlib.Path, page: browser.Page) -> dict[str, Shown]:
    """Return what each page shows. Each is opened once, on a phone, and then made wider."""
    found: dict[str, Shown] = {}
    for each in sorted([*site.glob("*.html"), *site.glob("api/*.html")]):
        page.size(WIDTHS[0], 900)
        page.open(each)
        on_a_phone = [page.run(script) for script in (HIDDEN, f"{BLOCKS}.length", WIDE, PICTURES)]
        cut: dict[int, list[str]] = {}
        for width in WIDTHS:
            page.size(width, 900)
            assert page.run("document.documentElement.clientWidth") == width
            cut[width] = page.run(f"{CUT}({width})")
        found[each.name] = Shown(cut, *on_a_phone)
    return found


def test_every_page_of_the_documentation_is_in_the_site(shown: dict[str, Shown]) -> None:
    assert {path.stem for path in [*DOCS.glob("*.md"), *DOCS.glob("api/*")]} <= {name[:-5] for name in shown}


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_window(shown: dict[str, Shown], page: browser.Page, width: int) -> None:
    assert {name: each.cut[width] for name, each in shown.items() if each.cut[width]} == {}
    assert not page.errors
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "about"}


def test_the_main_column_of_every_table_is_in_view_on_a_phone(shown: dict[str, Shown]) -> None:
    assert {name: each.hidden for name, each in shown.items() if each.hidden} == {}


def test_no_command_scrolls(shown: dict[str, Shown]) -> None:
    assert sum(each.commands for each in shown.values()) > 20
    assert [line for each in shown.values() for line in each.wide] == []


def test_every_picture_has_an_alternative_text(shown: dict[str, Shown]) -> None:
    for name, each in shown.items():
        assert all(len(alternative.split()) > 3 and width for alternative, width in each.pictures), (
            name,
            each.pictures,
        )
    assert any(each.pictures for each in shown.values())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ('<div style="width: 2000px">wide</div>', "the document is "),
        ('<p style="white-space: nowrap">' + "one line " * 300 + "</p>", "the document is "),
        ('<div style="width: 2000px">wide</div>', "beyond the window: div: wide"),
        ('<div style="overflow-x: hidden"><table><tr>' + "<td>column</td>" * 300 + "</tr></table></div>", "cut: div"),
    ],
    ids=["block", "line", "beyond", "table"],
)
def test_a_wide_element_is_found(site: pathlib.Path, page: browser.Page, width: int, planted: str, found: str) -> None:
    page.size(width, 900)
    page.open(site / "versions.html")
    assert page.run(f"{CUT}({width})") == []
    page.run(f"document.querySelector('article').insertAdjacentHTML('beforeend', `{planted}`)")
    assert any(line.startswith(found) for line in page.run(f"{CUT}({width})"))
