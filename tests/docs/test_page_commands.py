"""Every shell command of README.md and of the pages is run: here, by another test, or for a stated reason nowhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from command_line import exit_code
from pages import PAGES, commands
from repository import ROOT

#: Exit codes of the commands that end with another one than 0: an `explain` whose call falls back, or cannot run.
EXIT_CODES = {
    "fusedops explain scaled_masked_softmax --x 8,16,512,500:bf16@npu --scale 0.125": 1,
    "fusedops explain scaled_masked_softmax --x 8,16,512,500:bf16@npu --mask 8,1,512,500 --scale 0.125": 1,
    "fusedops explain bias_gelu --x 8,512,3072:bf16@cuda --policy 'triton; bias_gelu=eager' --fallback raise": 0,
}

#: Commands that take long: they are run with these options too.
SHORTER = {
    "fusedops bench": "--elements 4096 --seconds 0.001",
    "fusedops bench --rank": "--elements 4096 --seconds 0.001 bias_gelu attention",
    "fusedops bench bias_gelu --dtype bf16 --elements 1048576": "--seconds 0.001",
    "fusedops check eager --op bias_gelu": "--elements 1024",
}

#: Commands that another test runs: the test, and a part of it.
ELSEWHERE = {
    "make demo": ("docs/test_demo.py", "train_gpt.py"),
    "python examples/train_gpt.py": ("docs/test_demo.py", "train_gpt.py"),
    "python examples/train_moe.py": ("docs/test_demo.py", "train_moe.py"),
    "python examples/moe_chat.py": ("docs/test_demo.py", "moe_chat.py"),
    "make chat": ("docs/test_smollm2.py", "smollm2.py"),
    "make finetune": ("docs/test_smollm2.py", "finetune.py"),
    "make preference": ("docs/test_preference.py", '"preference"'),
    "make site": ("docs/test_site.py", '"sphinx"'),
    "torchrun --nproc-per-node 2 examples/train_gpt.py": ("integrations/test_distributed.py", "train_gpt.py"),
    "python -m benchmarks report": ("docs/test_benchmarks.py", '"report"'),
    "python -m benchmarks.attention": ("docs/test_attention_page.py", '"benchmarks.attention"'),
    "python -m benchmarks --allocator": ("docs/test_benchmarks.py", '"--compare"'),
    "pip install .": ("docs/test_install.py", "PIP_NO_INDEX"),
    "FUSEDOPS_CPU_TARGET=none pip install .": ("backends/cpu/test_build.py", 'FUSEDOPS_CPU_TARGET="none"'),
    "pip install '.[": ("docs/test_install.py", "PIP_NO_INDEX"),
    "pip install ./fusedops-": ("docs/test_template.py", "add-a-backend.md"),
    "pytest --fusedops-backend": ("docs/test_template.py", "add-a-backend.md"),
    "fusedops explain my_rms_norm": ("docs/test_template.py", "add-an-op.md"),
    "fusedops explain scaled_masked_softmax --x 8,16,512,2000 --backend example": ("docs/test_template.py", "add-a"),
    "fusedops check norm": ("docs/test_template.py", "add-an-op.md"),
    "fusedops check example": ("docs/test_template.py", "add-a-backend.md"),
    "fusedops bench my_rms_norm": ("docs/test_template.py", "add-an-op.md"),
    "python -m fusedops check npu": ("support/conformance.py", '"npu"'),
}

#: Commands that no test runs, with the reason.
NOT_RUN = {
    "make test": "these tests",
    "fusedops try": "needs a model; cli/test_try_command.py makes one",
    "make fuzz": "an hour; tests/fuzz has tests of its own",
    "make test-slow": "these tests",
    "make test-long": "minutes",
    "make test-versions": "minutes, and two more installations of torch",
    "make docs": "minutes; each page that it writes has a test that it is current",
    "make bench": "40 minutes on an idle machine",
    "make release": "half an hour; docs/test_release.py has tests of its parts",
    "git tag": "of a release",
    "git clone": "needs the address of the repository",
    "tools/aarch64_python.sh": "downloads 200 MB, on Debian alone",
    "python -m twine upload": "uploads",
    "python tools/kernels_repository.py": "needs the wheels; integrations/test_kernels_repository.py runs it",
    "make wheels": "a minute for each platform; the tests marked long compile them",
    "make gpu": "needs a GPU; docs/test_gpu_run.py runs its runner",
    "make npu": "needs an Ascend device",
    "make npu-contract": "downloads 0.5 GB",
    "python -m benchmarks.row_order": "takes 40 seconds; docs/test_benchmarks.py runs a part of it",
    "python -m benchmarks.idle": "waits for an idle machine",
    "python -m benchmarks.settings": "needs a GPU; backends/triton/test_triton_settings.py runs it on a CPU",
    "python -m benchmarks.linear_loss": "needs 2 GB and a minute",
    "python -m benchmarks.perplexity --steps 200": "needs five minutes",
    "python -m benchmarks.experts": "needs minutes",
    "python -m benchmarks.context_parallel": "needs two minutes and two processes",
    "python -m benchmarks.token_time": "needs the weights and minutes",
    "python -m benchmarks.packed_peers": "needs a minute, and torchao and zentorch",
    "python -m benchmarks.train_step": "needs 3 GB and minutes",
    "python -m benchmarks.families": "needs minutes",
    "python -m benchmarks.linear_attention": "needs transformers, and minutes on an idle machine",
    "python -m benchmarks.cpu_sizes": "needs an hour on an idle machine",
    "python -m benchmarks.compiled": "compiles, and needs an idle machine",
    "fusedops bench bias_gelu --dtype bf16 --device cuda": "needs a GPU",
    "python -m fusedops check flash_attn": "needs a GPU",
    "pip install 'fusedops[": "is not published",
    "pip install torch": "gigabytes",
    "pip install accelerate": "needs an index",
    "pip install gguf": "needs an index",
    "pip install 'flash-attn": "needs a GPU's compiler",
    "pip install 'zentorch": "needs an index",
    "pip install --no-build-isolation --no-deps": "docs/test_install.py compiles the library",
    "pip install --no-deps --force-reinstall": "docs/test_install.py installs from source",
    "python -m build": "needs an index for the build's environment",
    "pytest -m long": "minutes",
    "FUSEDOPS_BACKEND=npu,triton python train.py": "train.py is the reader's program",
}
FORM = re.compile(r"\b[A-Z]{2,}\b(?!=)|\.\.\.")  # `fusedops explain OP`: a form, not a command

TEXTS = {path: commands(path.read_text(encoding="utf-8")) for path in [*PAGES, ROOT / "CONTRIBUTING.md"]}
SHOWN = sorted({line for page in TEXTS.values() for line in page.shown})
IN_TEXT = sorted({line for page in TEXTS.values() for line in page.in_text} - set(SHOWN))


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the stand-in for an Ascend device, which is there in all tests."""
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)


def listed(command: str) -> bool:
    """Return True where a command is in one of the two lists: it begins as the entry does, at a word's end."""
    return any(
        re.match(rf"{re.escape(start)}(?![\w-])|{re.escape(start)}(?<!\w)", command) for start in (*ELSEWHERE, *NOT_RUN)
    )


@pytest.fixture
def run(program: Any) -> Callable[[str], None]:
    """Return a function that runs a command as a shell does; those of fusedops in this process."""
    return lambda command: run_by(program, command)


def run_by(program: Any, command: str) -> None:
    words = shlex.split(f"{command} {SHORTER.get(command, '')}")
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    expected = EXIT_CODES.get(shlex.join(shlex.split(command)), 0)
    if words[:3] == ["python", "-m", "fusedops"]:
        words = words[2:]
    if words[:2] == ["fusedops", "bench"]:  # in a process without TRITON_INTERPRET: it would measure the interpreter
        words = ["python", "-m", *words]
    if words[0] == "fusedops":
        assert exit_code(*words[1:]) == expected, command
        return
    assert words[0] in ("python", "make"), (
        f"{command}: run it here, or name the test or the reason in a list of this file"
    )
    if words[0] == "python":
        done = program(*words[1:], path=[ROOT], folder=ROOT)
    else:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == expected, done.stdout + done.stderr


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in SHORTER)) for each in SHOWN if not listed(each)],
)
def test_a_command_in_a_block_runs(command: str, run: Callable[[str], None]) -> None:
    run(command)


@pytest.mark.parametrize("command", [each for each in IN_TEXT if not listed(each)])
def test_a_command_in_the_text_runs(command: str, run: Callable[[str], None]) -> None:
    if FORM.search(command) or re.fullmatch(r"(fusedops|python -m [\w.]+)( \w+)?", command):  # a form, or a name
        command = f"{FORM.split(command)[0].rstrip('[ ')} --help"
    run(command)


def test_the_lists_have_no_command_that_no_page_has() -> None:
    everything = [*SHOWN, *IN_TEXT]
    unused = [start for start in (*ELSEWHERE, *NOT_RUN) if not any(each.startswith(start) for each in everything)]
    assert not unused
    assert not [command for command in (*SHORTER,) if command not in everything]
    shown = {shlex.join(shlex.split(command)) for command in everything}
    assert not [command for command in EXIT_CODES if command not in shown]


@pytest.mark.parametrize("command", ELSEWHERE)
def test_the_named_test_has_the_command(command: str) -> None:
    file, part = ELSEWHERE[command]
    assert part in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_every_make_command_has_its_target() -> None:
    called = {match for each in (*SHOWN, *IN_TEXT) if (match := re.match(r"make ([\w-]+)", each))}
    targets = set(re.findall(r"^([\w-]+):.*?##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert {match[1] for match in called} <= targets
    assert called
