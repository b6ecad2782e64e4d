"""The conformance kit on flash_attn, on the stand-in for flash-attn 2."""

from __future__ import annotations

from conformance import every_check, passes

from fusedops import testing


@every_check("flash_attn_on_cpu")
def test_the_kit_passes(check: testing.Check) -> None:
    passes(check)
