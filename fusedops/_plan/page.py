"""The page of plans: bars of the shares, the calls in a table with a filter. It needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from fusedops._report.foreign_text import message

COLUMNS = ("device", "call", "backend", "calls", "bytes", "module", "arguments", "because")
_KINDS = (("fused", "fused kernels"), ("plain", "ops by functions of torch"), ("torch", "left to torch"))
_STYLE = """
:root { color-scheme: light dark; --line: #8886; --fused: #2a78d6; --plain: #d99a1c; --torch: #8a8a8a }
@media (prefers-color-scheme: dark) { :root { --fused: #6aa9f0; --plain: #e6b450; --torch: #777 } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; max-width: 1400px; padding: 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1rem; margin: 1rem 0 .2rem; overflow-wrap: anywhere }
.bar { display: flex; height: 1.1rem; border-radius: 3px; overflow: hidden; background: var(--line) }
.fused { background: var(--fused) } .plain { background: var(--plain) } .torch { background: var(--torch) }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .3em; border-radius: 2px }
p { margin: .2rem 0 } li { overflow-wrap: anywhere }
.filter { display: flex; flex-wrap: wrap; gap: .6rem; padding: 1rem 0 }
input, select, button { font: inherit; padding: .35rem; min-width: 0 } input { flex: 1 1 14rem }
table { border-collapse: collapse; width: 100%; table-layout: fixed }
th, td { text-align: left; vertical-align: top; padding: .3rem .5rem; border-top: 1px solid var(--line) }
td { overflow-wrap: anywhere } td p + p { margin-top: .3rem } tr[hidden] { display: none }
@media (min-width: 801px) {
  th:nth-child(n+4):nth-child(-n+5), td:nth-child(n+4):nth-child(-n+5) { text-align: right }
}
th:nth-child(1) { width: 8% } th:nth-child(2) { width: 12% } th:nth-child(3) { width: 6% }
th:nth-child(4) { width: 5% }
th:nth-child(5) { width: 7% } th:nth-child(6) { width: 12% }
@media (max-width: 800px) {
  table, tbody, tr, td { display: block; width: auto } thead { display: none }
  tr { border-top: 1px solid var(--line); padding: .4rem 0 }
  td, td:nth-child(n) { border: 0; padding: .1rem 0 .1rem 6.2rem; text-align: left; min-height: 1.4em }
  td::before { content: attr(data-name); float: left; margin-left: -6.2rem; opacity: .7 } td:empty { display: none }
}
"""
# it shows and hides rows; each value is made in Python
_SCRIPT = """
const rows = [...document.querySelectorAll("tbody tr")].map(row => [row, row.textContent.toLowerCase()]);
const fields = [...document.querySelectorAll(".filter select")], text = document.querySelector("input");
const shown = document.querySelector("output"), more = document.querySelector("button");
let most = 100; // a browser lays out 5,000 rows in seconds
function filter() {
  const words = text.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let count = 0;
  for (const [row, content] of rows) {
    const fits = words.every(word => content.includes(word))
      && fields.every(field => !field.value || row.dataset[field.name] === field.value);
    count += fits;
    const hide = !fits || count > most;
    if (row.hidden !== hide) row.hidden = hide;
  }
  shown.value = `${count} of ${rows.length} rows`;
  more.hidden = count <= most;
}
more.addEventListener("click", () => { most *= 5; filter(); });
for (const each of [text, ...fields]) each.addEventListener("input", filter);
filter();
"""


class Entry(NamedTuple):
    """A row of the table: its cells in the order of its columns, and the values that the filters compare."""

    cells: tuple[str, ...]
    because: tuple[str, ...]
    op: str
    backend: str
    reason: str


class Section(NamedTuple):
    """A plan as text: its device, title and share, the bytes by who computes them, notes, and rows."""

    model: str
    device: str
    title: str
    share: str
    nbytes: tuple[int, int, int]
    notes: tuple[str, ...]
    entries: list[Entry]


def page(sections: Sequence[Section]) -> str:
    """Return the page as HTML; every text is escaped."""
    title = _text(f"Plan of {', '.join(dict.fromkeys(section.model for section in sections))}")
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    rows = "".join(_row(section.device, entry) for section in sections for entry in section.entries)
    choices = {"device": {section.device for section in sections}}
    for name in ("op", "backend", "reason"):
        choices[name] = {getattr(entry, name) for section in sections for entry in section.entries} - {""}
    filters = "".join(_select(name, values) for name, values in choices.items())
    # without a source of scripts, images or fonts the browser makes no request, whatever a name contains
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1>{''.join(map(_summary, sections))}"
        f'<div class="filter"><input type="search" aria-label="Search" placeholder="Search calls, reasons, fixes">'
        f"{filters}<output></output></div>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><button hidden>Show more</button>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def size_text(nbytes: int) -> str:
    """Return bytes as text.

    >>> size_text(1500), size_text(2_500_000)
    ('1.5 kB', '2.5 MB')
    """
    size, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"


def _text(value: object) -> str:
    return escape(message(str(value)))


def _select(name: str, values: Iterable[str]) -> str:
    options = "".join(f"<option>{_text(value)}</option>" for value in sorted(values))
    return f'<select name="{name}" aria-label="{name}"><option value="">any {name}</option>{options}</select>'


def _summary(section: Section) -> str:
    total = max(sum(section.nbytes), 1)
    parts = [(kind, 100 * nbytes / total, nbytes, name) for (kind, name), nbytes in zip(_KINDS, section.nbytes)]
    bar = "".join(f'<div class="{kind}" style="width:{percent:.2f}%"></div>' for kind, percent, *_ in parts)
    key = " ".join(
        f'<span><span class="key {kind}"></span>{percent:.0f} % {name} ({size_text(nbytes)})</span>'
        for kind, percent, nbytes, name in parts
    )
    notes = "".join(f"<li>{_text(text)}</li>" for text in section.notes)
    return (
        f'<h2>{_text(section.title)}</h2><div class="bar" role="img" aria-label="{_text(section.share)}">{bar}</div>'
        f"<p>{_text(section.share)}. Bytes: {key}</p>"
        + (
            f"<details><summary>{len(section.notes)} assumptions and notes</summary><ul>{notes}</ul></details>"
            * bool(notes)
        )
    )


def _row(device: str, entry: Entry) -> str:
    because = "".join(f"<p>{_text(note)}</p>" for note in entry.because)
    cells = (_text(device), *map(_text, entry.cells), because)
    data = {"device": device, "op": entry.op, "backend": entry.backend, "reason": entry.reason}
    attributes = " ".join(f'data-{name}="{_text(value)}"' for name, value in data.items())
    columns = "".join(f'<td data-name="{name}">{cell}</td>' for name, cell in zip(COLUMNS, cells))
    return f"<tr {attributes}>{columns}</tr>"
