"""The conformance kit on the ops' own references as a backend."""

from __future__ import annotations

from conformance import every_check, passes

from fusedops import testing


@every_check("loopback")
def test_the_kit_passes(check: testing.Check) -> None:
    passes(check)
