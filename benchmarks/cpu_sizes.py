"""Measure the cpu backend beside plain torch and a copy, from 64 elements to 128 MiB.

    python -m benchmarks.cpu_sizes --threads 2 --out benchmarks/results/cpu/sizes/tuned-2.jsonl

Plain torch, the backend and a copy of one operand take turns in one process, so that other programs on the machine
disturb all alike. Times are the 20th percentile of the turns. `kernel` is the backend's function, `fusedops` the public
call with the selection of the backend; a backward is timed through autograd, and is `fusedops` only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedops
from benchmarks.cpu_cases import CASES, Turn

TUNED = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
SIZES = [2**6, 2**8, 2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**25]


def in_turns(work: dict[str, Turn], seconds: float) -> dict[str, float]:
    """Return microseconds of one call of each function, the 20th percentile of turns of about 0.2 ms or one call."""
    repeats: dict[str, int] = {}
    total = 0.0
    for name, call in work.items():
        for _ in range(3):  # the second call like another is remembered, which takes as long as twenty later ones
            call()
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        repeats[name] = max(1, int(2e-4 / max(took, 1e-7)))
        total += max(took, 2e-4)
    samples: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(max(7, min(400, int(seconds / total)))):
        for name, call in work.items():
            count = repeats[name]
            start = time.perf_counter()
            for _ in range(count):
                result = call()
            samples[name].append((time.perf_counter() - start) / count * 1e6)
            del result
    return {name: statistics.quantiles(taken, n=5)[0] for name, taken in samples.items()}


def measure(op: str, make: Any, form: str, n: int, dtype: torch.dtype, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield one record for each direction and provider."""
    work = make(n, dtype, form)
    plain, leaves = work.plain, work.leaves
    public: Turn = partial(getattr(fusedops, op), *work.args, **work.options)
    source, target = torch.randn(n).to(dtype), torch.empty(n, dtype=dtype)
    copy: Turn = lambda: target.copy_(source)  # noqa: E731
    with torch.no_grad():
        times = {
            "forward": in_turns({"plain": plain, "fusedops": public, "kernel": work.kernel, "copy": copy}, seconds)
        }
    for leaf in leaves:
        leaf.requires_grad_()
    outputs: dict[str, Any] = {"plain": _as_tuple(plain()), "fusedops": _as_tuple(public())}
    grads = [torch.randn_like(y) for y in outputs["plain"]]
    backward: dict[str, Turn] = {
        name: (lambda y=y: torch.autograd.grad(y, leaves, grads, retain_graph=True)) for name, y in outputs.items()
    }
    times["backward"] = in_turns({**backward, "copy": copy}, seconds)
    for direction, by_provider in times.items():
        for provider in by_provider:
            if provider != "copy":
                yield {
                    "op": op,
                    "form": form,
                    "elements": n,
                    "shape": list(outputs["plain"][0].shape),
                    "dtype": str(dtype).removeprefix("torch."),
                    "direction": direction,
                    "provider": provider,
                    "us": round(by_provider[provider], 2),
                    "copies": round(by_provider[provider] / by_provider["copy"], 2),
                    "speedup": round(by_provider["plain"] / by_provider[provider], 2),
                }


def main() -> None:
    """Measure, and write one JSON line a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each case and direction")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--dtypes", nargs="*", default=["float32"])
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--allocator", choices=["default", "tuned"], default="tuned")
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.allocator == "tuned" and os.environ.get("GLIBC_TUNABLES") != TUNED:
        os.environ["GLIBC_TUNABLES"] = TUNED
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.cpu_sizes", *sys.argv[1:]])
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fusedops": fusedops.__version__,
        "commit": commit,
        "threads": options.threads,
        "allocator": options.allocator,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
    }
    out = open(options.out, "a") if options.out else None  # noqa: SIM115
    with fusedops.use("cpu", fallback="raise"):
        for dtype in options.dtypes:
            for op, make, form in CASES:
                for n in options.sizes if not options.ops or op in options.ops else ():
                    for record in measure(op, make, form, n, getattr(torch, dtype), options.seconds):
                        print(
                            f"{op:22} {form:12} {dtype:8} {n:9} {record['direction']:8} {record['provider']:8} "
                            f"{record['us']:10.1f} us {record['copies']:6.2f} copies {record['speedup']:6.2f} x",
                            flush=True,
                        )
                        if out:
                            out.write(json.dumps({**record, **about}) + "\n")
                            out.flush()


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
