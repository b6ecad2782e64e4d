"""The check "rows" of many rows on the CPU, and of a few calls in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops import testing


def _checks(backend: str, elements: int) -> list[testing.Check]:
    (info,) = [info for info in fusedops.backends() if info.name == backend]
    if info.state == "unavailable":
        return []
    return [check for check in testing.checks(backend, elements=elements) if check.name == "rows"]


def _first_in_float32(check: testing.Check) -> None:
    """Run the first kind of rows in float32."""
    before = torch.get_num_threads()
    try:
        next(trial for trial in check.trials() if trial.case.endswith("float32")).run()
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [pytest.param(each, id=f"{name}-{each.id}") for name in ("cpu", "eager") for each in _checks(name, 2**17)]
)
def test_of_up_to_4096_rows(check: testing.Check) -> None:
    _first_in_float32(check)


@pytest.mark.slow
@pytest.mark.parametrize("check", [pytest.param(each, id=each.id) for each in _checks("triton", 2**9)])
def test_in_the_interpreter(check: testing.Check) -> None:
    _first_in_float32(check)
