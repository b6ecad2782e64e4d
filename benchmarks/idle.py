"""Whether the machine is idle: how long a short calculation takes that only the cores have a part in.

    python -m benchmarks.idle       # its best figure and its worst in ten seconds; --idle is a little above the best

A neighbour on the same cores makes simple passes over a tensor take half as long again and a long calculation a sixth,
so that on a shared machine ratios move with what others do. With ``--idle`` the benchmark counts only the calls that
have the machine to themselves.
"""

from __future__ import annotations

import statistics
import time

import torch

_PER_THREAD = 2**16


def exp2_ns() -> float:
    """Nanoseconds a core takes for one element of ``torch.exp2``, float32, in the cache: the median of nine calls."""
    x = torch.rand(_PER_THREAD * torch.get_num_threads())
    out, took = torch.empty_like(x), list[float]()
    for _ in range(10):
        start = time.perf_counter()
        torch.exp2(x, out=out)
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:]) / _PER_THREAD * 1e9


def main() -> None:
    """Prints what to choose ``--idle`` by."""
    end, found = time.monotonic() + 10, list[float]()
    while time.monotonic() < end:
        found.append(exp2_ns())
    print(f"best {min(found):.2f} ns, median {statistics.median(found):.2f} ns, worst {max(found):.2f} ns")


if __name__ == "__main__":
    main()
