"""The page of docs/ with the runs of ``make gpu`` that are committed: benchmarks/results/GPU, one folder each.

A folder has what ``--out`` was given, without the logs, and maybe notes.md: what a reader of the outcomes must know.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import report

HEAD = """# On an NVIDIA GPU

What `make gpu` found on each GPU that it ran on: the tests, the kernels under compute-sanitizer, and the times. Every
number is of a file in `benchmarks/results/`. [How it is measured](measuring.md).

In the table of the headline calls, the calls where the time of a model goes:

- **% of copy**: the fewest bytes that the op must move divided by its time, in percent of the speed of `y.copy_(x)`,
  forward and backward. A reading alone can be faster than a copy.
- **TFLOP/s** of forward and backward, where the time is that of matrix products.
- **x NAME**: the time that NAME takes for forward and backward divided by that of the call; below 1, NAME is faster.
  *torch* is the chain of calls that a model would use; *torch sdpa* its fused attention; *transformers* its experts by
  `grouped_mm`. A place is empty where NAME does not take the call or is not installed.

To see which kernel takes a call:

```sh
fusedops explain attention --q 2,32,4096,128:bf16@cuda --k 2,32,4096,128:bf16@cuda --v 2,32,4096,128:bf16@cuda
```
"""


def page(results: Path = report.RESULTS) -> str:
    """Return the page."""
    lines = [HEAD]
    for path in sorted(results.glob("*/steps.jsonl")):
        steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        lines += [f"## {path.parent.name.replace('-', ' ').upper()}: the steps", "", *_steps(steps), ""]
        notes = path.with_name("notes.md")
        lines += [notes.read_text(encoding="utf-8")] if notes.exists() else []
        lines += [f"[{path.name}]({report.link(path)})", ""]
        lines += report.sections(path.parent, pictures=False)
    return "\n".join(lines).rstrip() + "\n"


def _steps(steps: list[dict[str, Any]]) -> list[str]:
    """Return the table of the steps that ran. Those that compile for others are left out."""
    lines = ["| step | outcome | seconds | |", "|---|---|---|---|"]
    for step in steps:
        if not step["step"].startswith("compile "):
            about = "; ".join(filter(None, [step["detail"], *step["counts"]]))
            lines.append(f"| {step['step']} | {step['status']} | {step['seconds']:.0f} | {about} |")
    return lines
