"""The kernels that a call launches, by torch's profiler: ``python -m benchmarks.kernels --ops experts``.

A line for each kernel of each headline call of the ops, forward and backward: how often a call launches it, and its
time in a call. On a CPU, of small calls, these are torch's functions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.calls import arguments, cases
from benchmarks.machine import environment
from benchmarks.measure import release
from fusedops import Case, Op, testing
from fusedops.testing._timing import backward_of, floating, with_grad

_CALLS = 3


def rows(op: Op, case: Case, dtype: torch.dtype, device: str) -> Iterator[dict[str, Any]]:
    """Yield the kernels of a call, those of the longest time first."""
    leaves, inputs = with_grad(op, arguments(op, case, dtype, device))
    y = op.call_public(*leaves)
    backward = backward_of(y, inputs, [torch.randn_like(each) for each in floating(y)])
    for mode, work in (("forward", lambda: op.call_public(*leaves)), ("backward", backward)):
        work()  # compiles
        torch.get_device_module(device).synchronize()
        kind = ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA
        with profile(activities=[kind]) as profiler:
            for _ in range(_CALLS):
                work()
            torch.get_device_module(device).synchronize()
        found: list[tuple[float, int, str]] = []
        for event in profiler.key_averages():
            on_device = event.device_type != DeviceType.CPU
            if on_device == (device != "cpu"):
                time = event.self_device_time_total if on_device else event.self_cpu_time_total
                found.append((time / _CALLS, event.count, event.key))
        for us, count, name in sorted(found, reverse=True):
            yield {"op": op.name, "case": case.name, "mode": mode, "kernel": name[:60], "calls": count / _CALLS,
                   "us": round(us, 2)}  # fmt: skip


def main() -> None:
    """Print the table, and write its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", required=True, choices=list(testing.OPS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=2**30, help="of the largest tensor")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="a .jsonl file")
    options = parser.parse_args()
    where = environment(options.device, torch.get_num_threads(), "default")
    written: list[str] = []
    for op in map(testing.OPS.__getitem__, options.ops):
        for case in cases(op, "headline", options.elements):
            for row in rows(op, case, getattr(torch, options.dtype), options.device):
                print(f"{op.name:22} {case.name:18} {row['mode']:9} {row['us']:10.1f} us {row['calls']:6.1f} "
                      f"{row['kernel']}", flush=True)  # fmt: skip
                written.append(json.dumps(row | where) + "\n")
            if options.out:
                options.out.write_text("".join(written), encoding="utf-8")
            release(options.device)


if __name__ == "__main__":
    main()
