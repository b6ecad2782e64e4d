"""The Llama-like example, a few steps of it, in a Python of its own as a user runs it."""

from __future__ import annotations

import re
from typing import Any

from repository import ROOT

EXAMPLE = ROOT / "examples" / "train_llama.py"
OPS = (
    "rms_norm",
    "add_rms_norm",
    "rotary_embedding",
    "attention",
    "swiglu",
    "linear_cross_entropy",
)


def test_both_models_have_the_same_loss_at_every_step(program: Any) -> None:
    done = program(EXAMPLE, "--steps", 5, "--block", 16, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no fallback in training
    largest = re.search(r"Largest difference of a step's loss: (\S+)", done.stdout)
    assert largest is not None
    assert 0 < float(largest[1]) < 1e-3
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+),", done.stdout)]
    assert losses[-1] < losses[0]
    for op in OPS:
        assert re.search(rf"^\W*{op}\W", done.stdout, re.MULTILINE), f"no row of {op}:\n{done.stdout}"
