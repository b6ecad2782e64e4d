"""The conformance kit on every backend: those that no machine of the tests has on stand-ins, triton interpreted."""

from __future__ import annotations

from conformance import every_check, passes

from fusedops import testing


@every_check()
def test_the_kit_passes(check: testing.Check) -> None:
    passes(check)
