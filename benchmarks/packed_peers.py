"""Products with packed weights of other libraries on this CPU: ``python -m benchmarks.packed_peers``.

For a weight of 4096 by 4096 and some rows of x, in turns: ``linear`` of torch, quantized_linear, torch's own packed
products, the layouts of torchao and the 8-bit product of zentorch, where these are installed. Each makes a form of the
weight of its own before. ``error`` is the norm of the difference from ``linear`` in float32 divided by its norm: what
the format costs, and a proof that the call was the right one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fusedops
from benchmarks.machine import environment, version_of
from fusedops import testing
from fusedops.quantization import quantize

Product = Callable[[Tensor], Tensor]
GROUP = 32


def of_linear(weight: Tensor) -> Product:
    """Return torch's product."""
    return lambda x: torch.nn.functional.linear(x, weight)


def of_fusedops(format: str) -> Callable[[Tensor], Product]:
    """Return the maker of quantized_linear with a format."""

    def make(weight: Tensor) -> Product:
        packed = quantize(weight.float(), format)
        return lambda x: fusedops.quantized_linear(x, packed, format=format)

    return make


def of_int4(weight: Tensor) -> Product:
    """Return torch's product with 4 bits: in groups, each with a scale and a zero point."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scale = ((groups.amax(-1) - groups.amin(-1)) / 15).clamp(min=1e-9)
    middle = groups.amin(-1) + 8 * scale
    numbers = ((groups - groups.amin(-1, keepdim=True)) / scale[..., None]).round().clamp(0, 15)
    packed = torch._convert_weight_to_int4pack_for_cpu(numbers.view(rows, columns).to(torch.int32), 1)
    about = torch.stack((scale, middle), -1).transpose(0, 1).contiguous().to(weight.dtype)
    return lambda x: torch._weight_int4pack_mm_for_cpu(x, packed, GROUP, about)


def of_int8(weight: Tensor) -> Product:
    """Return torch's product with 8 bits and a scale for each output."""
    scale = weight.float().abs().amax(-1) / 127
    numbers = (weight.float() / scale[:, None]).round().to(torch.int8)
    scale = scale.to(weight.dtype)
    return lambda x: torch._weight_int8pack_mm(x, numbers, scale)


def of_torchao(module: str, config: str, **options: Any) -> Callable[[Tensor], Product]:
    """Return the maker of a linear layer that torchao has quantized."""

    def make(weight: Tensor) -> Product:
        logging.disable(logging.WARNING)  # of its CUDA libraries
        layer = torch.nn.Linear(*weight.shape[::-1], bias=False, dtype=weight.dtype)
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        chosen = getattr(importlib.import_module(module), config)(**options)
        importlib.import_module("torchao.quantization").quantize_(layer, chosen)
        return layer

    return make


def of_zentorch(weight: Tensor) -> Product:
    """Return zentorch's product of 8 bits with 8 bits: it rounds x too."""
    fusedops.backends()  # loads its library
    scale = weight.float().abs().amax(-1) / 127
    numbers = (weight.float() / scale[:, None]).round().to(torch.int8)
    product = torch.ops.zentorch.zentorch_dynamic_qlinear.default
    return lambda x: product(x, numbers, scale.to(weight.dtype), None)


PROVIDERS: dict[str, Callable[[Tensor], Product]] = {
    "torch, linear": of_linear,
    "cpu, Q8_0": of_fusedops("Q8_0"),
    "cpu, Q4_0": of_fusedops("Q4_0"),
    "torch, int8": of_int8,
    "torch, int4": of_int4,
    "torchao, int8 weight": of_torchao("torchao.quantization", "Int8WeightOnlyConfig"),
    "torchao, int8 weight and x": of_torchao("torchao.quantization", "Int8DynamicActivationInt8WeightConfig"),
    "torchao, int4 weight": of_torchao(
        "torchao.prototype.quantization.int4", "PrototypeInt4WeightOnlyConfig", group_size=GROUP
    ),
    "zentorch, int8 weight and x": of_zentorch,
}


def measured(rows: Sequence[int], size: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the records; a provider that is not installed or refuses the call is left out, and named."""
    torch.manual_seed(0)
    exact = torch.randn(size, size) / size**0.5
    for dtype in (torch.float32, torch.bfloat16):
        products: dict[str, Product] = {}
        for name, make in PROVIDERS.items():
            try:
                products[name] = make(exact.to(dtype))
                products[name](torch.zeros(1, size, dtype=dtype))
            except (ImportError, AttributeError, RuntimeError, AssertionError) as error:
                products.pop(name, None)
                print(f"left out: {name}, {dtype}: {type(error).__name__}: {str(error).splitlines()[0]}")
        for count in rows:
            x = torch.randn(count, size).to(dtype)
            want = x.float() @ exact.T
            with torch.no_grad():
                errors = {name: float((run(x).float() - want).norm() / want.norm()) for name, run in products.items()}
                work: Mapping[str, Callable[[], object]] = {
                    name: (lambda run=run, x=x: run(x)) for name, run in products.items()
                }
                times = testing.interleaved(work, "cpu", seconds)
            for name, time in times.items():
                yield {
                    "provider": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "rows": count,
                    "ms": round(time.p50, 4),
                    "ms_p20": round(time.p20, 4),
                    "ms_p80": round(time.p80, 4),
                    "error": round(errors[name], 5),
                }


def table(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table with a line for each provider, milliseconds, and its error."""
    columns = list(dict.fromkeys((row["rows"], row["dtype"]) for row in sorted(records, key=lambda row: row["rows"])))
    heads = [f"{rows} row{'s' * (rows != 1)}, {dtype}" for rows, dtype in columns]
    yield f"| provider | {' | '.join(heads)} | error |"
    yield "|---" * (len(columns) + 2) + "|"
    for name in dict.fromkeys(row["provider"] for row in records):
        of = {(row["rows"], row["dtype"]): row for row in records if row["provider"] == name}
        cells = [f"{of[column]['ms']:.2f}" if column in of else "-" for column in columns]
        yield f"| {name} | {' | '.join(cells)} | {max(row['error'] for row in of.values()):.3f} |"


def main() -> None:
    """Measure, print the table, and write one JSON line a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = {
        "size": options.size,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torchao": version_of("torchao"),
        "zentorch": version_of("zentorch"),
        **environment("cpu", options.threads, "default"),
    }
    load = round(os.getloadavg()[0], 1)
    records = [{**about, **record, "load": load} for record in measured(options.rows, options.size, options.seconds)]
    print("\n".join(table(records)))
    if options.out:
        with open(options.out, "w", encoding="utf-8") as out:
            out.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
