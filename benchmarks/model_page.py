"""docs/triton-model.md: the Triton kernels by the models of their instructions, products and waits."""

from __future__ import annotations

import json
from typing import NamedTuple

from benchmarks import report

COSTS = """# The Triton kernels by a model

**A model, not a measurement:** [On an NVIDIA GPU](gpu.md) has those of an H200. The kernels are compiled for sm_90, and
their instructions are counted. To see which kernel takes a call:

```sh
fusedops explain rms_norm --x 8,2048,4096:bf16@cuda
```

| column | meaning |
|---|---|
| issue | time that the instructions take to issue, in percent of the time that the fewest bytes take at copy speed |
| products | time that the tensor cores take at their peak, in percent of the same time |
| instructions | that a warp issues |
| registers, spilled | of a thread; bytes of a thread that are in memory instead |
| threads | that a multiprocessor holds at a time, in percent |
| H100, H200, B200 | estimated speed in percent of a copy's, at most 97; where products take longer, of the peak |
| measured | the speed on an H200, of the headline calls |

`tests/support/compiled/issue_slots.py` counts instructions. From them `tests/support/compiled/waits.py` estimates the
speed: the programs of a multiprocessor wait for memory and for their reductions, then issue, in turns, and take turns
at the tensor cores. Its constants were fitted to published points of an H100. A test compares each kernel with this
table.

ERRORS

It does not see what spilled registers cost: the backward of layer_norm at 16384 columns, whose threads spilled 136
bytes when an H200 timed it, was estimated at 80 and measured at 46. Nor why the backward of merge_attention is slower,
93 and 75. And of long rows it was off by more before they were held as pairs: softmax of 16384 columns backward was
estimated at 80 and measured at 99, forward of 65536 columns at 86 and 78.

Instructions, not memory, limit top_k_routing and causal_conv1d. With channels next to each other in memory, an H200
reached 63 % of a copy forward and 17 % backward with causal_conv1d; the model has 67 and 25. attention has no kernel of
Triton.

**Products.** The compiled instructions of the tensor cores are counted: 2048 products of 16 bits in a clock of a
multiprocessor, half as many of TF32. That is NVIDIA's 989 TFLOP/s of 132 multiprocessors at 1.83 GHz. The model has
them at 1.98 GHz, of which an H200 reached 68 % with torch's own products, in linear_cross_entropy. On an H200, products
take longer than the bytes where their column is above 100, on an H100 above 144.

CALLS

- experts: the launches of Triton, all experts with as many rows, without the three small launches of the route. What
  was timed is bfloat16, whose products are torch's. The rows here are of float16, whose products are Triton's: no GPU
  has timed these, nor grouped_matmul.
- linear_attention: **the model is not usable for its times.** It issues an instruction a clock, and has neither the
  latency of instructions, of barriers and of products, nor what spills cost. One or two programs with 8 warps in all
  fill no wait. No constant was changed for it. The timed kernels (commit 063b26e) are not those
  of today: they had 32 columns of a state in a program, 8 warps, and spilled up to 488 bytes.
- `linear_attention chunks` inverts a matrix by products of float32, each in three of TF32. With 8 warps, Triton gave
  most of them to both groups of four warps, which computed the same: a level of the inverse had 88 instructions for
  products in each warp, where 48 would do. With 4 warps the model has 0.47 ms for 1.02, and 0.30 since
  the blocks of 16 positions are inverted by plain instructions, row after row, which takes no product. `backward
  chunks` had, for each 16 rows of a state, the gradients of all products of a chunk's positions. `backward scores` has
  these once, and programs have 32 rows: together 1.3 ms and, without beta, 0.9 for 3.1 and 1.8. Not timed.

A B200 has settings of its own where its faster memory needs more rows on their way: rows of softmax above 8192 columns,
backward 4096, are held as pairs; a thread has more elements of a norm's row; the backward of norms at 4096 columns
reads two tiles ahead. No B200 has run them.

**The backward of norms.** What the model leaves below a copy's speed, and why:

- layer_norm of 8192 columns on an H200, 82: measured, it was 86. With 16 or 32 elements a thread and 128 or 255
  registers the model has 86 and 88. It had such settings in the wrong order before, so the one that an H200 has timed
  stays.
- layer_norm on a B200 at 8192 columns, 75: a row has 66 KB of sums for the gradients of weight and bias, 66 KB of
  numbers in float32, 16 KB of weight, and 33 KB of the next row, of 262 KB of registers: one program fits on a
  multiprocessor. At copy speed it has 1.01 us for a row. It waits 0.19 for the sum over its warps, receives for 0.40,
  and issues for 0.50: nothing fills these waits. rms_norm has half of these sums: with the weight read for each row,
  which comes from a cache, two programs fit without a next row, and 75 became 83. layer_norm would have 79 so, and
  spills 88 bytes of a thread.
- A B200 at 16384 columns, 73 and 62: the same takes 230 KB without the next row. So s or grad and the weight are read
  again for each row after its sum, from a cache, and for rms_norm the next row is on its way. layer_norm has twice the
  sums: a read takes 0.7 us of the 2.0 that a row has. Triton's `num_stages` would hold the next row in shared memory:
  on an H200 it was slower than no reading ahead.
- On an H100 and an H200 too, at 16384 columns, s or grad and the weight are read again: up to 176 bytes of a thread
  spilled before, and the model, which does not see spills, has 88 and 80 before, 90 and 79 with it. No GPU has run
  these kernels: 46 in the table is of the kernel before.

**What still spills.** More than 16 bytes of a thread:

- the backward of add_layer_norm with 4096 columns of float32, 40: with as many registers as it takes an H200 took 328
  us for 271.
- the backward of norms of 16 bits with 8193 to 16384 columns and a weight of float32: layer_norm and add_layer_norm 80
  to 144, on sm_80 up to 224, add_rms_norm 24, on sm_80 up to 112, rms_norm there up to 72. Without such a weight 16,
  with Triton 3.6 up to 32.
- the same of an even length that is no multiple of 8, which has narrow accesses: 56 to 152 on sm_90. Read twice they
  would spill nothing, but an H200 took longer for that (45 and 38 % of a copy, layer_norm of 16384 columns). Of an odd
  length they would spill up to 1880, and are read twice. No GPU has timed either.

**Long rows of softmax.** Rows of two-byte elements are read once up to 65536 columns, backward up to 32768: a
multiprocessor has 256 KB of registers, and a row is half of them. With a mask or `causal`, or where a tensor is not
contiguous, this ends at 32768 and 16384, as in float32. Longer rows are read twice. Where the rows in flight fit in the
L2 cache (50 MB on an H100), the second read comes from there: 32768 columns of float32 backward, or 65536 of a masked
bfloat16, are 256 and 128 KB for each of 4 programs of 132 multiprocessors, 138 and 69 MB. So it comes from memory in
part: 60 to 100 % of the speed that one read would have backward, 67 to 100 % forward. Reading them once needs
several multiprocessors for a row, whose sums Triton does not exchange.
"""


#: The kernels of the headline calls, by op and case: forward, and with " backward" behind the first part its backward.
HEADLINE_KERNELS = {
    ("rms_norm", "4096"): "rms_norm{} 4096", ("rms_norm", "8192"): "rms_norm{} 8192",
    ("add_rms_norm", "4096"): "add_rms_norm{} 4096", ("layer_norm", "4096"): "layer_norm{} 4096",
    ("scaled_masked_softmax", "4096"): "softmax{} plain 4096",
    ("scaled_masked_softmax", "causal 4096"): "softmax{} causal 4096",
    ("cross_entropy", "32000"): "cross_entropy{} 32000", ("cross_entropy", "128256"): "cross_entropy{}",
    ("layer_norm", "16384"): "layer_norm{} 16384", ("scaled_masked_softmax", "32768"): "softmax{} plain 32768",
    ("gated_rms_norm", "Qwen3-Next"): "gated_rms_norm{} 128",
    ("gated_rms_norm", "Mamba-2"): "gated_rms_norm{} gate first 4096",
    ("merge_attention", "heads of 128"): "merge_attention{}",
    ("causal_conv1d", "Qwen3-Next"): "causal_conv1d{}",
    ("swiglu", "packed"): "swiglu packed{}", ("rotary_embedding", "half"): "rotary_embedding{}",
}  # fmt: skip


def measured_kernels() -> dict[str, float]:
    """Return the measured speed of each kernel that a headline call has, on an H200, in percent of a copy's."""
    found: dict[str, float] = {}
    for row in report.read(report.RESULTS / "nvidia-h200" / "headline.jsonl"):
        kernel = HEADLINE_KERNELS.get((row["op"], row["case"]))
        if kernel is not None and row["provider"] == "fusedops.triton":
            found[kernel.format(" backward" * (row["mode"] == "backward")) + " bfloat16"] = row["pct_of_copy"]
    return found


#: Milliseconds of linear_attention on an H200, forward, and with its backward: of nvidia-h200/notes.md. Before each
#: what the model has for the kernels that were timed, those of commit 063b26e.
LINEAR_ATTENTION = {"": ((1.70, 3.5), (6.23, 12.5)), " without beta": ((0.43, 1.1), (2.90, 5.4))}


class Call(NamedTuple):
    """A call of several launches, in milliseconds."""

    name: str
    model: float  # of the kernels of today
    of_timed: float  # by the model, of those that were timed
    measured: float


def calls_of(kernels: dict[str, dict[str, float]]) -> list[Call]:
    """Return the calls of several launches that an H200 has timed."""
    found: list[Call] = []
    for row in report.read(report.RESULTS / "nvidia-h200" / "experts.jsonl"):
        if row["provider"] == "fusedops.triton":
            launches = _sum_of(kernels, f"experts {row['case']} ", "float16", row["mode"] == "backward")
            found.append(Call(f"experts, {row['case']}, {row['mode']}", launches, launches, row["ms_p50"]))
    for name, (forward, both) in LINEAR_ATTENTION.items():
        launches = _sum_of(kernels, "linear_attention ", f"{name} bfloat16", False)
        found.append(Call(f"linear_attention{name}, forward", launches, *forward))
        # the backward has the parts of chunks again, and the heads of q and of k
        for launch in ("chunks", "backward heads"):
            launches += kernels[f"linear_attention {launch}{name} bfloat16"]["us"] / 1000.0
        launches += _sum_of(kernels, "linear_attention ", f"{name} bfloat16", True)
        found.append(Call(f"linear_attention{name}, forward and backward", launches, *both))
    return found


def _sum_of(kernels: dict[str, dict[str, float]], start: str, end: str, backward: bool) -> float:
    """Return the milliseconds of the launches of a call."""
    names = [name for name in kernels if name.startswith(start) and name.endswith(end)]
    if "without" not in end:
        names = [name for name in names if "without" not in name]
    return sum(kernels[name]["us"] for name in names if (" backward " in name) == backward) / 1000.0


def _table_of_calls(kernels: dict[str, dict[str, float]]) -> str:
    calls = calls_of(kernels)
    lines = ["| call | model, ms | model, as timed, ms | measured, ms | measured / model |", "|---|---|---|---|---|"]
    lines += [
        f"| {call.name} | {call.model:.2f} | {call.of_timed:.2f} | {call.measured:.2f} "
        f"| {call.measured / call.of_timed:.1f} |"
        for call in calls
    ]
    factors = {
        op: [call.measured / call.of_timed for call in calls if call.name.startswith(op)]
        for op in ("experts", "linear_attention")
    }
    (least, most), (least_linear, most_linear) = ((min(each), max(each)) for each in factors.values())
    text = (
        "Calls of several launches, the sum of their times by the model and what an H200 took. The model is too fast: "
        f"for\nexperts by {least:.1f} to {most:.1f} times, for linear_attention by {least_linear:.1f} to "
        f"{most_linear:.1f}."
    )
    return "\n".join([text, "", *lines])


def page() -> str:
    """Return docs/triton-model.md: the kernels by the models of their instructions, products and waits."""
    stored = json.loads((report.RESULTS / "kernel_costs.json").read_text(encoding="utf-8"))
    kernels, measured = stored["kernels"], measured_kernels()
    both = [(kernels[name]["H200"], min(speed, 97.0)) for name, speed in measured.items() if name in kernels]
    errors = [estimate - speed for estimate, speed in both]
    text = (
        f"Of the {len(errors)} kernels that were measured on an H200 (97 % stands for more), it is off by "
        f"{sum(map(abs, errors)) / len(errors):.0f}\non average, by {min(errors):+.0f} to {max(errors):+.0f}."
    )
    lines = [COSTS.replace("ERRORS", text).replace("CALLS", _table_of_calls(kernels))]
    lines += [f"Triton {stored['triton']}; [kernel_costs.json](../benchmarks/results/kernel_costs.json)", ""]
    counted, chips = ("instructions", "registers", "spilled", "threads"), ("H100", "H200", "B200")
    head = ("kernel", "issue, %", "products, %", *counted[:-1], "threads, %", *chips, "measured")
    lines.append(f"| {' | '.join(head)} |")
    lines.append("|---" * len(head) + "|")
    for name, row in kernels.items():
        cells = [f"{row['issue']:.0f}", f"{row['products']:.0f}" if "products" in row else ""]
        cells += [f"{row[column]:.0f}" for column in counted] + [str(row.get(chip, "")) for chip in chips]
        lines.append(f"| {name} | " + " | ".join([*cells, f"{measured[name]:.0f}" if name in measured else ""]) + " |")
    return "\n".join(lines) + "\n"
