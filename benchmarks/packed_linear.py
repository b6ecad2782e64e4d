"""Time of quantized_linear beside torch's linear on the float32 weight, in paired turns.

    python -m benchmarks.packed_linear --threads 2 --out benchmarks/results/cpu/packed.jsonl
    python -m benchmarks.packed_linear --threads 2 --outputs 49152 --columns 576

In each turn both run once, and the order changes from turn to turn: on a busy machine a ratio of one turn is nearer to
the truth than a ratio of two times of different minutes. The load of the machine is recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

import fusedops
from benchmarks.machine import environment
from benchmarks.report import marked
from fusedops.quantization import FORMATS, dequantize, quantize

ROWS = (1, 8, 512)


def seconds(run: Callable[[], object]) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratios(mine: Callable[[], object], torchs: Callable[[], object], turns: int) -> list[float]:
    """Return torch's time divided by ours for each turn, sorted."""
    each: list[float] = []
    for turn in range(turns + 2):
        pair = {run: seconds(run) for run in ((mine, torchs) if turn % 2 else (torchs, mine))}
        if turn > 1:  # the first two are a warm-up
            each.append(pair[torchs] / pair[mine])
    return sorted(each)


def measure(format: str, rows: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of each direction; the backward is of x alone."""
    packed = quantize(torch.randn(options.outputs, options.columns) / options.columns**0.5, format)
    weight = dequantize(packed, format)
    x = torch.randn(rows, options.columns)
    with torch.no_grad():
        yield _record(
            "forward",
            ratios(
                lambda: fusedops.quantized_linear(x, packed, format=format), lambda: linear(x, weight), options.turns
            ),
        )
    x.requires_grad_()
    ys = fusedops.quantized_linear(x, packed, format=format), linear(x, weight)
    grad = torch.randn(rows, options.outputs)
    mine, torchs = ((lambda y=y: torch.autograd.grad(y, x, grad, retain_graph=True)) for y in ys)
    yield _record("backward", ratios(mine, torchs, options.turns))


def _record(direction: str, each: Sequence[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(each, n=4)
    return {
        "direction": direction,
        "speedup": round(middle, 2),
        "low": round(low, 2),
        "high": round(high, 2),
        "turns": len(each),
    }


def table(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table with one line per format: the speed-up for each number of rows, and of the backward of the most."""
    rows = sorted({row["rows"] for row in records})
    cells = {(row["format"], row["rows"], row["direction"]): row["speedup"] for row in records}
    heads = [f"{count} row{'s' * (count > 1)}" for count in rows]
    yield f"| format | bits | {' | '.join(heads)} | backward, {heads[-1]} |"
    yield "|---" * (len(rows) + 3) + "|"
    for format in dict.fromkeys(row["format"] for row in records):
        ratios = [*(cells[format, count, "forward"] for count in rows), cells[format, rows[-1], "backward"]]
        bits = 8 * FORMATS[format].bytes / FORMATS[format].weights
        yield f"| {format} | {bits:.2f} | {' | '.join(map(marked, ratios))} |"


def main() -> None:
    """Measure, print the table, and write one JSON line a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="*", help="all whose blocks divide a row by default")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--outputs", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="append the records to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    about = {
        "op": "quantized_linear",
        "dtype": "float32",
        "weight": [options.outputs, options.columns],
        "capability": torch.backends.cpu.get_cpu_capability(),
        **environment("cpu", options.threads, "default"),
    }
    records: list[dict[str, Any]] = []
    with fusedops.use("cpu", fallback="raise"):
        for format in options.formats or [name for name, of in FORMATS.items() if options.columns % of.weights == 0]:
            for rows in options.rows:
                load = round(os.getloadavg()[0], 1)  # of the last minute: this program alone is its threads
                made = measure(format, rows, options)
                records += [{**about, "format": format, "rows": rows, **record, "load": load} for record in made]
    print("\n".join(table(records)))
    if options.out:
        with open(options.out, "a", encoding="utf-8") as out:
            out.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
