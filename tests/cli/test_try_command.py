"""fusedops try: a model of transformers on this machine, plain and applied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import documented, flat, keys, run

transformers = pytest.importorskip("transformers")
SHORT = ("--seconds", "0.01", "--length", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, pad_token_id=0))
    model.save_pretrained(path := tmp_path_factory.mktemp("model"))
    return path


@pytest.mark.parametrize("options", [(), ("--train", "--fused-loss")])
def test_a_folder(folder: Path, options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("try", str(folder), *SHORT, *options, capsys=capsys)
    assert code == 0
    text = flat(output)
    assert ("a training step" if options else "a forward") in text
    assert ("linear_cross_entropy" in text) is bool(options)
    assert "LlamaRMSNorm rms_norm 3" in text
    assert "of plain's time" in text


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = run("try", str(folder), *SHORT, "--json", capsys=capsys)
    measured = json.loads(output)
    assert code == 0
    assert {key.partition(".plain")[0].partition(".applied")[0] for key in keys(measured)} == documented("try")
    assert measured["milliseconds"].keys() == measured["peak_bytes"].keys() == {"plain", "applied"}
    assert measured["difference"] < 1e-5


def test_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run("try", str(tmp_path), capsys=capsys)
    assert code == 2
