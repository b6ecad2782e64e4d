"""verify gives no false alarm in random right calls. ``support/makers/right_calls.py`` runs more of them by hand."""

from __future__ import annotations

import importlib.util

import pytest
from ascend import ascend
from right_calls import false_alarms

import fusedops

CALLS = 100


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in triton's interpreter
def test_no_right_call_is_reported() -> None:
    backends = ["eager", "npu"]
    if next(info for info in fusedops.backends() if info.name == "cpu").state == "ready":
        backends.append("cpu")
    if importlib.util.find_spec("triton"):
        backends.append("triton")
    with ascend():
        alarms, served = false_alarms(range(CALLS), tuple(backends))
    assert not alarms, "\n".join(alarms)
    assert set(backends) <= set(served), "each backend serves some"
