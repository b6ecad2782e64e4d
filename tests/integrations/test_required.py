"""A library that is missing or too old is one sentence with the fix, before anything of it is imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest
from repository import ROOT

from fusedops._cli.main import main
from fusedops.integrations import _required

NEEDED = {"transformers": "transformers", "megatron": "megatron-core"}


@pytest.mark.parametrize(("got", "text"), [("5.0.0", "got transformers 5.0.0"), ("4.57.6", "got transformers 4.57.6")])
def test_an_old_library(monkeypatch: pytest.MonkeyPatch, got: str, text: str) -> None:
    monkeypatch.setattr(_required, "version", lambda name: got)
    fix = "expected 5.22 or later; to fix: pip install 'transformers>=5.22', or fusedops with [transformers]"
    with pytest.raises(ImportError, match=re.escape(f"{text}, {fix}")):
        _required.require("transformers", "5.22", "transformers")


@pytest.mark.parametrize("got", ["5.22", "5.22.2", "5.24.0.dev0", "6.0"])
def test_a_new_library(monkeypatch: pytest.MonkeyPatch, got: str) -> None:
    monkeypatch.setattr(_required, "version", lambda name: got)
    _required.require("transformers", "5.22", "transformers")


def test_a_library_that_is_missing() -> None:
    with pytest.raises(ImportError, match=r"got no nowhere-to-be-found, expected 1\.0 or later; to fix: pip install"):
        _required.require("nowhere-to-be-found", "1.0", "nowhere")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_package_that_reads_gguf_files_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], package: str
) -> None:
    pytest.importorskip("transformers")
    module = importlib.import_module("fusedops.integrations.transformers._weights.gguf")
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else name)
    path = tmp_path / "model.gguf"
    path.touch()
    expected = f"from_gguf: got no package {package}, expected gguf and accelerate; to fix: pip install gguf accelerate"
    with pytest.raises(ImportError, match=f"^{re.escape(expected)}$"):
        module.from_gguf(path)
    assert main(["try", str(path)]) == 2
    assert capsys.readouterr().err == f"fusedops: try: {expected}\n"


@pytest.mark.parametrize("extra", NEEDED)
def test_the_oldest_versions_are_those_of_the_extras(extra: str) -> None:
    source = (ROOT / "fusedops" / "integrations" / extra / "__init__.py").read_text("utf-8")
    (oldest,) = re.findall(rf'^require\("{NEEDED[extra]}", "([\d.]+)", "{extra}"\)$', source, re.M)
    required = importlib.metadata.requires("fusedops") or []
    (declared,) = [each for each in required if each.startswith(f"{NEEDED[extra]}>=") and extra in each]
    assert re.search(r">=([\d.]+)", declared)[1].startswith(oldest)  # type: ignore[index]
