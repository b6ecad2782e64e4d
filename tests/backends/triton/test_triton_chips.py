"""The chips that launch settings follow from."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from fusedops_triton.launch import chips, settings
from fusedops_triton.launch.chips import CHIPS, target_of
from fusedops_triton.losses import _loss_settings
from fusedops_triton.norms import _norm_settings


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((12, 0), "sm_80"),
     (None, "gfx942")],
)  # fmt: skip
def test_a_capability_has_the_chip_of_its_generation(capability: tuple[int, int] | None, target: str) -> None:
    assert target_of(capability) == target


def test_the_chip_is_that_of_the_device_once_there_is_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chips.torch.version, "hip", None)
    monkeypatch.setattr(chips.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(chips.torch.cuda, "get_device_capability", lambda: (8, 0))
    assert chips.this_target() == "sm_80"


def test_without_a_context_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("starts a CUDA context")

    monkeypatch.setattr(chips.torch.version, "hip", None)
    monkeypatch.setattr(chips.torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(chips.torch.cuda, "get_device_capability", fail)
    assert chips.this_target() == "sm_90"


@pytest.mark.parametrize("target", CHIPS)
def test_settings_fit_the_chip(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = CHIPS[target]
    monkeypatch.setattr(settings, "chip", chip)
    assert 3 * chip.processors <= chip.fills < 6 * chip.processors
    assert chip.registers // (chip.resident // 2) >= settings.HALF_RESIDENT
    for width in (128, 1000, 4096, 8192, 16384, 32768):
        for setting in (
            settings.plan(width, 2, 1),
            _norm_settings.norm_plan(width, 2, 1),
            *(_norm_settings.norm_sums(2**16, width, 2, True, centered) for centered in (True, False)),
            _loss_settings.loss_plan(width, 2),
        ):
            assert 1 <= setting.warps <= chip.threads // chip.lanes


def test_sums_over_columns_have_one_order_on_every_nvidia_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set[object]()
    for chip in CHIPS.values():
        if chip.nvidia:
            monkeypatch.setattr(settings, "chip", chip)
            found.add(settings.share_columns(2**16, 4096, 2))
    assert len(found) == 1
