"""Where the flash_attn backend can run, and the reason and the fix where it cannot."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from flash_attn_standin import installed

import fusedops
import fusedops_flash_attn
from fusedops_flash_attn import _package


def probe() -> fusedops.Unavailable | None:
    return fusedops_flash_attn.fusedops_backend().probe()


def gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int]) -> None:
    """Let torch report GPUs of these compute capabilities."""
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))

    def capability(device: Any = 0) -> tuple[int, int]:
        return capabilities[device if isinstance(device, int) else device.index]

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)


STATES = [
    # the versions of release 2 and 3, the GPUs, why
    pytest.param(None, None, [(8, 0)], "flash-attn is not installed", id="absent"),
    pytest.param("2.0.9", None, [(8, 0)], "flash-attn 2.0.9 is installed; the backend needs 2.7", id="2.0"),
    pytest.param("2.6.3", None, [(8, 0)], "flash-attn 2.6.3 is installed; the backend needs 2.7", id="2.6"),
    pytest.param(None, "3.0.0b1", [(9, 0)], "flash_attn_3 3.0.0b1 is installed; the backend needs 3.0", id="3 beta"),
    pytest.param("", None, [(8, 0)], "flash-attn of an unknown release is installed", id="no metadata"),
    pytest.param("2.8.3", None, [], "torch.cuda.is_available() is False", id="no GPU"),
    pytest.param(None, "3.0.0", [(9, 0), (8, 0)], "a GPU here has 8.0", id="3 alone, on another GPU"),
]


@pytest.mark.parametrize(("two", "three", "capabilities", "why"), STATES)
def test_each_installation_has_its_own_reason(
    two: str | None,
    three: str | None,
    capabilities: list[tuple[int, int]],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus(monkeypatch, *capabilities)
    with installed(two, three):
        found = probe()
    assert found is not None
    assert why in found.why
    assert "install" in found.fix


@pytest.mark.parametrize(
    ("two", "three", "capability"),
    [
        ("2.7.0", None, (8, 0)),
        ("2.8.3.post1+cu12torch2.10", None, (12, 0)),
        (None, "3.0.0", (9, 0)),
        ("2.8.3", "3.0.0b1", (8, 6)),
    ],
)
def test_it_runs(
    two: str | None, three: str | None, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, capability)
    with installed(two, three):
        assert probe() is None


def test_rocm_has_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, (9, 4))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with installed():
        found = probe()
    assert found is not None
    assert "ROCm" in found.why


@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c10"), "undefined symbol: _ZN3c10; it was built for"),
        (ModuleNotFoundError("No module named 'einops'", name="einops"), "No module named 'einops'"),
    ],
)
def test_a_broken_installation_is_reported(raised: Exception, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, (8, 0))
    real = importlib.import_module

    def load(name: str) -> Any:
        if name.startswith("flash_attn."):
            raise raised
        return real(name)

    with installed():
        monkeypatch.setattr(_package, "import_module", load)
        _package.installed.cache_clear()
        found = probe()
    assert found is not None
    assert why in found.why


@pytest.mark.parametrize(("capability", "release"), [((8, 0), 2), ((9, 0), 3), ((10, 0), 2)])
def test_release_3_is_for_compute_capability_9(
    capability: tuple[int, int], release: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, capability)
    with installed("2.8.3", "3.0.0"):
        assert _package._has_release_3(torch.device("cuda", 0)) == (release == 3)


def test_importing_the_backend_imports_no_package(python: Any) -> None:
    code = """
        import json, sys
        import fusedops_flash_attn
        len(fusedops_flash_attn.fusedops_backend().kernels)
        print(json.dumps([name for name in sys.modules if "flash_attn" in name]))
    """
    loaded = python(code, *sys.path)
    assert sorted(loaded) == ["fusedops_flash_attn"] + [
        f"fusedops_flash_attn.{name}" for name in ("_package", "attention", "varlen_attention")
    ]
