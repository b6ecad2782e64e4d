"""Which products of torch give a row the same bits for any number of rows: ``python -m benchmarks.row_order``.

For each dtype and each shape (N, K) of a weight, ``x @ weight.T`` of 512 rows by one thread is compared with the same
of the first 1 to 511 rows, by one thread and by several. Printed as a Markdown table: for how many of the numbers of
rows some row has other bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((64, 64), (576, 576), (1536, 576), (4096, 1024), (1000, 333))
COUNTS = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 256, 257, 511)
MOST = 512


def counts_that_differ(dtype: torch.dtype, shape: tuple[int, int], threads: int) -> list[int]:
    """Return the numbers of rows with which some row has other bits than in the product of 512 rows by one thread."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MOST, shape[1], generator=generator).to(dtype)
    weight = (torch.randn(shape, generator=generator) / shape[1] ** 0.5).to(dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = x @ weight.T
        torch.set_num_threads(threads)
        return [count for count in COUNTS if not torch.equal(x[:count] @ weight.T, whole[:count])]
    finally:
        torch.set_num_threads(before)


def table(threads: Sequence[int]) -> str:
    """Return the Markdown table."""
    heads = [f"{number} thread{'s' * (number > 1)}" for number in threads]
    lines = [f"| dtype | weight | {' | '.join(heads)} |", f"|---|---|{'---|' * len(heads)}"]
    for dtype in DTYPES:
        for shape in SHAPES:
            cells: list[str] = []
            for number in threads:
                differ = counts_that_differ(dtype, shape, number)
                some = f": {', '.join(map(str, differ[:4]))}{', ...' * (len(differ) > 4)}" if differ else ""
                cells.append(f"{len(differ)} of {len(COUNTS)}{some}")
            name = str(dtype).removeprefix("torch.")
            lines.append(f"| {name} | ({shape[0]}, {shape[1]}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.row_order", description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2, 8], help="numbers of threads")
    options = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n")
    print(table(options.threads))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
