"""The compiled Triton kernel of linear_cross_entropy, as ``test_triton_compile.py`` has them for the first ops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from repository import SUPPORT

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="triton is not installed: nothing to compile with")

Case = dict[str, Any]


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for target in ("sm_80", "sm_90", "sm_100", "gfx942"):
        for dtype in ("bfloat16", "float32", "float64"):
            plain = {"op": "classes", "shape": [512, 128256], "dtype": dtype, "target": target}
            cases[f"plain-{dtype}-{target}"] = {**plain, "options": False}
            cases[f"options-{dtype}-{target}"] = {**plain, "bias": True, "scale": True}
    sm_90 = {"op": "classes", "dtype": "bfloat16", "target": "sm_90"}
    cases["odd"] = {**sm_90, "shape": [512, 50257]}  # rows of logits are padded: 16-byte accesses all the same
    cases["few"] = {**sm_90, "shape": [512, 1000]}
    cases["loss alone"] = {**sm_90, "shape": [512, 32000], "gradient": False}
    cases["2**37 logits"] = {**sm_90, "shape": [1 << 20, 1 << 17]}
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The facts of every case, by its name."""
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "triton_aot.py")],
        input=json.dumps([*CASES.values()]), capture_output=True, text=True, env=env, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, (json.loads(line)["facts"] for line in done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_compiles_well(name: str, compiled: dict[str, dict[str, Any]]) -> None:
    case, facts = CASES[name], compiled[name]
    assert facts["spilled"] == 0
    assert facts["registers"] * facts["warps"] * (64 if case["target"] == "gfx942" else 32) <= 2**16
    assert facts["float64"] == (case["dtype"] == "float64")
    assert facts["address_64"]
    # the rows of logits by 16 bytes; beside them the target, its logit and the loss, of one element each
    wide, narrow = facts["loads"].pop("16"), facts["loads"]
    assert wide >= (1 if case.get("gradient") is False else 2)
    assert sum(narrow.values()) <= 6, facts
    if case.get("gradient", True):
        assert facts["stores"]["16"] >= 1
    assert sum(count for width, count in facts["stores"].items() if width != "16") <= 1, facts
