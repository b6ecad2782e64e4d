"""``python -m benchmarks report FOLDER``: plots of the runs in a folder, beside them, and report.md with their tables.

``docs/make.py`` writes the pages of the committed runs, benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

from benchmarks import headline

RESULTS = Path(__file__).parent / "results"
HEADLINE = "headline"  # how the names of the files of that sweep begin
Rows = list[dict[str, Any]]

#: Below this speed-up plain torch is faster by more than noise: the ratio is marked, and listed.
SLOW = 0.95
#: The share of a call's time, in percent, below which a kernel is not listed.
LEAST = 3.0
PEERS = {
    "torch": "x torch",
    "megatron's torch path": "x Megatron",
    "torch._masked_softmax": "x masked_softmax",
    "torch.compile": "x compiled",
    "not compiled": "x not compiled",
    "traced through": "x traced through",
}


def read(path: Path) -> Rows:
    """Read the measurements of a file. The last line may be a part: of a run that goes on, or that was ended."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1] if line]


def runs(folder: Path = RESULTS) -> Iterator[tuple[Path, Rows]]:
    """Yield the result files of the folders in a folder, or of itself, with their measurements."""
    for path in sorted([*folder.glob("*/*.jsonl"), *folder.glob("*.jsonl")]):
        rows = read(path)
        if path.parent.name != "out" and rows and "provider" in rows[0]:
            yield path, rows


def with_field(folder: Path, name: str) -> Iterator[tuple[Path, Rows]]:
    """Yield the files of other records, which have this field: "launcher", with host times, or "kernel"."""
    for path in sorted([*folder.glob("*/*.jsonl"), *folder.glob("*.jsonl")]):
        rows = read(path)
        if rows and name in rows[0]:
            yield path, rows


def kernel_table(rows: Rows) -> list[str]:
    """Return a line for each kernel that has a part of a call's time to see."""
    whole: dict[tuple[str, ...], float] = {}
    for row in rows:
        key = (row["op"], row["case"], row["mode"])
        whole[key] = whole.get(key, 0.0) + row["us"]
    lines = ["| call | mode | kernel | calls | us | % |", "|---|---|---|---|---|---|"]
    for row in rows:
        share = 100 * row["us"] / (whole[row["op"], row["case"], row["mode"]] or 1.0)
        if share >= LEAST:
            cells = (f"{row['op']}, {row['case']}", row["mode"], row["kernel"], f"{row['calls']:g}")
            lines.append(f"| {' | '.join(cells)} | {row['us']:.0f} | {share:.0f} |")
    return lines


def launch_table(rows: Rows) -> list[str]:
    """Return one line per launcher: its host time, and that of a bare launch through Triton."""
    lines = ["| launcher | launch through Triton, us | launcher, us | ratio |", "|---|---|---|---|"]
    return lines + [
        f"| {row['launcher']} | {row['bare_us']:.2f} | {row['launcher_us']:.2f} | "
        f"{row['launcher_us'] / row['bare_us']:.2f} |"
        for row in rows
    ]


def table(rows: Rows) -> list[str]:
    """Return one table per dtype, with one line per call and mode: fusedops, and the speed-up over each provider."""
    lines: list[str] = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        lines += ["", f"{dtype}:", "", *_table([row for row in rows if row["dtype"] == dtype])]
    return lines[1:]


def _table(rows: Rows) -> list[str]:
    others = [name for name in dict.fromkeys(row["provider"] for row in rows) if not name.startswith("fusedops.")]
    others.sort(key=lambda name: list(PEERS).index(name) if name in PEERS else len(PEERS))
    head = ["call", "mode", "backend", "ms", "copies", "% of copy"]
    head += [PEERS.get(name, f"x {name}") for name in others] + ["memory"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    calls: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        calls.setdefault((f"{row['op']}, {row['case']}", row["mode"]), {})[row["provider"]] = row
    for key, by in calls.items():
        for name, row in by.items():
            if not name.startswith("fusedops."):
                continue
            cells = [*key, name.removeprefix("fusedops."), f"{row['ms_p50']:.3g}", f"{row['copies']:.2f}"]
            cells.append(f"{row['pct_of_copy']:.0f}" if "pct_of_copy" in row else "")
            cells += [f"{by[other]['ms_p50'] / row['ms_p50']:.2f}" if other in by else "" for other in others]
            size = prod(row["shape"]) * {"float64": 8, "float32": 4}.get(row["dtype"], 2)
            cells.append(f"{row['peak_bytes'] / size:.2f}")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def size_name(elements: int) -> str:
    """Return a number of elements with its unit, such as "32 Mi"."""
    for unit, step in (("Mi", 2**20), ("Ki", 2**10)):
        if elements >= step:
            return f"{elements // step} {unit}"
    return str(elements)


def marked(ratio: float) -> str:
    """Return a speed-up, in bold where plain torch is faster."""
    return f"{ratio:.2f}" if ratio >= SLOW else f"**{ratio:.2f}**"


def sections(folder: Path) -> Iterator[str]:
    """Yield the lines of the tables of a folder's runs."""
    for path, rows in sorted(runs(folder), key=lambda run: not run[0].stem.startswith(HEADLINE)):  # first
        is_headline = path.stem.startswith(HEADLINE)
        yield from (f"## {title(rows, 'the headline calls' if is_headline else '')}", "")
        yield from (machine(path, rows[0]), "")
        yield from (*(headline.table(rows) if is_headline else table(rows)), "")
        for picture in sorted(path.parent.glob(f"{path.stem}-*.png")):
            if not any(picture.stem.startswith(f"{other.stem}-") for other in path.parent.glob(f"{path.stem}-*.jsonl")):
                drawn = (
                    "percent of a copy by row length"
                    if picture.stem.endswith("length")
                    else "speed-up over plain torch"
                )
                yield from (f"![Plot of the run {path.stem}: {drawn}]({link(picture)})", "")
    for path, rows in with_field(folder, "kernel"):
        yield from (f"## {rows[0]['device']}: kernels", "", machine(path, rows[0]), "", *kernel_table(rows), "")
    for path, rows in with_field(folder, "launcher"):
        first = rows[0]
        where = f"{first['device']}, torch {first['torch']}, triton {first['triton']}, commit `{first['commit'][:12]}`"
        yield from (f"## {first['device']}: host time of a launch", "", f"{where}. [{path.name}]({link(path)})", "")
        yield from (*launch_table(rows), "")


def machine(path: Path, first: dict[str, Any]) -> str:
    """Return where a run was measured, with a link to its file."""
    settings = "" if first["driver"] else f", {first['threads']} threads, {first['allocator']} allocator"
    return (
        f"{first['device']}{settings}, {'while idle, ' if first.get('idle_ns') else ''}torch {first['torch']}, "
        f"Python {first['python']}, commit `{first['commit'][:12]}`"
        f"{', driver ' + first['driver'] if first['driver'] else ''}. [{path.name}]({link(path)})"
    )


def link(path: Path) -> str:
    """Return the target of a link to a file, from the page or from its own folder."""
    return f"../{path.relative_to(RESULTS.parents[1]).as_posix()}" if path.is_relative_to(RESULTS) else path.name


def title(rows: Rows, kind: str = "") -> str:
    """Return the heading of a run: what was measured, where, and how."""
    first = rows[0]
    kind = kind or ("by row length" if first["case"].startswith("length ") else "large calls")
    if any(row["provider"] == "not compiled" for row in rows):
        kind = "in compiled code"
    return f"{first['device']}: {kind}, {', '.join(dict.fromkeys(row['dtype'] for row in rows))}"


def main(arguments: Sequence[str]) -> int:
    """Write the report of a folder."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    from benchmarks import plots  # imports matplotlib, which the pages do not need

    for path, rows in runs(options.folder):
        plotted = [row for row in rows if row.get("speedup_over_torch") is not None]
        if plotted:
            plots.draw(plotted, path.with_suffix(""))
    (options.folder / "report.md").write_text("\n".join(sections(options.folder)) + "\n", encoding="utf-8")
    return 0
