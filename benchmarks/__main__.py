"""``python -m benchmarks``: measures every provider, writes JSON lines and plots, and compares with a stored run.

    python -m benchmarks                              # the ops' own cases on this machine's device
    python -m benchmarks --sweep length --ops scaled_masked_softmax
    python -m benchmarks --allocator tuned --threads 2
    python -m benchmarks --compare benchmarks/results/cpu/tuned.jsonl

Ctrl-C keeps what is done.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import fusedops
from benchmarks import plots
from benchmarks.measure import copy_of, interleaved, peak_bytes
from benchmarks.providers import providers
from fusedops import testing
from fusedops._op import Case, Op

# a fresh 128 MiB tensor costs 4-5 times its copy in page faults under glibc's defaults; a training loop's allocator is
# better modelled by one that keeps memory. The library itself never sets process environment.
TUNED = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"


_said: set[str] = set()


def cases(op: Op, sweep: str, elements: int) -> Iterator[Case]:
    """The calls to measure: the op's own cases, or a sweep of row length or of size."""
    if sweep == "cases":
        yield from (testing.shrunk(case, elements) for case in op.cases)
        return
    softmax = op.name == "scaled_masked_softmax"
    widths = [2**n for n in range(6, 16)]
    points = [(elements // w, w) for w in widths] if sweep == "length" else [(2**n, 1024) for n in range(0, 16, 2)]
    for rows, width in points:
        if rows * width > elements:
            continue
        shape = (1, 1, rows, width) if softmax else (rows, width)
        extra: dict[str, Any] = {"mask": shape, "scale": 0.125} if softmax else {"bias": (width,)}
        if "residual" in op.parameters:
            extra["residual"] = shape
        if "p" in op.parameters:
            extra |= {"p": 0.1, "seed": 1}
        yield Case(f"{sweep}_{width if sweep == 'length' else rows * width}", {"x": shape, **extra})


def measure(op: Op, case: Case, dtype: torch.dtype, device: str, seconds: float) -> Iterator[dict[str, Any]]:
    """One record a provider and mode."""
    args = testing.arguments(op, case, dtype, device)
    found, left = providers(op, args, device)
    for name, why in left.items():
        note = f"left out: {name} for {op.name}: {why}"
        if note not in _said:
            _said.add(note)
            tqdm.write(note)
    shape = tuple(args[0].shape)
    like = torch.empty(shape, dtype=dtype, device=device)
    leaves = [
        arg.detach().clone().requires_grad_() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
        for arg in args
    ]
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    forward = {name: (lambda f=f: f(*args)) for name, f in found.items()}
    outputs = {name: f(*leaves) for name, f in found.items()}
    grad = torch.randn_like(like)
    backward = {
        name: (lambda y=y: torch.autograd.grad(y, inputs, grad.to(y.dtype), retain_graph=True))
        for name, y in outputs.items()
    }
    least = op.min_bytes(*args)
    for mode, work in (("forward", forward), ("backward", backward)):
        times = interleaved({**work, "copy": copy_of(like)}, device, seconds)
        copy_gbs = 2 * like.nbytes / times["copy"].p50 / 1e6
        for name in work:
            took = times[name]
            gbs = least[mode] / took.p50 / 1e6
            yield {
                "op": op.name,
                "mode": mode,
                "case": case.name,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": list(shape),
                "provider": name,
                "ms_p50": round(took.p50, 5),
                "ms_p20": round(took.p20, 5),
                "ms_p80": round(took.p80, 5),
                "min_bytes": least[mode],
                "gb_per_s": round(gbs, 2),
                "copy_gb_per_s": round(copy_gbs, 2),
                "pct_of_copy": round(100 * gbs / copy_gbs, 1),
                "copies": round(took.p50 / times["copy"].p50, 3),
                "speedup_over_torch": round(times["torch"].p50 / took.p50, 3),
                "peak_bytes": peak_bytes(work[name], device),
            }


def environment(device: str, threads: int, allocator: str) -> dict[str, Any]:
    """What the numbers belong to."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    dirty = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True).stdout.strip()
    if device == "cuda":
        name, driver = torch.cuda.get_device_name(), torch.version.cuda or torch.version.hip
    else:
        name, driver = f"{platform.machine()} CPU, {os.cpu_count()} cores", None
    return {
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fusedops": fusedops.__version__,
        "commit": commit + ("+changes" if dirty else ""),
        "threads": threads,
        "allocator": allocator,
    }


def compare(new: list[dict[str, Any]], stored: Path) -> int:
    """Prints what got slower, in copies or against torch in its own run; returns how many did."""
    key = ("op", "mode", "case", "dtype", "provider", "threads", "allocator")
    old = {tuple(row[k] for k in key): row for row in map(json.loads, stored.read_text().splitlines())}
    slower = 0
    for row in new:
        before = old.get(tuple(row[k] for k in key))
        if before and row["provider"].startswith("fusedops") and row["copies"] > before["copies"] * 1.15:
            slower += 1
            what = " ".join(str(row[k]) for k in key[:5])
            print(f"slower: {what}: {before['copies']:.2f} copies before, {row['copies']:.2f} now")
    print(f"{slower} of {len(new)} measurements are more than 15 % slower than in {stored}")
    return slower


def main() -> int:
    """Parses the command line, measures, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(testing.OPS), choices=list(testing.OPS))
    parser.add_argument("--cases", nargs="+", help="only the cases of these names")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sweep", default="cases", choices=["cases", "length", "size"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--elements", type=int, help="largest tensor; default 2**25 on a CPU, 2**28 on a GPU")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each provider and case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--allocator", default="default", choices=["default", "tuned"])
    parser.add_argument("--out", type=Path, help="a .jsonl file; plots lie beside it")
    parser.add_argument("--compare", type=Path, help="a stored .jsonl")
    options = parser.parse_args()
    if options.allocator == "tuned" and os.environ.get("GLIBC_TUNABLES") != TUNED:
        os.environ["GLIBC_TUNABLES"] = TUNED  # read by the C library when a process starts: so start again
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])
    torch.set_num_threads(options.threads)
    elements = options.elements or (2**28 if options.device == "cuda" else 2**25)
    out: Path = options.out or Path("benchmarks/results/out") / f"{options.device}-{options.allocator}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    shared = environment(options.device, options.threads, options.allocator)
    todo = [
        (testing.OPS[name], case, getattr(torch, dtype))
        for name in options.ops
        for case in cases(testing.OPS[name], options.sweep, elements)
        for dtype in options.dtypes
        if options.cases is None or case.name in options.cases
    ]
    rows: list[dict[str, Any]] = []
    with out.open("w", encoding="utf-8") as file:
        try:
            for op, case, dtype in tqdm(todo, unit="case", disable=not sys.stderr.isatty()):
                torch.compiler.reset()
                for row in measure(op, case, dtype, options.device, options.seconds):
                    rows.append({**row, **shared})
                    file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()
        except KeyboardInterrupt:
            print(f"stopped; {len(rows)} measurements are kept in {out}")
    for row in rows:
        print(
            f"{row['op']:22} {row['mode']:8} {row['case']:18} {row['dtype']:8} {row['provider']:22}"
            f" {row['ms_p50']:9.3f} ms"
            f" {row['copies']:6.2f} copies {row['pct_of_copy']:6.1f} % {row['speedup_over_torch']:6.2f}x torch"
        )
    if rows:
        plots.draw(rows, out.with_suffix(""))
        print(f"{len(rows)} measurements in {out}, plots beside it; {prod(rows[0]['shape'])} elements in the first")
    return 1 if options.compare and compare(rows, options.compare) else 0


if __name__ == "__main__":
    sys.exit(main())
