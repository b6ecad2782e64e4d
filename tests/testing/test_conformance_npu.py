"""The conformance kit on npu, on the stand-in for Ascend."""

from __future__ import annotations

from conformance import every_check, passes

from fusedops import testing


@every_check("npu")
def test_the_kit_passes(check: testing.Check) -> None:
    passes(check)
