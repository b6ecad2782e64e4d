"""The times of every op on the CPU backends, without a gradient: ``python -m benchmarks.cpu_backends``.

Plain torch and the backends that take a call run in turns, on the first case of each op, cut to ``--elements``. The
rows are written as JSON lines and as a table of milliseconds, with the load average of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fusedops
from fusedops import testing
from fusedops.testing import _timing

BACKENDS = ("eager", "cpu", "sdpa", "zentorch")


def rows(ops: list[str], elements: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield one row for each op, case and dtype."""
    infos = [info for info in fusedops.backends() if info.name in BACKENDS and info.state == "ready"]
    for op in (fusedops.ops.OPS[name] for name in ops):
        for case in op.evidence.cases[:1]:
            for dtype in (torch.float32, torch.bfloat16):
                args = testing.arguments(op, testing.shrunk(case, elements), dtype, "cpu")
                work: dict[str, Callable[[], object]] = {"plain torch": partial(op.evidence.unfused, *args)}
                for info in infos:
                    if _timing.refusal(info, op, args) is None:
                        work[info.name] = partial(_timing.served_by(info.name, op), *args)
                with torch.no_grad():
                    times = testing.interleaved(work, "cpu", seconds)
                shape = [list(arg.shape) for arg in args if isinstance(arg, torch.Tensor)][:1]
                row = {"op": op.name, "case": case.name, "shape": shape[0], "dtype": str(dtype).partition(".")[2]}
                yield {
                    **row,
                    "ms": {name: round(time.p50, 4) for name, time in times.items()},
                    "p20_p80": {name: [round(time.p20, 4), round(time.p80, 4)] for name, time in times.items()},
                    "load": round(os.getloadavg()[0], 2),
                }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", default=list(fusedops.ops.OPS))
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--seconds", type=float, default=0.2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| op, first tensor | dtype | plain torch |", *(f"{name} |" for name in BACKENDS), "load |")
    print("|---|---|---|" + "---|" * len(BACKENDS) + "---|")
    for row in rows(options.ops, options.elements, options.seconds):
        times = [row["ms"].get(name) for name in ("plain torch", *BACKENDS)]
        fastest = min(time for time in times if time is not None)
        cells = ["-" if time is None else f"**{time:.3f}**" if time == fastest else f"{time:.3f}" for time in times]
        print(f"| {row['op']} {row['shape']} | {row['dtype']} |", *(f"{cell} |" for cell in cells), f"{row['load']} |")
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
