"""``make npu``: where there is no device, it reports what is missing."""

from __future__ import annotations

import os
import subprocess
import sys

from repository import ROOT


def test_without_a_device_it_reports_what_to_do() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [str(ROOT / "benchmarks" / "npu.sh"), sys.executable]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "the npu backend is not ready: torch_npu is not installed" in done.stderr
    assert "to do: pip install" in done.stderr
