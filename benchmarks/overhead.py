"""What choosing a backend costs: a call through fusedops, less a direct call of the same kernel, on small CPU tensors.

Absolute times differ between machines: each row also stands as a ratio to ``torch.mul`` on the same tensor, timed in
the same run. Usage: python benchmarks/overhead.py
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch

import fusedops
from fusedops._registry import registry

CALLS, ROUNDS = 5000, 41


def cost(functions: list[Callable[[], Any]]) -> list[float]:
    """Microseconds a call of each function. In turns, so that noise hits all alike; the median of the rounds."""
    rounds: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for times, function in zip(rounds, functions):
            times.append(timeit.timeit(function, number=CALLS) / CALLS * 1e6)
    return [statistics.median(times) for times in rounds]


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    x = torch.randn(2, 3, 4, 8)
    padding = torch.zeros(2, 1, 1, 8, dtype=torch.bool)
    full = torch.zeros(2, 3, 4, 8, dtype=torch.bool)
    record = registry.find("eager")
    assert record is not None
    softmax = fusedops.scaled_masked_softmax
    kernel = record.entries["scaled_masked_softmax", "forward"].kernel.function
    leaf = x.clone().requires_grad_()
    rows: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        ("no mask", lambda: softmax(x, None, 0.5), lambda: kernel(x, None, 0.5)),
        ("mask [b, 1, 1, sk]", lambda: softmax(x, padding, 0.5), lambda: kernel(x, padding, 0.5)),
        ("mask of x's shape", lambda: softmax(x, full, 0.5), lambda: kernel(x, full, 0.5)),
        ("no mask, with grad", lambda: softmax(leaf, None, 0.5), lambda: kernel(x, None, 0.5)),
    ]
    functions: list[Callable[[], Any]] = [lambda: torch.mul(x, 0.5)]
    for _, through, direct in rows:
        functions += [through, direct]
    mul, *times = cost(functions)
    print(f"scaled_masked_softmax on {tuple(x.shape)} float32, eager on CPU, torch {torch.__version__}")
    print(f"{'call':20} {'through':>10} {'direct':>10} {'added':>10} {'added / torch.mul':>18}")
    for (name, _, _), through, direct in zip(rows, times[::2], times[1::2]):
        added = through - direct
        print(f"{name:20} {through:7.2f} us {direct:7.2f} us {added:7.2f} us {added / mul:17.2f}x")
    print(f"torch.mul(x, 0.5): {mul:.2f} us")


if __name__ == "__main__":
    main()
