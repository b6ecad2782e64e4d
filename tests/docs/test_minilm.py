"""The example on a real pretrained model, in a Python of its own as a user runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from repository import ROOT

EXAMPLE = ROOT / "examples" / "minilm.py"


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--softmax"]], ids=["attention", "softmax"])
def test_the_embeddings_are_those_of_the_plain_model(options: list[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *options], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [float(number) for number in re.findall(r"^  (\d\.\d{9})  ", done.stdout, re.MULTILINE)]
    assert len(found) == 8
    assert min(found) >= 0.99999
    assert max(found) <= 1 + 1e-9
