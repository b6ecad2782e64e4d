"""Writes docs/performance.md from the committed runs in benchmarks/results/. `--check` fails where the file is stale.

Every number on the page is made here from a result file; the prose has none of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "performance.md"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
Rows = list[dict[str, Any]]

HEAD = """# Performance

Made by `docs/make_performance.py` from the runs committed in `benchmarks/results/`, one JSON line a measurement.

## How it is counted

A copy, `y.copy_(x)` of the main tensor in the same process and the same turns, is what the machine can do: it reads
and writes each byte once.

| column | meaning |
|---|---|
| ms | median time of one call |
| copies | that time, in copies |
| % of copy | the fewest bytes that the op can move (`min_bytes`), by its time, over the bandwidth of the copy |
| x torch | so many times as fast as the chain of torch calls that a model would write (below 1: slower) |
| x Megatron, x masked_softmax, x compiled | as Megatron's torch path, `torch._masked_softmax`, the chain compiled |
| memory | the most that a call has in use beyond its inputs, its result included, in sizes of the result |

- The chain is `softmax((x * scale).masked_fill(mask, -inf), -1)`, `gelu(x + bias)`, `dropout(x + bias)`,
  `residual + dropout(x + bias)`. Megatron's torch path is what Megatron-LM runs where its kernel refuses.
- All providers of a case take turns, so that noise hits all alike; still, on a machine that is not idle only ratios
  within one case mean something. Compiled code is made for exactly these shapes, and its compilation is not counted.
- "while idle" is a run with `--idle`: a call counts only if the cores did a short calculation at full speed right
  before and right after it. Neighbours on a shared machine slow simple passes down far more than one long calculation,
  so that ratios move with them. The other runs were not guarded so.
- Dropout's mask is replayed in the backward from the seed by the same random number generator on every backend, and
  nothing is saved but the seed. Torch's chain saves a mask of x's size, and on a CPU its backward is quicker for it.
- The exact GELU's backward computes `x + bias` again; torch's chain has saved it, at the price of a tensor of x's size.
- In the run "compiled" each op stands between neighbours in code compiled by Inductor, whole as one node of the graph;
  "x traced through" has its reference there, for Inductor to fuse with them.
- "tuned allocator" is glibc told to keep memory (`GLIBC_TUNABLES`, set by the benchmark, never by the library): with
  its defaults every new tensor of this size is paid for in page faults, whoever makes it: compare the two runs.
"""

TAIL = """
## Run it

    make bench                                       # these CPU tables, into benchmarks/results/out
    make gpu                                         # on a machine with a GPU: tests, compute-sanitizer, benchmark
    python -m benchmarks --help                      # other ops, dtypes, sweeps, threads
    python -m benchmarks.idle                        # how fast the cores are while idle, for --idle on a shared machine
    python -m benchmarks --allocator tuned --compare benchmarks/results/cpu/large-tuned-2.jsonl   # what got slower
"""

PEERS = {
    "torch": "x torch",
    "megatron's torch path": "x Megatron",
    "torch._masked_softmax": "x masked_softmax",
    "torch.compile": "x compiled",
    "not compiled": "x not compiled",
    "traced through": "x traced through",
}


def read(path: Path) -> Rows:
    """The measurements of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def runs() -> Iterator[tuple[Path, Rows]]:
    """The committed result files with their measurements."""
    for path in sorted(RESULTS.glob("*/*.jsonl")):
        if path.parent.name != "out":
            yield path, read(path)


def table(rows: Rows) -> list[str]:
    """One line a call and mode: fusedops' own figures, and the others' as ratios to it."""
    others = [name for name in dict.fromkeys(row["provider"] for row in rows) if not name.startswith("fusedops.")]
    others.sort(key=lambda name: list(PEERS).index(name) if name in PEERS else len(PEERS))
    head = ["op", "case", "dtype", "mode", "backend", "ms", "copies", "% of copy"]
    head += [PEERS.get(name, f"x {name}") for name in others] + ["memory"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    calls: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        calls.setdefault(tuple(row[k] for k in ("op", "case", "dtype", "mode")), {})[row["provider"]] = row
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


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    found = list(runs())
    if not any(rows[0]["driver"] for _, rows in found):
        lines += ["**No GPU and no Ascend device has been measured yet.** `make gpu` does it where there is one.", ""]
    for path, rows in found:
        first = rows[0]
        lines += [
            f"## {path.parent.name}: {path.stem.replace('-', ' ')}",
            "",
            f"{first['device']}, {first['threads']} threads, {first['allocator']} allocator, "
            + ("while idle, " if first.get("idle_ns") else "")
            + f"torch {first['torch']}, "
            f"Python {first['python']}, commit `{first['commit'][:12]}`"
            + (f", driver {first['driver']}" if first["driver"] else "")
            + f". [{path.name}](../benchmarks/results/{path.parent.name}/{path.name})",
            "",
            *table(rows),
            "",
        ]
        for picture in sorted(path.parent.glob(f"{path.stem}-*.png")):
            lines += [f"![{picture.stem}](../benchmarks/results/{path.parent.name}/{picture.name})", ""]
    return "\n".join(lines) + TAIL


def main() -> int:
    """Writes the page, or checks it."""
    if "--check" not in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
    print("docs/performance.md is up to date" if fresh else "docs/performance.md is stale: run `make docs`")
    return 0 if fresh else 1


if __name__ == "__main__":
    sys.exit(main())
