"""The conformance kit on sdpa."""

from __future__ import annotations

from conformance import every_check, passes

from fusedops import testing


@every_check("sdpa")
def test_the_kit_passes(check: testing.Check) -> None:
    passes(check)
