"""examples/preference.py on a model of a few thousand parameters; its own has 135 million."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from repository import EXAMPLES


def test_both_learn_the_same_preferences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    for name in ("HF_HUB_OFFLINE", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # the example sets them
    monkeypatch.syspath_prepend(str(EXAMPLES))
    preference: Any = importlib.import_module("preference")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4001, **sizes))

    def tokenizer(text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text[:3000]]}

    monkeypatch.setattr(preference, "load", lambda device: (tokenizer, model))
    monkeypatch.setattr(preference, "LEARNING_RATE", 3e-3)
    preference.main(["--pairs", "6", "--batch", "3", "--epochs", "5", "--prompt", "4", "--answer", "60"])
    report = capsys.readouterr().out
    losses = re.findall(r"^step \d+ +(\S+) +(\S+)", report, re.MULTILINE)
    assert len(losses) == 10
    assert max(abs(float(ours) - float(theirs)) for ours, theirs in losses) < 1e-3
    assert float(losses[0][0]) == pytest.approx(0.6931, abs=1e-4)  # of a model that is its own reference
    assert float(losses[-1][0]) < 0.65
    assert "is preferred: 100% and 100%" in report
    peaks = re.findall(r"^peak of .*MiB +(\S+)$", report, re.MULTILINE)
    assert [float(ratio) < 0.9 for ratio in peaks] == [True, True]
