"""The documentation site in a headless Chromium, at the widths of a phone and of a laptop: no page is cut.

The site is built as ``make site`` builds it. Without a Chromium on the path the other tests are skipped.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Iterator

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


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_window(site: pathlib.Path, page: browser.Page, width: int) -> None:
    pages = sorted([*site.glob("*.html"), *site.glob("api/*.html")])
    assert {path.stem for path in [*DOCS.glob("*.md"), *DOCS.glob("api/*")]} <= {path.stem for path in pages}
    page.size(width, 900)
    cut: dict[str, list[str]] = {}
    for each in pages:
        page.open(each)
        cut[each.name] = page.run(f"{CUT}({width})")
    assert {name: found for name, found in cut.items() if found} == {}
    assert not page.errors
    assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "about"}


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


def test_the_main_column_of_every_table_is_in_view_on_a_phone(site: pathlib.Path, page: browser.Page) -> None:
    page.size(390, 900)
    hidden: dict[str, list[str]] = {}
    for each in sorted([*site.glob("*.html"), *site.glob("api/*.html")]):
        page.open(each)
        hidden[each.name] = page.run(HIDDEN)
    assert {name: found for name, found in hidden.items() if found} == {}


def test_no_command_scrolls(site: pathlib.Path, page: browser.Page) -> None:
    page.size(390, 900)
    blocks = "[...document.querySelectorAll('.highlight-sh pre')]"
    seen, wide = 0, []
    for each in sorted(site.glob("*.html")):
        page.open(each)
        seen += page.run(f"{blocks}.length")
        wide += page.run(f"{blocks}.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent)")
    assert seen > 20
    assert wide == []


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
    page.open(site / "slapo.html")
    assert page.run(f"{CUT}({width})") == []
    page.run(f"document.querySelector('article').insertAdjacentHTML('beforeend', `{planted}`)")
    assert any(line.startswith(found) for line in page.run(f"{CUT}({width})"))


def test_every_picture_has_an_alternative_text(site: pathlib.Path, page: browser.Page) -> None:
    seen = 0
    for each in sorted(site.glob("*.html")):
        page.open(each)
        pictures = page.run(
            "[...document.querySelectorAll('article img:not(.toggler)')].map((e) => [e.alt, e.naturalWidth])"
        )
        assert all(len(alternative.split()) > 3 and width for alternative, width in pictures), (each.name, pictures)
        seen += len(pictures)
    assert seen
