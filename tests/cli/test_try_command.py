"""fusedops try: a model of transformers on this machine, plain and applied."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import documented, flat, keys, run

from fusedops._cli.main import main

transformers = pytest.importorskip("transformers")
SHORT = ("--seconds", "0.01", "--length", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, pad_token_id=0))
    model.save_pretrained(path := tmp_path_factory.mktemp("model"))
    return path


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), ("--train", "--fused-loss")])
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


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--dtype", "int8"), "got --dtype 'int8', expected a floating dtype"),
        (("--fused-loss",), "got --fused-loss without --train"),
        (("--train",), "got no loss from BertModel"),
        (("--length", "17"), "from BertModel for 2 x 17 tokens"),
    ],
)
def test_what_a_model_cannot_do(options: Any, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **sizes)
    transformers.BertModel(config).save_pretrained(tmp_path)
    assert main(["try", str(tmp_path), *SHORT, *options]) == 2
    assert part in capsys.readouterr().err


def test_the_hub_is_tried_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail(f"it waits {seconds} s"))
    assert main(["try", "someone/something"]) == 2
    assert "(no connection to the Hub: " in capsys.readouterr().err
