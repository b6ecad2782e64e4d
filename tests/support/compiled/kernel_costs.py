"""Compiles kernels for sm_90 and prints their cost by the model of ``issue_slots.py``.

Not a test: ``test_triton_costs.py`` runs it as a program, for the reason in ``triton_aot.py``. As a command it writes
the table that the test compares with:

    python tests/support/compiled/kernel_costs.py --write
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from typing import Any

import torch
import triton
from cost_cases import CASES
from issue_slots import Cost, cost
from triton_aot import TARGETS, Launch, launch_of

ROOT = pathlib.Path(__file__).parents[3]
TABLE = ROOT / "benchmarks" / "results" / "kernel_costs.json"


def cost_of(case: dict[str, Any]) -> Cost:
    """Return the cost of the kernel of a case of ``cost_cases.py``."""
    launch = launch_of({**case, "target": "sm_90"})
    compiled = triton.compile(launch.source(), target=TARGETS["sm_90"], options=launch.options)
    nbytes = case["bytes"] * math.prod(case["shape"]) / math.prod(launch.grid)
    warps, shared = launch.options["num_warps"], compiled.metadata.shared
    return cost(compiled.asm["cubin"], nbytes, warps, shared, _steps(launch, case["shape"][-1]))


def _steps(launch: Launch, columns: int) -> int:
    """Return the trips of the loops of a kernel."""
    for name in ("STEPS", "steps"):
        if name in launch.arguments:
            return launch.arguments[name]
    block = next((launch.arguments[name] for name in ("BLOCK_K", "BLOCK") if name in launch.arguments), columns)
    return -(-columns // block)


def row_of(case: dict[str, Any]) -> dict[str, float]:
    """Return the row of the table."""
    result = cost_of(case)
    return {
        "issue": round(result.issue, 1),
        "instructions": round(result.instructions),
        "registers": result.registers,
        "spilled": result.spilled,
        "threads": round(result.threads, 1),
    }


def write() -> None:
    """Write the table, a line for each kernel."""
    rows = [f"  {json.dumps(name)}: {json.dumps(row_of(case))}" for name, case in CASES.items()]
    head = f'{{"triton": "{triton.__version__}", "target": "sm_90", "kernels": {{\n'
    TABLE.write_text(head + ",\n".join(rows) + "\n}}\n", encoding="utf-8")


def main() -> None:
    """Write the table with --write. Otherwise read cases, a JSON list, and print a line of JSON for each."""
    torch.set_num_threads(1)
    if "--write" in sys.argv:
        write()
        return
    for case in json.load(sys.stdin):
        print(json.dumps({"facts": row_of(case)}), flush=True)


if __name__ == "__main__":
    main()
