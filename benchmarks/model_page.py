"""docs/triton-model.md: the Triton kernels by the models of their instructions and of their waits."""

from __future__ import annotations

import json

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
| instructions | that a warp issues |
| registers, spilled | of a thread; bytes of a thread that are in memory instead |
| threads | that a multiprocessor holds at a time, in percent |
| H100, H200, B200 | estimated speed in percent of the speed of a copy, at most 97 |
| measured | the speed on an H200, of the headline calls |

`tests/support/compiled/issue_slots.py` counts instructions. From them `tests/support/compiled/waits.py` estimates the
speed: the programs of a multiprocessor wait for memory and for their reductions, then issue, in turns. Its constants
were fitted to published points of an H100. A test compares each kernel with this table.

ERRORS

It does not see what spilled registers cost: the backward of layer_norm at 16384 columns, whose threads spill 136 bytes,
is estimated at 80 and measured at 46. Nor why the backward of merge_attention is slower, 93 and 75. And of long rows
it was off by more before they were held as pairs: softmax of 16384 columns backward was estimated at 80 and measured at
99, forward of 65536 columns at 86 and 78.

Instructions, not memory, limit top_k_routing. The taps of causal_conv1d and the products of attention, linear_attention
and experts have no row: [measured](gpu.md).

A B200 has settings of its own where its faster memory needs more rows on their way: rows of softmax above 8192 columns,
backward 4096, are held as pairs; a thread has more elements of a norm's row; the backward of norms at 4096 columns
reads two tiles ahead. No B200 has run them.

**The backward of norms.** What the model leaves below a copy's speed, and why:

- layer_norm of 8192 columns on an H200, 82: measured, it was 86. With 16 or 32 elements a thread and 128 or 255
  registers the model has 86 and 88. It had such settings in the wrong order before, so the one that an H200 has timed
  stays.
- A B200 at 8192 columns, 75: a row has 33 KB of sums for the gradient of weight, 66 KB of numbers in float32, 16 KB of
  weight, and 33 KB of the next row, of 262 KB of registers: one program fits on a multiprocessor. At copy speed it has
  1.01 us for a row. It waits 0.19 for the sum over its warps, receives for 0.40, and issues for 0.40: nothing fills
  these waits.
- A B200 at 16384 columns, 71 and 61: the same takes 230 KB without the next row, so nothing is read ahead, and a read
  takes 0.7 us of the 2.0 that a row has. Triton's `num_stages` would hold the next row in shared memory: on an H200 it
  was slower than no reading ahead.

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


def page() -> str:
    """Return docs/triton-model.md: the kernels by the models of their instructions and of their waits."""
    stored = json.loads((report.RESULTS / "kernel_costs.json").read_text(encoding="utf-8"))
    kernels, measured = stored["kernels"], measured_kernels()
    both = [(kernels[name]["H200"], min(speed, 97.0)) for name, speed in measured.items() if name in kernels]
    errors = [estimate - speed for estimate, speed in both]
    text = (
        f"Of the {len(errors)} kernels that were measured on an H200 (97 % stands for more), it is off by "
        f"{sum(map(abs, errors)) / len(errors):.0f}\non average, by {min(errors):+.0f} to {max(errors):+.0f}."
    )
    lines = [COSTS.replace("ERRORS", text)]
    lines += [f"Triton {stored['triton']}; [kernel_costs.json](../benchmarks/results/kernel_costs.json)", ""]
    counted, chips = ("issue", "instructions", "registers", "spilled", "threads"), ("H100", "H200", "B200")
    head = ("kernel", "issue, %", "instructions", "registers", "spilled", "threads, %", *chips, "measured")
    lines.append(f"| {' | '.join(head)} |")
    lines.append("|---" * len(head) + "|")
    for name, row in kernels.items():
        cells = [f"{row[column]:.0f}" for column in counted] + [str(row.get(chip, "")) for chip in chips]
        lines.append(f"| {name} | " + " | ".join([*cells, f"{measured[name]:.0f}" if name in measured else ""]) + " |")
    return "\n".join(lines) + "\n"
