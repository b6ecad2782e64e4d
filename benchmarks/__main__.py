"""``python -m benchmarks``: measure every provider, write JSON lines and plots, compare with a stored run.

    python -m benchmarks                              # 128 MiB calls of every op, on this machine's device
    python -m benchmarks --sweep cases                # the ops' own cases
    python -m benchmarks --sweep length --ops scaled_masked_softmax
    python -m benchmarks --allocator tuned --threads 2
    python -m benchmarks --idle 0.65                  # on a shared machine; see benchmarks/idle.py
    python -m benchmarks --allocator tuned --compare benchmarks/results/cpu/large-tuned-2.jsonl

Ctrl-C keeps the finished measurements. docs/performance.md defines the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import fusedops
from benchmarks import plots
from benchmarks.idle import exp2_ns
from benchmarks.memory import peak_bytes
from benchmarks.providers import providers
from fusedops import Case, Op, testing
from fusedops.testing import interleaved
from fusedops.testing._timing import backward_of, copy_of, floating, with_grad

# With glibc's defaults, the page faults of a new 128 MiB tensor cost 4-5 times as much as copying it. An allocator that
# keeps memory is a better model of a training loop. The library itself never sets environment variables.
TUNED = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"

# Calls of 2**25 elements, 128 MiB of float32, by their name in the tables. A mask is random with a third of its values
# set, and no row is fully masked; in "dead rows", a quarter of the rows is fully masked.
_SCORES = (4, 16, 512, 1024)
LARGE: dict[str, dict[str, dict[str, Any]]] = {
    "scaled_masked_softmax": {
        "mask [b,1,sq,sk]": {"x": _SCORES, "mask": (4, 1, 512, 1024), "scale": 0.125},
        "mask [b,h,sq,sk]": {"x": _SCORES, "mask": _SCORES, "scale": 0.125},
        "mask [b,1,1,sk]": {"x": _SCORES, "mask": (4, 1, 1, 1024), "scale": 0.125},
        "dead rows": {"x": _SCORES, "mask": (4, 1, 512, 1024), "scale": 0.125},
        "causal": {"x": (2, 16, 1024, 1024), "scale": 0.125, "causal": True},
        "no mask": {"x": _SCORES, "scale": 0.125},
    },
    "bias_gelu": {
        "tanh": {"x": (8192, 4096), "bias": (4096,)},
        "erf": {"x": (8192, 4096), "bias": (4096,), "approximate": "none"},
    },
    "bias_dropout": {"training": {"x": (8192, 4096), "bias": (4096,), "p": 0.1, "seed": 1}},
    "bias_dropout_add": {
        "training": {"x": (8192, 4096), "bias": (4096,), "residual": (8192, 4096), "p": 0.1, "seed": 1},
        "evaluation": {"x": (8192, 4096), "bias": (4096,), "residual": (8192, 4096), "p": 0.1, "training": False},
    },
}
MODES = ("inference", "forward", "backward")

_reported: set[str] = set()


def cases(op: Op, sweep: str, elements: int) -> Iterator[Case]:
    """Yield the calls to measure. No tensor has more than ``elements`` elements."""
    if sweep in ("large", "cases"):
        large = [Case(name, args) for name, args in LARGE.get(op.name, {}).items()]
        all_cases = op.cases if sweep == "cases" or not large else large
        yield from (testing.shrunk(case, elements) for case in all_cases)
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
        yield Case(f"{sweep} {width if sweep == 'length' else rows * width}", {"x": shape, **extra})


def arguments(op: Op, case: Case, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """Return the arguments of a call. The mask is the one described at LARGE, not that of the tests."""
    args = testing.arguments(op, case, dtype, device)
    if "mask" in op.parameters and isinstance(mask := args[op.parameters.index("mask")], Tensor):
        mask[..., 0] = False
        if case.name == "dead rows":
            mask[..., ::4, :] = True
    return args


def measure(
    op: Op, case: Case, dtype: torch.dtype, device: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield one record per provider and mode."""
    args = arguments(op, case, dtype, device)
    functions, skipped = providers(op, args, device)
    functions = {name: function for name, function in functions.items() if name not in options.without}
    errors: dict[str, float | str | None] = {}
    for name, function in list(functions.items()):
        try:
            errors[name] = _error(op, args, _without_grad(function, args))
        except Exception as error:  # a constraint of a peer, which its first call shows
            if name.startswith(("fusedops", "torch")):
                raise
            skipped[name] = f"{type(error).__name__}: {error}"
            del functions[name]
    for name, reason in skipped.items():
        note = f"left out: {name} for {op.name}: {reason}"
        if note not in _reported:
            _reported.add(note)
            tqdm.write(note)
    leaves, inputs = with_grad(op, args)
    like = torch.empty(args[0].shape, dtype=dtype, device=device)
    work: dict[str, dict[str, Callable[[], object]]] = {
        "inference": {name: (lambda f=f: _without_grad(f, args)) for name, f in functions.items()},
        "forward": {name: (lambda f=f: f(*leaves)) for name, f in functions.items()},
    }
    if "backward" in options.modes:
        results = {name: f(*leaves) for name, f in functions.items()}
        grads = [torch.randn_like(y) for y in floating(results["torch"])]
        work["backward"] = {name: backward_of(y, inputs, grads) for name, y in results.items()}
        del results
    min_bytes = op.min_bytes(*args)
    idle = None if options.idle is None else (lambda: exp2_ns() <= options.idle)
    for mode in MODES:
        if mode not in options.modes:
            continue
        # popped, to free the memory: each backward holds the values that its forward saved
        mode_work = work.pop(mode)
        try:
            times = interleaved({**mode_work, "copy": copy_of(like)}, device, options.seconds, idle)
        except TimeoutError as error:
            tqdm.write(f"left out: {op.name} {case.name} {mode}: {error}")
            continue
        moved = min_bytes["backward" if mode == "backward" else "forward"]
        copy_gbs = 2 * like.nbytes / times["copy"].p50 / 1e6
        for name, function in mode_work.items():
            time = times[name]
            gbs = moved / time.p50 / 1e6
            yield {
                "op": op.name,
                "mode": mode,
                "case": case.name,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": list(args[0].shape),
                "provider": name,
                "ms_p50": round(time.p50, 5),
                "ms_p20": round(time.p20, 5),
                "ms_p80": round(time.p80, 5),
                "min_bytes": moved,
                "gb_per_s": round(gbs, 2),
                "copy_gb_per_s": round(copy_gbs, 2),
                "pct_of_copy": round(100 * gbs / copy_gbs, 1),
                "copies": round(time.p50 / times["copy"].p50, 3),
                "speedup_over_torch": round(times["torch"].p50 / time.p50, 3),
                "peak_bytes": peak_bytes(function, device),
                "max_error": errors[name],
            }


def _error(op: Op, args: tuple[Any, ...], y: Any) -> float | str | None:
    """Return the largest difference from the op's reference; None for dropout, where torch drops other elements."""
    if "seed" in op.parameters and args[op.parameters.index("training")]:
        return None
    pairs = zip(floating(y), floating(op.reference(*args)))
    error = max(float((got.float() - expected.float()).abs().max()) for got, expected in pairs)
    return error if error == error else "nan"  # JSON has no NaN


def _without_grad(function: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
    with torch.no_grad():
        return function(*args)


def environment(device: str, threads: int, allocator: str) -> dict[str, Any]:
    """Return the machine, versions and settings of a run."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0] or None
    else:
        name, driver = f"{_processor()}, {os.cpu_count()} cores", None
        if device != "cpu":
            name = torch.get_device_module(device).get_device_name()
    return {
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "fusedops": fusedops.__version__,
        # a run writes its results into the working tree, so results do not count as changes
        "commit": _output_of("git", "rev-parse", "HEAD")
        + ("+changes" if _output_of("git", "status", "--porcelain", "--", ":!benchmarks/results") else ""),
        "threads": threads,
        "allocator": allocator,
    }


def _output_of(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


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


def main() -> int:
    """Parse the command line, measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(testing.OPS), choices=list(testing.OPS))
    parser.add_argument("--cases", nargs="+", help="only the cases of these names")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sweep", default="large", choices=["large", "cases", "length", "size"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--elements", type=int, help="largest tensor; default 2**25 on a CPU, else 2**28")
    parser.add_argument("--without", nargs="+", default=[], help="providers to leave out, such as torch.compile")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time per provider and case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--allocator", default="default", choices=["default", "tuned"])
    parser.add_argument("--idle", type=float, metavar="NS", help="count only calls between two exp2 of at most NS ns")
    parser.add_argument("--out", type=Path, help="a .jsonl file; plots are written to the same folder")
    parser.add_argument("--compare", type=Path, help="a stored .jsonl")
    options = parser.parse_args()
    if options.allocator == "tuned" and os.environ.get("GLIBC_TUNABLES") != TUNED:
        os.environ["GLIBC_TUNABLES"] = TUNED  # the C library reads it when a process starts, so restart
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])
    torch.set_num_threads(options.threads)
    elements = options.elements or (2**25 if options.device == "cpu" else 2**28)
    out: Path = (
        options.out or Path("benchmarks/results/out") / f"{options.sweep}-{options.allocator}-{options.threads}.jsonl"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    shared = environment(options.device, options.threads, options.allocator) | {"idle_ns": options.idle}
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
                for row in measure(op, case, dtype, options.device, options):
                    rows.append({**row, **shared})
                    file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()
        except KeyboardInterrupt:
            print(f"stopped; {len(rows)} measurements are in {out}")
    for row in rows:
        print(
            f"{row['op']:22} {row['mode']:9} {row['case']:18} {row['dtype']:8} {row['provider']:22}"
            f" {row['ms_p50']:9.3f} ms"
            f" {row['copies']:6.2f} copies {row['pct_of_copy']:6.1f} % {row['speedup_over_torch']:6.2f}x torch"
        )
    if rows:
        plots.draw(rows, out.with_suffix(""))
        print(f"{len(rows)} measurements in {out}, plots in the same folder")
    return 1 if options.compare and compare(rows, options.compare) else 0


if __name__ == "__main__":
    sys.exit(main())
