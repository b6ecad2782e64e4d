"""Tokens per second and the memory of a cache by the length of the context: those of transformers and of fusedops.

    python -m benchmarks.context_time                              # 512 to 32,768 keys, minutes
    python -m benchmarks.context_time --lengths 512 4096 --out x   # writes x.png, x.svg and x.csv too

A Llama of random weights in bfloat16, after ``apply``, generates tokens after a context of random keys: a prompt of
32,768 tokens would take most of the time. The caches answer in turns, and a number is the median of the turns. The
memory is that of all tensors of a cache between two tokens, room for more tokens included.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
CACHES = {
    "bfloat16": "transformers, bfloat16",
    "fp8": "transformers, QuantizedCache of fp8",
    "int8": "fusedops, int8",
    "e4m3": "fusedops, float8_e4m3fn",
}


class Row(NamedTuple):
    """A cache at a length: tokens per second, and MB."""

    cache: str
    length: int
    rate: float
    memory: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="KEYS")
    parser.add_argument("--caches", nargs="+", default=list(CACHES), choices=CACHES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="path of the files, without the suffix")
    options = parser.parse_args(arguments)
    rows = measured(options.lengths, options.caches, options.layers, options.rounds, options.threads)
    print("| cache | keys | tokens/s | ratio | MB | ratio |\n|---|---|---|---|---|---|")
    first = {row.length: row for row in rows if row.cache == options.caches[0]}
    for row in rows:
        base = first[row.length]
        ratios = row.rate / base.rate, row.memory / base.memory
        print(f"| {CACHES[row.cache]} | {row.length:,} | {row.rate:.1f} | {ratios[0]:.2f} ", end="")
        print(f"| {row.memory:.1f} | {ratios[1]:.2f} |")
    print(f"\nThe load average is {os.getloadavg()[0]:.1f}.")
    if options.out:
        write(rows, options.out)


def measured(lengths: Sequence[int], caches: Sequence[str], layers: int, rounds: int, threads: int) -> list[Row]:
    """Return a row for each cache and length."""
    import torch
    import transformers

    from fusedops.integrations.transformers import apply

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config: Any = transformers.LlamaConfig(
        **{"vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": layers},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64},
        max_position_embeddings=2 * max(lengths),
    )
    model: Any = transformers.LlamaForCausalLM(config).eval().bfloat16()
    apply(model)
    rows: list[Row] = []
    with torch.no_grad():
        for length in lengths:
            made = {name: filled(name, model, length) for name in caches}
            seconds: dict[str, list[float]] = {name: [] for name in caches}
            for turn in range(rounds + 1):  # the first one warms up
                for name in caches if turn % 2 else reversed(caches):
                    started = time.perf_counter()
                    model(torch.tensor([[turn]]), past_key_values=made[name])
                    if turn:
                        seconds[name].append(time.perf_counter() - started)
            rows += [Row(name, length, 1 / statistics.median(seconds[name]), memory(made[name])) for name in caches]
    return rows


def filled(name: str, model: Any, length: int) -> Any:
    """Return a cache with random keys and values."""
    import torch
    from transformers import DynamicCache, QuantizedCache

    from fusedops.integrations.transformers import quantized_cache

    config = model.config
    makers: dict[str, Any] = {
        "bfloat16": lambda: DynamicCache(config=config),
        "fp8": lambda: QuantizedCache("fp8", config),
        "int8": lambda: quantized_cache(model),
        "e4m3": lambda: quantized_cache(model, torch.float8_e4m3fn),
    }
    cache = makers[name]()
    for index in range(config.num_hidden_layers):
        keys, values = torch.randn(2, 1, config.num_key_value_heads, length, config.head_dim, dtype=torch.bfloat16)
        cache.update(keys, values, index)
        if hasattr(cache.layers[index], "write"):  # else attention writes what is new
            cache.layers[index].write(keys, values)
    return cache


def memory(cache: Any) -> float:
    """Return the memory of the tensors of a cache, in MB."""
    import torch

    total, rest = 0, [value for layer in cache.layers for value in vars(layer).values()]
    while rest:
        value = rest.pop()
        if isinstance(value, torch.Tensor):
            total += value.nbytes
        elif isinstance(value, tuple):
            rest += value
    return total / 1e6


def write(rows: Sequence[Row], stem: Path) -> None:
    """Write the rows, and their picture."""
    import matplotlib
    from matplotlib.figure import Figure

    with stem.with_suffix(".csv").open("w", newline="") as file:
        csv.writer(file).writerows([Row._fields, *rows])
    figure: Any = Figure((9, 3.5), layout="constrained")
    for axis, field, title in zip(figure.subplots(1, 2), ("rate", "memory"), ("tokens per second", "memory, MB")):
        for name in dict.fromkeys(row.cache for row in rows):
            mine = [row for row in rows if row.cache == name]
            axis.plot([row.length for row in mine], [getattr(row, field) for row in mine], "o-", label=CACHES[name])
        axis.set(xscale="log", yscale="log", xlabel="keys", title=title)
        axis.set_xticks(lengths := sorted({row.length for row in rows}), [f"{each:,}" for each in lengths], rotation=30)
        axis.minorticks_off()
    figure.axes[0].legend(frameon=False, fontsize="small")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # else each letter is a path
        for suffix in (".png", ".svg"):
            figure.savefig(stem.with_suffix(suffix))


if __name__ == "__main__":
    main()
