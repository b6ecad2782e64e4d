"""The developers' table of launch settings: each other setting reaches the kernels, and none stays."""

from __future__ import annotations

import pytest
import torch
from repository import ROOT

pytest.importorskip("triton", reason="triton is not installed")

if not (ROOT / "benchmarks").exists():
    pytest.skip("needs benchmarks/settings.py, which is not beside the tests here", allow_module_level=True)

import fusedops
from benchmarks import settings
from fusedops_triton.launch import settings as launch_settings
from fusedops_triton.norms import _norm, _norm_settings


@pytest.mark.slow
def test_the_table_has_a_gain_for_each_setting_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--elements", "256", "--seconds", "0.0001", "--sweep", "large"]
    settings.main(["--ops", "rms_norm", *options])
    _, head, *lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[-1].split()[0] for line in lines] == ["forward", "backward"]
    for line in lines:
        assert float(line[52:62]) > 0
        places = [line[at : at + 14].strip() for at in range(73, len(head), 14)]
        exists = [bool(place) for place in places]
        assert len(exists) == len(settings.VARIATIONS)
        assert exists[1]  # twice the warps
        assert exists[4:6] == [False, False]  # a block is a whole row


def test_a_setting_changes_the_launch_and_not_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 64)
    with fusedops.use("triton"):
        plain = fusedops.rms_norm(x)
        with settings.varied("warps", 2.0) as changed:
            assert torch.equal(fusedops.rms_norm(x), plain)
            other = _norm._forward_launch(8, 64, False, x.dtype, False, False)
        assert set(changed) == {"norm_plan"}
        default = _norm._forward_launch(8, 64, False, x.dtype, False, False)
    assert other.warps == 2 * default.warps == 2 * _norm_settings.norm_plan(64, 4, 1).warps
    monkeypatch.setattr(launch_settings, "SHORT_ROWS", 4)
    assert settings.varied_setting(launch_settings.Plan(4, 64, 1, True), "rows", 2.0).rows == 4
    limited = _norm_settings.NormSums(1, 64, 1, True, 1, registers=64)
    assert settings.varied_setting(limited, "registers", None).registers is None
