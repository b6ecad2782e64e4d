"""``python -m benchmarks``: measure every provider, write JSON lines, compare with a stored run.

    python -m benchmarks                              # 128 MiB calls of every op, on this machine's device
    python -m benchmarks --sweep cases                # the ops' own cases
    python -m benchmarks --sweep length --ops scaled_masked_softmax
    python -m benchmarks --allocator tuned --threads 2
    python -m benchmarks --idle 0.65                  # on a shared machine; see benchmarks/idle.py
    python -m benchmarks --allocator tuned --compare benchmarks/results/out/large-tuned-2.jsonl
    python -m benchmarks report FOLDER                # plots and FOLDER/report.md, from the runs in a folder

Ctrl-C keeps the finished measurements. docs/performance.md defines the figures. The exit code is 1 where a call could
not be measured, a backend of fusedops raised, or a measurement is slower than the stored one; 75 where the process can
no longer use its device: the same command with --continue measures the calls that are left.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import headline, report
from benchmarks.calls import SWEEPS, cases
from benchmarks.gpu.steps import BROKEN
from benchmarks.machine import TUNED, environment
from benchmarks.measure import MODES, Measurement, device_works, release
from fusedops import testing


def compare(new: list[dict[str, Any]], stored: Path) -> int:
    """Print the measurements that take more copies than in the stored run; return their number."""
    key = ("op", "mode", "case", "dtype", "provider", "threads", "allocator")
    old = {tuple(row[k] for k in key): row for row in map(json.loads, stored.read_text().splitlines())}
    slower = 0
    for row in new:
        before = old.get(tuple(row[k] for k in key))
        if before and row["provider"].startswith("fusedops") and row["copies"] > before["copies"] * 1.15:
            slower += 1
            label = " ".join(str(row[k]) for k in key[:5])
            print(f"slower: {label}: {before['copies']:.2f} copies before, {row['copies']:.2f} now")
    print(f"{slower} of {len(new)} measurements are more than 15 % slower than in {stored}")
    return slower


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", default=list(testing.OPS), choices=list(testing.OPS))
    parser.add_argument("--cases", nargs="+", help="only the cases of these names")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sweep", default="large", choices=SWEEPS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--elements", type=int, help="largest tensor; default 2**25 on a CPU, else 2**28")
    parser.add_argument("--grow", action="store_true", help="give the cases more rows, up to --elements")
    parser.add_argument("--without", nargs="+", default=[], help="providers to leave out, such as torch.compile")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time per provider and case")
    parser.add_argument("--limit", type=float, help="begin no case after so many seconds")
    parser.add_argument(
        "--compile-only", metavar="I/N", help="call each provider of every N-th case once, from the I-th"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--allocator", default="default", choices=["default", "tuned"])
    parser.add_argument("--idle", type=float, metavar="NS", help="count only calls between two exp2 of at most NS ns")
    parser.add_argument("--out", type=Path, help="a .jsonl file")
    parser.add_argument(
        "--continue", dest="continues", action="store_true", help="begin behind the call that ended the last process"
    )
    parser.add_argument("--compare", type=Path, help="a stored .jsonl")
    return parser.parse_args(arguments)


def main() -> int:
    """Parse the command line, measure, and write the results."""
    if sys.argv[1:2] == ["report"]:
        return report.main(sys.argv[2:])
    options = parsed(sys.argv[1:])
    if options.allocator == "tuned" and os.environ.get("GLIBC_TUNABLES") != TUNED:
        os.environ["GLIBC_TUNABLES"] = TUNED  # the C library reads it when a process starts, so restart
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])
    torch.set_num_threads(options.threads)
    elements = options.elements or (2**25 if options.device == "cpu" else 2**28)
    todo = [
        (testing.OPS[name], case, getattr(torch, headline.DTYPES.get((name, case.name), dtype)))
        for dtype in options.dtypes
        for name in options.ops
        for case in cases(testing.OPS[name], options.sweep, elements, options.grow)
        if options.cases is None or case.name in options.cases
    ]
    end = time.monotonic() + (options.limit or 1e9)
    measurement = Measurement(options.device, options.modes, options.seconds, options.without, options.idle)
    if options.compile_only:
        first, step = map(int, options.compile_only.split("/"))
        for op, case, dtype in todo[first::step]:
            if time.monotonic() < end:
                measurement.compile_ahead(op, case, dtype)
                release(options.device)
        return 0
    return run(todo, end, measurement, options)


def run(todo: list[Any], end: float, measurement: Measurement, options: argparse.Namespace) -> int:
    """Measure the calls, and return the exit code."""
    stem = f"{options.sweep}-{options.allocator}-{options.threads}.jsonl"
    out: Path = options.out or Path("benchmarks/results/out") / stem
    out.parent.mkdir(parents=True, exist_ok=True)
    begun = out.with_suffix(".begun")  # the number of calls that were begun
    first = int(begun.read_text()) if options.continues and begun.exists() else 0
    if not first:
        out.write_bytes(b"")
    shared = environment(options.device, options.threads, options.allocator) | {"idle_ns": options.idle}
    rows: list[dict[str, Any]] = []
    works = True
    gc.freeze()  # what is imported: each release would go through it
    with out.open("r+b") as file:
        file.seek(file.read().rfind(b"\n") + 1)  # the last line of a process that was ended may be a part
        file.truncate()
        try:
            for done, (op, case, dtype) in enumerate(todo[first:], first):
                if time.monotonic() > end:
                    print(f"stopped after {options.limit:g} s: {len(todo) - done} of {len(todo)} cases are left out")
                    break
                if sys.stderr.isatty():
                    print(f"{done + 1} of {len(todo)}: {op.name} {case.name} {dtype}", file=sys.stderr)
                begun.write_text(str(done + 1))
                release(options.device)
                for row in measurement.measured(op, case, dtype):
                    rows.append({**row, **shared})
                    file.write(json.dumps(rows[-1]).encode() + b"\n")
                    file.flush()
                works = device_works(options.device)
                if not works:
                    break
        except KeyboardInterrupt:
            print(f"stopped; {len(rows)} measurements are in {out}")
    for row in rows:
        print(
            f"{row['op']:22} {row['mode']:9} {row['case']:18} {row['dtype']:8} {row['provider']:22}"
            f" {row['ms_p50']:9.3f} ms"
            f" {row['copies']:6.2f} copies {row['pct_of_copy']:6.1f} % {row['speedup_over_torch'] or 0:6.2f}x torch"
        )
    if rows:
        print(f"{len(rows)} measurements in {out}")
    for failure in measurement.failures:
        print(f"failed: {failure}")
    slower = compare(rows, options.compare) if options.compare else 0
    return int(bool(slower or measurement.failures)) if works else BROKEN


if __name__ == "__main__":
    sys.exit(main())
