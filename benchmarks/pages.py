"""The pages of docs/ that are made of the committed runs: the results and every run.

Every measured number in their tables and in the picture comes from a file of benchmarks/results/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import packed_linear, picture, report
from benchmarks.cpu_cases import CASES, limit
from benchmarks.gpu import page as gpu_page

DOCS = Path(__file__).parents[1] / "docs"
SIZES = report.RESULTS / "cpu" / "sizes"
#: The run of the first table and of the picture, and the numbers of elements of its columns.
SHOWN = SIZES / "tuned-2.jsonl"
COLUMNS = (2**10, 2**20, 2**25)
#: The run of the table of packed weights.
PACKED = report.RESULTS / "cpu" / "packed.jsonl"
DTYPE = "float32"
DIRECTIONS = ("forward", "backward")

RESULTS_HEAD = """# Performance

The speed-up of each op over the chain of torch calls that a model would use instead, measured on a CPU. [On an NVIDIA
GPU](gpu.md) has an H200; **no AMD GPU and no Ascend device has been measured yet.** [How it is measured](measuring.md).
[Every run](measurements.md), with bfloat16, one thread and all sizes.
"""

RESULTS_TABLE = """Columns 2 to 4: the time of plain torch divided by the time of the call, for COLUMNS elements;
below 1, torch is faster. Last column: the fewest bytes that the op must move divided by its time, in percent of the
speed of `y.copy_(x)`, for LARGEST elements. MACHINE.
"""

PACKED_TABLE = """Torch's time for `linear` with the unpacked float32 weight divided by the time of
[quantized_linear](ops.md#quantized_linear); below 1, torch is faster. Torch reads 32 bits a weight. A
token of generation is one row, a prompt is many. Each ratio is the median of TURNS paired turns, in which the load
average of the machine was LOADS, OWN of it from this program. MACHINE.
`python -m benchmarks.packed_linear` repeats it.
"""

SLOW_HEAD = """
## Where torch is faster

COUNT of the ALL ratios in [the runs](measurements.md) are below LIMIT. Per op, form and direction:
"""

RESULTS_TAIL = """
Torch's dropout saves a mask, which its backward reads. The backward here computes the mask again from the seed, in 0.27
ns an element on two threads. That is more than torch takes for tensors that stay in the caches. Up to about 1 Ki
elements, the time of a call is that of the selection and the launch: 2.4 to 6 us, where one or two functions of torch
take 2.5 to 4 us.

## Attention, the fused linear loss, experts

They are mostly matrix products, and have no rows in the table.

[attention](ops.md#attention) on `cpu` computes tiles of queries and keys. Its time, of that of torch's
`scaled_dot_product_attention`, for (2, 16, 2048, 64); for a window of 512 keys at (1, 8, 8192, 64), for which torch has
a mask; and for one query of 32 heads over 4096 keys of 4 key heads of 128. 2 threads of an idle AMD EPYC with AVX-512
and products of bfloat16, medians of five turns:

| call | float32 | both ways | bfloat16 | both ways |
|---|---|---|---|---|
| causal | 0.70 | 0.63 | 0.44 | 0.51 |
| a padding mask | 0.67 | 0.65 | 0.44 | 0.50 |
| values of half the width | 0.09 | 0.17 | 0.07 | 0.09 |
| window | 0.04 | 0.08 | 0.03 | 0.08 |
| one query | 0.24 | 0.17 | 0.05 | 0.06 |

Causal in float32 took 107 ms forward, torch 150; its peak memory is 0.74 to 0.94 of torch's. For values of another
width torch keeps all scores, 1.2 GB. `python -m benchmarks.attention` repeats it, with
`--forms window --shape 1 8 8192 64` and `--forms decode --shape 1 32 4096 128`.

The losses of a linear layer, [linear_cross_entropy](ops.md#linear_cross_entropy) and
[linear_log_probs](ops.md#linear_log_probs), never have the logits of all rows. For x (4096, 512) and weight
(32000, 512), forward and backward, medians of four turns. Plain is matmul with cross entropy, or with log_softmax and
gather. "Products" are torch's matrix products alone: three, and four for linear_log_probs, whose backward computes
the logits again.

| op | dtype | time, of plain's | products | `F.linear_cross_entropy` | memory beyond inputs and gradients |
|---|---|---|---|---|---|
| linear_cross_entropy | float32 | 0.69 (0.68 to 0.72) | 0.76 | 1.22 | 25 MB, plain 1.5 GB |
| linear_cross_entropy | bfloat16 | 0.78 (0.73 to 0.84) | 0.73 | 3.22 | 70 MB, plain 0.75 GB |
| linear_log_probs | float32 | 0.95 (0.90 to 1.04) | 1.22 | | 25 MB, plain 1.5 GB |
| linear_log_probs | bfloat16 | 0.90 (0.90 to 0.95) | 0.92 | | 67 MB, plain 1.0 GB |

In bfloat16, 65 MB are the gradient of weight, which is summed in float32. torch's own function is slower than plain, so
no backend calls it on a CPU. `python -m benchmarks.linear_loss` repeats it, with `--op` and `--dtype`.

All on an idle AMD EPYC with AVX-512, 2 threads.

[linear_attention](ops.md#linear_attention) and [causal_conv1d](ops.md#causal_conv1d) on `cpu`, beside the torch code of
transformers 5.22: float32, 2 threads, medians of turns on an idle AMD EPYC with AVX-512, in 4 processes.
transformers' times of one position change most, as its memory is mapped anew or not.
`python -m benchmarks.linear_attention` repeats it.

| call | transformers, ms | `cpu`, ms | ratio |
|---|---|---|---|
| gated delta rule, 32 heads of 128 on 16 of keys: one position | 0.92 to 2.5 | 0.076 to 0.107 | 12 to 24 |
| the same, 2,048 positions | 485 to 506 | 54 to 61 | 8.1 to 9.1 |
| the same, 1,024 positions, forward and backward | 552 to 586 | 92 to 102 | 5.7 to 6.4 |
| gated delta rule, 16 heads of 128: one position | 0.23 to 0.27 | 0.029 to 0.037 | 7.5 to 7.9 |
| the same, 2,048 positions | 121 to 134 | 26 to 31 | 4.3 to 4.7 |
| the same, 1,024 positions, forward and backward | 234 to 242 | 49 to 53 | 4.5 to 4.9 |
| Mamba-2, 64 heads of 64, states of 128: one position | 1.0 to 1.1 | 0.064 to 0.084 | 12 to 17 |
| the same, 2,048 positions | 646 to 748 | 32 to 35 | 19 to 23 |
| the same, 512 positions, forward and backward | 222 to 317 | 31 to 34 | 7.1 to 9.4 |
| convolution of width 4 with silu, 4,096 channels, 2,048 positions | 7.8 to 9.8 | 1.8 to 3.7 | 2.6 to 5.2 |
| the same, one position | 0.19 to 0.27 | 0.011 | 17 to 24 |

The convolution takes 0.9 to 1.1 times as long as `copy_`, and in one of four processes 2. Forward and backward of 16
heads over 4,096 positions take 157 MB beyond the arguments, transformers' code 989 MB.

[varlen_attention](ops.md#varlen_attention) and [merge_attention](ops.md#merge_attention): see
[attention](attention.md).

[experts](ops.md#experts) beside the experts functions of transformers 5.22, E experts of width H and inner width I, K
for a token: the time of transformers' function divided by the time of the op on `cpu`, two threads, process time,
medians of five turns on an idle AMD EPYC with AVX-512 and AVX512-BF16.

| E, K, H, I | tokens | loop, float32 | grouped_mm, float32 | loop, bfloat16 | grouped_mm, bfloat16 |
|---|---|---|---|---|---|
| 64, 8, 512, 256 | 64 | 2.4 | 1.9 | 3.2 | 1.4 |
| 64, 8, 512, 256 | 2048 | 1.3 | 1.9 | 1.7 | 1.8 |
| 64, 8, 512, 256 | 2048, forward and backward | 9.7 | 1.6 | 4.6 | 1.4 |
| 128, 8, 512, 192 | 64 | 4.3 | 2.0 | 4.4 | 1.9 |
| 128, 8, 512, 192 | 2048 | 1.7 | 2.3 | 2.3 | 1.5 |
| 128, 8, 512, 192 | 2048, forward and backward | 28 | 2.0 | 13 | 1.2 |
| 8, 2, 1024, 2048 | 1 | 1.4 | 1.6 | 2.0 | 1.2 |
| 8, 2, 1024, 2048 | 64 | 1.9 | 1.6 | 1.2 | **0.98** |
| 8, 2, 1024, 2048 | 2048 | 1.4 | 1.4 | 1.0 | 1.2 |
| 8, 2, 1024, 2048 | 2048, forward and backward | 1.7 | 1.2 | 1.5 | 1.0 |

One token of the small experts takes a millisecond or less, of which a thread that waits is a part: turns differ by a
factor of five, and all of ours were shorter in the median. One float32 token of the large ones reads 50 MB of weights
as fast as torch's product of a vector. Their products of bfloat16 run at the speed of torch's, which use the same
instruction: 2,048 tokens at 357 GFLOP/s of two cores, torch's loop at 350. `batched_mm` took 2 to 74 times as long as
the op in all cases. Beside its results the op takes T * K * H numbers in float32 forward, T * H backward, and
activations of some 16 MiB, or of one expert's rows where they are more. `python -m benchmarks.experts` repeats it.

On an AMD EPYC with Zen 5, which has the same instructions, the fastest of transformers' functions took as many times as
long as the op (`--wall`: two threads, wall time, medians of 5 to 21 calls in turns, `batched_mm` left out where it was
slowest before; two numbers are the smallest and the largest of several runs, in which mostly the other function's time
differed; the machine ran nothing else, but a neighbour took part of the memory's bandwidth at times):

| E, K, H, I | 1 token | 64 | 2048 | 2048, forward and backward | bfloat16: 1 token | 64 | 2048 | both |
|---|---|---|---|---|---|---|---|---|
| 64, 8, 512, 256 | 2.4, 3.7 | 2.9, 4.1 | 2.2 | 3.5 | 4.3, 4.8 | 2.8, 3.1 | 1.3, 1.5 | 1.7, 2.0 |
| 128, 8, 512, 192 | 3.1, 3.9 | 2.6, 2.7 | 2.8, 3.0 | 3.2, 3.5 | 6.9 | 3.0 | 2.2, 2.9 | 1.6 |
| 8, 2, 1024, 2048 | 2.0, 2.1 | 2.8 | 2.2 | 2.3 | 2.2, 2.6 | 1.9, 2.0 | 1.0, 1.3 | 1.2, 1.4 |

The products of 2,048 bfloat16 tokens of the large experts, 51.5 GFLOP, took 59 to 65 ms, and transformers' loop 63 to
83. Of the two cores' `vdpbf16ps` alone, in registers, they would take 48 ms: 1.2 times the loop's best would be 90 % of
that, with the packing of the weights, the activations and the sums.

Forward and backward of 2,048 tokens raise the memory of the process (`--memory`) by 146, 184 and 295 MiB in float32 and
76, 94 and 152 in bfloat16, grouped_mm by 200, 240, 304 and 100, 120, 152: 0.73, 0.77 and 0.97 of it, 0.75, 0.79 and
1.00. The loop takes 299, 366, 482 and 150, 184, 241. Of all, 96, 144 and 192 MiB, in bfloat16 half, are the gradients
of the weights. What the op saves for its backward, which the layers of a model add up, is 32, 24 and 64 MiB, in
bfloat16 half, that of grouped_mm 96, 80, 144 and 48, 40, 72: 0.3 to 0.44 of it.

[top_k_routing](ops.md#top_k_routing) beside softmax or sigmoid, `topk` and `gather` of torch, which leave ties open:
their time divided by that of the op, float32, 1 thread, on an Intel Xeon with AVX-512 (process time, medians of five
turns; the machine was **busy**):

| router | tokens | cpu, forward | both | eager, forward | both |
|---|---|---|---|---|---|
| 8 experts, 2 for a token, softmax | 2048 | 1.6 | 1.3 | **0.84** | **0.60** |
| 32 experts, 4 for a token, softmax of these | 2048 | 1.6 | 1.3 | **0.88** | **0.65** |
| 128 experts, 8 for a token, softmax | 2048 | 1.7 | 1.6 | **0.93** | **0.83** |
| 256 experts, 8 for a token, sigmoid, bias, groups | 2048 | 3.2 | 2.8 | 1.0 | **0.93** |
| the same | 1 | 6.1 | 2.4 | **0.43** | **0.37** |

[gated_rms_norm](ops.md#gated_rms_norm) on `cpu` beside the chain of models: float32 inside, a mean of squares, silu and
products, each a call of torch. Its time divided by that of the op, 1 thread, on a **busy** Intel Xeon with AVX-512
(process time, medians of seven turns):

| shape | dtype | norm first, forward | both | gate first, forward | both |
|---|---|---|---|---|---|
| (2048, 2048) | float32 | 3.6 | 6.2 | 3.1 | 6.0 |
| (2048, 2048) | bfloat16 | 6.3 | 7.5 | 4.8 | 5.8 |
| (16384, 128) | float32 | 3.6 | 5.0 | 3.1 | 5.3 |
| (16384, 128) | bfloat16 | 6.6 | 9.5 | 4.2 | 8.2 |

## Packed weights

PACKED
## A training step

The GPT of `make demo`, with dropout, on the same machine: 30.3 ms a step, and 39.4 ms in plain torch with its own fused
attention, a speed-up of 1.30 (medians of 60 steps in turns).

## Measure on your machine

```sh
fusedops bench                    # every op, beside plain torch and a copy
fusedops bench bias_gelu --dtype bf16 --device cuda
```

The Triton kernels: [measured on an H200](gpu.md).
"""

MEASURING = """# How it is measured

The pages [performance](performance.md) and [measurements](measurements.md) are written by `python -m benchmarks report`
from the runs in `benchmarks/results/`, which have one JSON line per measurement.

## What is compared

- **Plain torch** is the chain of calls that a model would use: `softmax((x * scale).masked_fill(mask, -inf), -1)`,
  `gelu(x + bias)`, `residual + dropout(x + bias)`, `silu(gate) * up`, `rms_norm(x + residual)`, the rotation by
  `cat((-x2, x1), -1)`, `cross_entropy(logits, target)`.
- **The call** is the public function, with the check of its arguments and the selection of the backend. A backward is
  timed through autograd.
- **A copy** is `y.copy_(x)` of the main tensor. It shows the speed of the machine: it reads and writes each byte once.

The three take turns in one process, so that other programs disturb all of them alike. A time is the 20th percentile of
the turns, each of 0.2 ms or one call.

## Against the limit

An op must read each of its inputs and write each of its results once: `min_bytes`, from the data of the op. Divided by
the op's time, they are a speed, in percent of the speed of a copy.

```python
import torch
import fusedops

x, bias = fusedops.TensorSpec((2048, 16384), torch.bfloat16), fusedops.TensorSpec((16384,), torch.bfloat16)
print(fusedops.ops.OPS["bias_gelu"].evidence.min_bytes(x, bias, "tanh"))
```

```text
{'forward': 134250496, 'backward': 201392128}
```

More than 100 % is possible: torch's copy loads the cache lines that it overwrites. For tensors that fit in the caches
the figure has no meaning, and is not shown.

## Memory that is kept, and memory that is not

"Tuned allocator" means that glibc keeps memory (`GLIBC_TUNABLES`, set by the benchmark, never by the library). With
glibc's defaults, every new tensor of many megabytes costs page faults, in torch and here. A chain of torch calls makes
several such tensors, so it loses more: most ratios of 32 Mi elements are larger there. Torch's time for the backward of
a dropout of 4 Mi elements was 0.9 ms in one run and 1.4 ms in another with the tuned allocator, and 1.1 ms and 2.4 ms
with glibc's own.

## Other benchmarks

`fusedops bench` and `python -m benchmarks` measure any backend and device, beside torch and installed peers:

| column | meaning |
|---|---|
| ms | median time of one call |
| copies | that time divided by the time of a copy |
| % of copy | `min_bytes` divided by the time, in percent of the copy's speed |
| x torch | speed-up over the chain of torch calls |
| x Megatron, x compiled | the same for Megatron's torch path, and for the chain in `torch.compile` |
| memory | peak memory of a call without its inputs, with its result, divided by the size of the result |

- `--idle`: a call counts only if the cores did a short calculation at full speed immediately before and after it.
- Compiled code is compiled for exactly these shapes; compile time is not included.

```sh
make bench                                       # the CPU runs, into benchmarks/results/out
make gpu                                         # on a machine with a GPU: tests, compute-sanitizer, the runs
make gpu WHEELS=build/gpu-wheels                 # the same with other libraries, which make gpu-wheels downloads
make gpu-dry                                     # every step of make gpu on a CPU, with small sizes
python -m benchmarks report                      # the pages and the picture, from the committed runs
python -m benchmarks --help                      # other ops, dtypes, sweeps, threads
python -m benchmarks.settings --ops rms_norm     # on a GPU: other warps, rows, blocks of Triton kernels
python -m benchmarks.row_order                   # which products of torch depend on the number of rows
python -m benchmarks.idle                        # how fast the cores are while idle, for --idle on a shared machine
python -m benchmarks --allocator tuned --compare benchmarks/results/out/large-tuned-2.jsonl   # what got slower
```
"""

RUNS_HEAD = """# Measurements

Each number is the time of plain torch divided by the time of the call; columns are the number of elements of the main
tensor. Below 0.95 in bold. [How it is measured](measuring.md), and [what follows](performance.md). One op on your
machine, beside torch and a copy:

```sh
fusedops bench bias_gelu --dtype bf16 --elements 1048576
```
"""

Rows = report.Rows


def by_call(rows: Rows) -> dict[tuple[str, str, str, str], dict[int, dict[str, Any]]]:
    """Return the records of the public call by op, form, direction and dtype, and by number of elements."""
    calls: dict[tuple[str, str, str, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        if row["provider"] == "fusedops":
            key = (row["op"], row["form"], row["direction"], row["dtype"])
            calls.setdefault(key, {})[row["elements"]] = row
    return calls


def shown_forms() -> dict[str, str]:
    """Return the form of each measured op that the first table has."""
    forms: dict[str, str] = {}
    for op, _, form in CASES:
        forms.setdefault(op, form)
    return forms


def percent(row: Mapping[str, Any]) -> float:
    """Return the fewest bytes of a call divided by its time, in percent of the speed of a copy."""
    dtype = getattr(torch, row["dtype"])
    return 100 * limit(row["op"], row["form"], row["elements"], dtype)[row["direction"]] / row["copies"]


def first_table(rows: Rows) -> Iterator[str]:
    """Yield the table of the speed-up of each op at a few sizes, and of its speed against a copy."""
    calls = by_call(rows)
    yield f"| op | {' | '.join(map(report.size_name, COLUMNS))} | % of copy |"
    yield "|---" * (len(COLUMNS) + 2) + "|"
    for op, form in shown_forms().items():
        for direction in DIRECTIONS:
            call = calls[op, form, direction, DTYPE]
            ratios = [report.marked(call[size]["speedup"]) for size in COLUMNS]
            name = f"[{op}](ops.md#{op}), forward" if direction == DIRECTIONS[0] else "backward"
            yield f"| {name} | {' | '.join(ratios)} | {percent(call[COLUMNS[-1]]):.0f} |"


def slow_table(runs: Mapping[Path, Rows]) -> Iterator[str]:
    """Yield the section of the calls that are slower than torch somewhere in the runs."""
    below: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    count = 0
    for rows in runs.values():
        for (op, form, direction, _), call in by_call(rows).items():
            for row in call.values():
                count += 1
                if row["speedup"] < report.SLOW:
                    below.setdefault((op, form, direction), []).append(row)
    slow = sum(map(len, below.values()))
    yield SLOW_HEAD.replace("COUNT", str(slow)).replace("ALL", str(count)).replace("LIMIT", str(report.SLOW))
    yield "| call | lowest | elements of the ratios |"
    yield "|---|---|---|"
    for (op, form, direction), rows in below.items():
        sizes = sorted({row["elements"] for row in rows})
        span = report.size_name(sizes[0])
        if len(sizes) > 1:
            span += f" to {report.size_name(sizes[-1])}"
        dtypes = ", ".join(sorted({row["dtype"] for row in rows}))
        yield f"| {op}, {form}, {direction} | {min(row['speedup'] for row in rows):.2f} | {span}; {dtypes} |"


def machine(rows: Rows) -> str:
    """Return where a run was measured."""
    first = rows[0]
    commits = " and ".join(f"`{commit[:12]}`" for commit in dict.fromkeys(row["commit"] for row in rows))
    return (
        f"{first['machine']}, {first['capability']}, torch {first['torch']}, Python {first['python']}, commit {commits}"
    )


def packed_weights(rows: Rows) -> str:
    """Return the section of quantized_linear."""
    first, loads = rows[0], sorted(row["load"] for row in rows)
    lines: list[str] = []
    for weight in dict.fromkeys(tuple(row["weight"]) for row in rows):
        table = packed_linear.table([row for row in rows if tuple(row["weight"]) == weight])
        lines += ["A weight of {} x {}:".format(*weight), "", *table, ""]
    about = PACKED_TABLE
    for word, value in {
        "TURNS": first["turns"],
        "LOADS": f"{loads[0]} to {loads[-1]}",
        "OWN": first["threads"],
        "MACHINE": machine([{**row, "machine": row["device"]} for row in rows]) + f"; {link(PACKED)}",
    }.items():
        about = about.replace(word, str(value))
    return "\n".join([*lines, about])


def setting(rows: Rows) -> str:
    """Return the threads and the allocator of a run."""
    first = rows[0]
    return f"{first['threads']} thread{'s' * (first['threads'] != 1)}, {first['allocator']} allocator"


def link(path: Path) -> str:
    """Return a link to a result file, for a page of docs/."""
    return f"[{path.name}](../{path.relative_to(DOCS.parent).as_posix()})"


def size_tables(rows: Rows) -> Iterator[str]:
    """Yield one table per dtype, with one line per call: the speed-up over plain torch at each size."""
    sizes = sorted({row["elements"] for row in rows})
    calls = by_call(rows)
    for dtype in dict.fromkeys(key[3] for key in calls):
        yield from ("", f"{dtype}:", "")
        yield f"| call | {' | '.join(map(report.size_name, sizes))} |"
        yield "|---" * (len(sizes) + 1) + "|"
        for (op, form, direction, each), call in calls.items():
            if each == dtype:
                cells = [report.marked(call[size]["speedup"]) if size in call else "" for size in sizes]
                yield f"| {op}, {form}, {direction} | {' | '.join(cells)} |"


def performance(runs: Mapping[Path, Rows]) -> str:
    """Return the page with the results."""
    rows = runs[SHOWN]
    *smaller, largest = map(report.size_name, COLUMNS)
    about = RESULTS_TABLE.replace("COLUMNS", f"{', '.join(smaller)} and {largest}").replace("LARGEST", largest)
    about = about.replace("MACHINE", f"{DTYPE}, {setting(rows)}, {machine(rows)}; {link(SHOWN)}")
    alternative = f"Bars: the speed-up of each op over plain torch, {DTYPE}, forward and backward"
    lines = [RESULTS_HEAD, *first_table(rows), "", about, f"![{alternative}](_static/{picture.FILE.name})"]
    tail = RESULTS_TAIL.replace("PACKED\n", packed_weights(report.read(PACKED)) + "\n")
    return "\n".join([*lines, *slow_table(runs)]) + "\n" + tail


def measurements(runs: Mapping[Path, Rows]) -> str:
    """Return the page with every run."""
    lines = [RUNS_HEAD]
    for path, rows in runs.items():
        lines += [f"## {setting(rows).capitalize()}", "", f"{machine(rows)}; {link(path)}"]
        lines += [*size_tables(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def speedups(rows: Rows) -> dict[str, tuple[float, float]]:
    """Return the speed-up of each op in the first table at the largest size: forward, backward."""
    calls, largest = by_call(rows), COLUMNS[-1]
    forms = shown_forms().items()
    each = {
        op: [calls[op, form, direction, DTYPE][largest]["speedup"] for direction in DIRECTIONS] for op, form in forms
    }
    return {op: (forward, backward) for op, (forward, backward) in each.items()}


def files() -> dict[Path, str]:
    """Return the text of each file of docs/ that is made of the committed runs."""
    runs = {path: report.read(path) for path in sorted(SIZES.glob("*.jsonl"))}
    rows = runs[SHOWN]
    title = f"{DTYPE}, {report.size_name(COLUMNS[-1])} elements, {setting(rows)}, {rows[0]['machine']}"
    return {
        DOCS / "performance.md": performance(runs),
        DOCS / "measuring.md": MEASURING,
        DOCS / "measurements.md": measurements(runs),
        DOCS / "gpu.md": gpu_page.page(),
        picture.FILE: picture.drawn(speedups(rows), title),
    }
