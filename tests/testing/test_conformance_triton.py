"""The conformance kit on triton, by its interpreter."""

from __future__ import annotations

from conformance import every_check, passes

from fusedops import testing


@every_check("triton")
def test_the_kit_passes(check: testing.Check) -> None:
    passes(check)
