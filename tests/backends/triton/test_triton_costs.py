"""The Triton kernels by models of their instructions and waits: one that becomes more expensive fails.

Nothing is measured: see ``issue_slots.py`` and ``waits.py``. After a change of kernels, write the table with

    python tests/support/compiled/kernel_costs.py --write
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from compiled_facts import compiled_facts
from cost_cases import CASES, LEAST
from fork_server import ForkServer
from product_cases import EXPERTS
from repository import ROOT

pytestmark = pytest.mark.slow
triton = pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

TABLE: dict[str, Any] = json.loads((ROOT / "benchmarks/results/kernel_costs.json").read_text(encoding="utf-8"))
WRITE = "write the table: python tests/support/compiled/kernel_costs.py --write"


@pytest.fixture(scope="module")
def costs(compilations: ForkServer) -> dict[str, dict[str, float]]:
    """The cost of each case, by its name."""
    return dict(zip(CASES, compiled_facts([*CASES.values()], compilations, program="kernel_costs"), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_costs_what_the_table_has(name: str, costs: dict[str, dict[str, float]]) -> None:
    if triton.__version__ != TABLE["triton"]:
        pytest.skip(f"got Triton {triton.__version__}, expected {TABLE['triton']}, which compiled the table")
    got, stored = costs[name], TABLE["kernels"].get(name, {})
    text = f"{name}: got {got}, expected {stored}; to fix: make the kernel as cheap as it was, or {WRITE}"
    assert stored, text
    assert got["issue"] == pytest.approx(stored["issue"], abs=0.5), text
    assert got["registers"] <= stored["registers"] + 2, text
    assert got["spilled"] <= stored["spilled"], text
    for chip in {"H100", "H200", "B200"} & stored.keys():
        assert got[chip] >= stored[chip] - 2, text


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "most" in case])
def test_a_kernel_leaves_the_memory_as_the_limit(name: str, costs: dict[str, dict[str, float]]) -> None:
    case, got = CASES[name], costs[name]
    assert got["spilled"] <= case.get("spilled", 0)
    assert got["issue"] <= case["most"], f"{name}: got {got}, expected an issue of at most {case['most']} %"


@pytest.mark.parametrize("name", EXPERTS)
def test_the_tensor_cores_have_the_products_of_the_experts(name: str, costs: dict[str, dict[str, float]]) -> None:
    (tokens, experts, choices, width, inner), _ = EXPERTS[name]
    rows = tokens * choices
    up = 2 * rows * width * 2 * inner, 2 * (rows * (width + 2 * inner) + experts * width * 2 * inner)
    down = 2 * rows * inner * width, 2 * (rows * (inner + width) + experts * inner * width)
    # 2 * 2048 in a clock of each multiprocessor of an H200; bytes as ``waits.py`` has a copy's speed
    for launch, (operations, nbytes) in (("up", up), ("down", down), ("backward down", down), ("backward up", up)):
        expected = operations / (2 * 2048 * 132 * 1.98) / (nbytes / 4310)
        assert costs[f"experts {name} {launch} float16"]["products"] == pytest.approx(100 * expected, rel=0.01)


@pytest.mark.parametrize(("name", "chip"), LEAST)
def test_a_kernel_is_estimated_to_be_fast(name: str, chip: str, costs: dict[str, dict[str, float]]) -> None:
    assert costs[name][chip] >= LEAST[name, chip]


def test_the_table_has_no_other_kernels() -> None:
    assert list(TABLE["kernels"]) == list(CASES), f"to fix: {WRITE}"
