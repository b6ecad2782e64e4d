"""The check "rows" of many rows on the CPU, and of a few calls in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import fusedops
from fusedops import testing
from fusedops.testing import _check_rows


def _checks(backend: str, elements: int) -> list[testing.Check]:
    (info,) = [info for info in fusedops.backends() if info.name == backend]
    if info.state == "unavailable":
        return []
    return [check for check in testing.checks(backend, elements=elements) if check.name == "rows"]


def _first_in_float32(check: testing.Check) -> str:
    """Run the first kind of rows in float32, and return its case."""
    before = torch.get_num_threads()
    try:
        trial = next(trial for trial in check.trials() if trial.case.endswith("float32"))
        trial.run()
        return trial.case
    finally:
        torch.set_num_threads(before)


# of ops whose rows are long: so that there are 4,096, and 1,024 of linear_attention, one after another
MORE = {
    "attention": 2**18,
    "causal_conv1d": 2**18,
    "select_keys": 2**18,
    "sparse_attention": 2**18,
    "varlen_attention": 2**19,
    "linear_attention": 2**19,
}
OF_MANY = [
    pytest.param(each, id=f"{name}-{each.id}")
    for elements in sorted({2**17, *MORE.values()})
    for name in ("cpu", "eager")
    for each in _checks(name, elements)
    if MORE.get(each.id.partition("/")[0], 2**17) == elements
]


@pytest.mark.slow
@pytest.mark.parametrize("check", OF_MANY)
def test_of_up_to_4096_rows(check: testing.Check) -> None:
    rows = int(_first_in_float32(check).partition(" ")[0])
    large = ("linear_attention/", "group_norm/", "modulated_norm/", "paged_attention/", "store_kv/")  # a row
    assert rows >= (1024 if check.id.startswith(large) else 4096)


@pytest.mark.slow
@pytest.mark.parametrize("check", [pytest.param(each, id=each.id) for each in _checks("triton", 2**9)])
def test_in_the_interpreter(check: testing.Check) -> None:
    _first_in_float32(check)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(each, id=each.id)
        for elements in (2**17, 2**18)
        for each in _checks("triton", elements)
        # a sequence of pages takes tens of milliseconds
        if each.id.startswith("causal_conv1d") == (elements == 2**18) and not each.id.startswith("paged_attention/")
    ],
)
def test_of_up_to_4096_rows_in_the_interpreter(check: testing.Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some numbers of rows, and one thread: the interpreter runs one program after another."""
    monkeypatch.setattr(_check_rows, "_SMALL", 2**40)
    assert _first_in_float32(check).startswith("4096 ")
