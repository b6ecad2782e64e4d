"""A check if the machine is idle: the time of a short calculation that depends only on the cores.

    python -m benchmarks.idle       # best, median and worst time in ten seconds; choose --idle slightly above the best

Another process on the same cores makes simple passes over a tensor 1.5 times as long and a long calculation 1.17 times,
so on a shared machine ratios depend on other processes. With ``--idle`` the benchmark counts only calls during which
the machine was idle.
"""

from __future__ import annotations

import statistics
import time

import torch

_PER_THREAD = 2**16


def exp2_ns() -> float:
    """Return the ns per element that a core takes for ``torch.exp2``, float32, in the cache: the median of 9 calls."""
    x = torch.rand(_PER_THREAD * torch.get_num_threads())
    out, seconds = torch.empty_like(x), list[float]()
    for _ in range(10):
        start = time.perf_counter()
        torch.exp2(x, out=out)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]) / _PER_THREAD * 1e9


def main() -> None:
    """Print the figures from which to choose ``--idle``."""
    end, times = time.monotonic() + 10, list[float]()
    while time.monotonic() < end:
        times.append(exp2_ns())
    print(f"best {min(times):.2f} ns, median {statistics.median(times):.2f} ns, worst {max(times):.2f} ns")


if __name__ == "__main__":
    main()
