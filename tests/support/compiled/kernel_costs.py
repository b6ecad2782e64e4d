"""Compiles kernels for sm_90 and prints their cost by the model of ``issue_slots.py``.

Not a test: ``test_triton_costs.py`` runs it in another process, for the reason in ``triton_aot.py``. As a command it
writes the table that the test compares with:

    python tests/support/compiled/kernel_costs.py --write
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from cost_cases import CASES
from issue_slots import WARPS, Cost, Instruction, cost, listings
from triton_aot import TARGETS, Launch, launch_of
from waits import CHIPS, Program, nanoseconds, of_products, share

ROOT = pathlib.Path(__file__).parents[3]
TABLE = ROOT / "benchmarks" / "results" / "kernel_costs.json"


#: The sums and maxima over a row that a program waits for at each trip, by op; the others wait for none.
REDUCTIONS = {
    "forward": 2, "backward": 1, "rms_norm": 1, "add_rms_norm": 1, "layer_norm": 2, "add_layer_norm": 2,
    "gated_rms_norm": 1,
}  # fmt: skip
#: The same once a program: the maximum and the sum of a long row.
REDUCTIONS_AT_THE_END = {"cross_entropy": 2, "classes": 2, "linear_log_probs": 3}


#: The chips whose settings a target has.
MODELLED = {"sm_90": ("H100", "H200"), "sm_100": ("B200",)}


class Modelled(NamedTuple):
    """The cost of a kernel and its speed by the model of ``waits.py``."""

    cost: Cost
    program: Program
    programs: float


def modelled(cases: Sequence[dict[str, Any]]) -> list[Modelled]:
    """Return the cost of the kernel of each case of ``cost_cases.py``, for its target, sm_90 if it names none."""
    launches, kernels = [], []
    for case in cases:
        target = case.get("target", "sm_90")
        launch = launch_of({**case, "target": target})
        launches.append(launch)
        kernels.append(triton.compile(launch.source(), target=TARGETS[target], options=launch.options))
    listed = listings([kernel.asm["cubin"] for kernel in kernels])
    return [_modelled(*each) for each in zip(cases, launches, kernels, listed, strict=True)]


def _modelled(case: dict[str, Any], launch: Launch, kernel: Any, listing: list[Instruction]) -> Modelled:
    programs = math.prod(launch.grid) * case.get("busy", 1)
    nbytes = (case["bytes"] * math.prod(case["shape"]) if "bytes" in case else _moved(case, launch)) / programs
    warps, shared = launch.options["num_warps"], kernel.metadata.shared
    trips = case.get("trips") or _steps(launch, case["shape"][-1])
    result = cost(kernel.asm["cubin"], listing, nbytes, warps, shared, trips)
    steps = (trips if isinstance(trips, int) else max(trips[0], 1)) if result.loops else 1
    name, _, direction = case["op"].partition(" ")
    each = 1 if direction and name in REDUCTIONS else REDUCTIONS.get(name, 0)
    program = Program(
        result.instructions, warps, round(result.threads / 100 * WARPS / warps), nbytes, steps,
        each * steps + (0 if direction else REDUCTIONS_AT_THE_END.get(name, 0)),
        _ahead(launch, result) if result.products else int(
            launch.arguments.get("AHEAD", case["op"] == "gelu_backward")
        ),
        result.products, result.loaded,
    )  # fmt: skip
    return Modelled(result, program, programs)


def _moved(case: dict[str, Any], launch: Launch) -> int:
    """Return the bytes of the tensors of a launch."""
    return sum(
        value.numel() * value.element_size()
        for name, value in launch.arguments.items()
        if isinstance(value, torch.Tensor) and name not in case.get("unread", ())
    )


def _ahead(launch: Launch, result: Cost) -> int:
    """Return the trips that a loop with products reads ahead: Triton's default is 3 stages."""
    return launch.arguments.get("STAGES", launch.options.get("num_stages", 3)) - 1 if result.copied else 0


def _steps(launch: Launch, columns: int) -> int:
    """Return the trips of the loops of a kernel."""
    for name in ("STEPS", "steps"):
        if name in launch.arguments:
            return launch.arguments[name]
    if "WORDS" in launch.arguments:  # of two bytes, of weights of some bits
        return -(-columns * launch.arguments["BITS"] // (16 * launch.arguments["WORDS"]))
    block = next((launch.arguments[name] for name in ("BLOCK_K", "BLOCK") if name in launch.arguments), columns)
    return -(-columns // block)


def facts_of(cases: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return the row of each case in the table."""
    return [_row(case, *each) for case, each in zip(cases, modelled(cases), strict=True)]


def _row(case: dict[str, Any], result: Cost, program: Program, programs: float) -> dict[str, float]:
    row: dict[str, float] = {
        "issue": round(result.issue, 1),
        "instructions": round(result.instructions),
        "registers": result.registers,
        "spilled": result.spilled,
        "threads": round(result.threads, 1),
        **{name: round(share(program, CHIPS[name])) for name in MODELLED[case.get("target", "sm_90")]},
    }
    if "launch" in case:  # one of several of a call, whose times are added up
        chip = CHIPS["H200"]
        row["us"] = round(programs / chip.processors * nanoseconds(program, chip) / 1000.0, 1)
    if result.products:
        row["products"] = round(100.0 * of_products(program, CHIPS["H200"]), 1)
    return row


def write() -> None:
    """Write the table, a line for each kernel."""
    table = zip(CASES, facts_of([*CASES.values()]), strict=True)
    rows = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in table]
    head = f'{{"triton": "{triton.__version__}", "target": "sm_90", "kernels": {{\n'
    TABLE.write_text(head + ",\n".join(rows) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] != ["--write"]:
        sys.exit("got no --write, expected it; to fix: python tests/support/compiled/kernel_costs.py --write")
    write()
