"""The conformance kit on the kernels of sdpa for CUDA, on the stand-in for torch's functions."""

from __future__ import annotations

from conformance import every_check, passes

from fusedops import testing


@every_check("sdpa_cuda_on_cpu")
def test_the_kit_passes(check: testing.Check) -> None:
    passes(check)
