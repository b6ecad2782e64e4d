"""The command line: what it prints fits 80 columns, its JSON is as documented, its exit codes are of use to scripts."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_backends import BROKEN, DECLARED
from loopback import registered

import fusedops
from fusedops import _bench, _health, testing
from fusedops.__main__ import main
from fusedops._op import OPS

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"
NPU_CALL = ["explain", "scaled_masked_softmax", "--x", "8,16,512,500:bf16@npu", "--mask", "8,1,512,500"]


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for an Ascend device is there in all tests: here the machine is to have none."""
    monkeypatch.setattr(torch.npu, "is_available", lambda: False)


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(argv)
    said = capsys.readouterr().out
    return code, said


@pytest.mark.parametrize(
    "argv", [["info"], ["matrix"], ["doctor"], NPU_CALL, ["explain", "bias_gelu", "--x", "4,8"]], ids=lambda v: v[0]
)
def test_lines_fit_80_columns(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, said = run(*argv, capsys=capsys)
    assert said
    # a version of a platform is one word, however long
    assert [line for line in said.splitlines() if len(line) > 80 and not line.startswith("python ")] == []
    assert "\033" not in said, "colour is for terminals alone"


def test_info_says_what_an_issue_needs(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run("info", capsys=capsys)
    assert code == 0
    for what in (fusedops.__version__, torch.__version__, "torch_npu is not installed", "to do: ", "eager", "triton"):
        assert what in said


def documented(command: str) -> set[str]:
    """The keys that the page documents for a command's JSON, outermost and of its rows."""
    section = PAGE.read_text(encoding="utf-8").split(f"## fusedops {command}", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([\w.<>\[\]]+)` \|", section, re.M))


def keys(data: Any, under: str = "") -> set[str]:
    """The keys of JSON data as the page writes them: a.b, and a[].b for what a list holds."""
    if isinstance(data, list):
        return set().union(*(keys(item, f"{under}[]") for item in data)) if data else set()
    if not isinstance(data, dict):
        return set()
    found: set[str] = set()
    for key, value in data.items():
        name = f"{under}.{key}" if under else key
        # what is keyed by names (of packages, devices, variables, ops) is one entry
        open_ended = name in ("versions", "devices", "variables")
        found |= {name} | (set() if open_ended else keys(value, name))
    return found


def test_json_is_as_documented(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, said = run("info", "--json", capsys=capsys)
    assert keys(json.loads(said)) == documented("info")
    found: set[str] = set()
    for options in (["--backend", "npu"], ["--adapt", "pad"]):  # refused, for reasons; and served, by an adaptation
        _, said = run(*NPU_CALL, *options, "--json", capsys=capsys)
        found |= keys(json.loads(said))
    assert found == documented("explain")
    _, said = run("matrix", "--json", capsys=capsys)
    by_op = json.loads(said)
    assert list(by_op) == list(fusedops.ops.OPS)
    assert keys(next(iter(by_op.values())), "<op>") == documented("matrix") - {"<op>"}
    monkeypatch.setenv("FUSEDOPS_BACKENDS", "eager")
    _, said = run("doctor", "--json", capsys=capsys)
    assert keys(json.loads(said)) == {"[].what", "[].fix"} == documented("doctor")


BENCH = ["bench", "bias_gelu", "--device", "cpu", "--elements", "64", "--seconds", "0.001"]


@pytest.fixture
def _two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter takes its time for each."""
    op = OPS["bias_gelu"]
    monkeypatch.setattr(_bench, "OPS", {op.name: dataclasses.replace(op, cases=op.cases[-2:])})


@pytest.mark.usefixtures("_two_cases")
def test_bench_measures_every_backend_that_takes_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(*BENCH, "--json", capsys=capsys)
    records = json.loads(said)
    assert code == 0
    assert keys(records) == documented("bench")
    assert {record["case"] for record in records} == {case.name for case in OPS["bias_gelu"].cases[-2:]}
    for case in OPS["bias_gelu"].cases[-2:]:
        for direction in ("forward", "backward"):
            rows = {r["who"]: r for r in records if (r["case"], r["direction"]) == (case.name, direction)}
            assert {"plain torch", "eager", "triton"} <= set(rows)
            assert "npu" not in rows, "npu takes no cpu tensors"
            assert rows["plain torch"]["speedup"] == 1.0
            for row in rows.values():
                assert row["ms"] > 0
                assert row["dtype"] == "float32"


@pytest.mark.usefixtures("_two_cases")
def test_bench_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(*BENCH, "--dtype", "bf16", capsys=capsys)
    assert code == 0
    assert "bf16 on cpu" in said
    assert re.search(r"backward  eager +[\d.]+ ms +[\d.]+ copies +[\d.]+x plain torch", said)
    assert [line for line in said.splitlines() if len(line) > 80] == []


@pytest.mark.usefixtures("_two_cases")
def test_bench_counts_in_copies_and_in_plain_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    took = {"plain torch": 6.0, "eager": 3.0, "triton": 2.0, "copy": 1.5}

    def timed(work: dict[str, Any], device: str, seconds: float) -> dict[str, _bench.Times]:
        assert (device, seconds) == ("cpu", 0.001)
        for function in work.values():
            function()
        return {name: _bench.Times(took.get(name, 1.0), 0.1, 9.0) for name in work}

    monkeypatch.setattr(_bench, "interleaved", timed)
    _, said = run(*BENCH, "--json", capsys=capsys)
    found = {(r["who"], r["ms"], r["copies"], r["speedup"]) for r in json.loads(said) if r["who"] in took}
    assert found == {("plain torch", 6.0, 4.0, 1.0), ("eager", 3.0, 2.0, 2.0), ("triton", 2.0, 1.33, 3.0)}


@pytest.mark.parametrize("argv", [["bench", "bias_gelo"], ["bench", "--dtype", "int8"], ["bench", "--dtype", "nn"]])
def test_bench_says_what_it_cannot_measure(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("fusedops: ")
    assert "bias_gelu" in said.err or "bf16" in said.err


# a kernel that fails a check, and another that a deviation excuses: what the report has to show
SHOWN = {"kernel", "limits", "special", "determinism"}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    off_by_one = next(broken for broken in BROKEN if broken.name == "off_by_one")
    kernels = (*off_by_one.kernels(), *DECLARED.kernels())
    real = testing.checks
    monkeypatch.setattr(testing, "checks", lambda *args: [check for check in real(*args) if check.name in SHOWN])
    with registered(fusedops.Backend("half", ("cpu",), -50, kernels)) as backend:
        yield backend.name


def test_check_reports_each_failure(checked: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run("check", checked, capsys=capsys)
    assert code == 1
    lines = said.splitlines()
    assert lines[0] == f"backend half, distribution (registered), device cpu, fusedops {fusedops.__version__}, torch"
    assert re.search(r"^scaled_masked_softmax +forward +limits +\d+  FAIL 1$", said, re.M)
    assert re.search(r"^bias_gelu +backward +determinism +1  pass, 1 excused$", said, re.M)
    (line,) = [line for line in lines if line.startswith("reproduce ")]
    assert re.sub(r"\n +", " ", said).split("\n\n", 1)[1].splitlines()[:3] == [
        "failed    scaled_masked_softmax/forward/limits: x dim -1 = 80",
        "seen      raised RuntimeError: the kernel has room for 79 columns",
        "contract  what is inside a declared limit is served, and right; what is outside is refused, with the reason",
    ]
    assert "testing.reproduce(" in line
    assert re.search(r"^1 of \d+ checks failed, 1 of \d+ cases; excused by a declared deviation:", said, re.M)
    assert [line for line in lines if len(line) > 80 and not line.startswith("reproduce ")] == []


def test_json_of_check_is_as_documented(checked: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run("check", checked, "--json", capsys=capsys)
    assert code == 1
    assert keys(json.loads(said)) == documented("check")
    code, said = run("check", checked, "--json", "--op", "bias_gelu", "--device", "cpu", capsys=capsys)
    assert code == 0
    assert {check["op"] for check in json.loads(said)["checks"]} == {"bias_gelu"}


@pytest.mark.parametrize("argv", [["egaer"], ["npu"], ["eager", "--op", "gelu"], ["eager", "--device", "nowhere"]])
def test_what_cannot_be_checked_is_no_failure(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *argv]) == 2
    assert capsys.readouterr().err.startswith("fusedops: ")


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--x", "4,8,16,16"], 0),
        (["--x", "4,8,512,512:bf16@npu"], 0),
        (["--x", "4,8,512,500:bf16@npu"], 1),
        (["--x", "4,8,512,512:fp64@npu"], 1),
        (["--x", "4,8,512,512:bf16@npu", "--backend", "eager"], 0),
        (["--x", "4,8,512,512:bf16@npu", "--mask", "512,512", "--scale", "0.125", "--causal", "true"], 0),
        (["--x", "4,eight"], 2),
        (["--x", "4,8:int9"], 2),
        (["--x", "4,8,16,16", "--scale", "much"], 2),
        (["--x", "4,8,16,16", "--causal", "perhaps"], 2),
        (["--x", "4,8,16,16", "--backend", "tritn"], 2),
        (["--mask", "4,8"], 2),
    ],
)
def test_exit_codes_of_explain(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "scaled_masked_softmax", *argv]) == code
    said = capsys.readouterr()
    assert bool(said.err) == (code == 2)
    if code == 2:
        assert said.err.startswith("fusedops: ")
        assert said.err.count("\n") == 1


def test_nobody_serves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FUSEDOPS_FALLBACK", "raise")
    argv = ["explain", "scaled_masked_softmax", "--x", "4,8,512,500:bf16@npu", "--backend", "npu"]
    assert main(argv) == 3
    assert "served by nobody" in capsys.readouterr().out


def test_the_mask_takes_the_device_of_x(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = run(*NPU_CALL, capsys=capsys)
    assert "mask bool[8, 1, 512, 500] on npu" in " ".join(said.split())
    assert "pad dim -1 of x from 500 to 512" in said


def test_doctor_is_content_with_a_plain_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", capsys=capsys)[0] == 0


def test_doctor_finds_unknown_variables_and_bad_policies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSEDOPS_BACKENDS", "eager")
    monkeypatch.setenv("FUSEDOPS_BACKEND", "tritn")
    code, said = run("doctor", capsys=capsys)
    assert code == 1
    flat = " ".join(said.split())
    assert "the nearest is 'FUSEDOPS_BACKEND'" in flat
    assert "unset FUSEDOPS_BACKENDS" in flat
    assert "no backend is called 'tritn'; the nearest is 'triton'" in flat
    assert "2 problems" in flat


def test_doctor_finds_a_device_that_nobody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "nvidia-smi" else None)
    (problem,) = _health.problems()
    assert (
        problem.what == f"nvidia-smi is here, but torch sees no cuda device: torch {torch.__version__} is a CPU build"
    )
    assert problem.fix == "install a CUDA or ROCm build of torch"
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}" if tool == "npu-smi" else None)
    (problem,) = _health.problems()
    assert "npu-smi is here" in problem.what
    assert "backend npu cannot serve it: torch_npu is not installed" in problem.what
    assert "pip install" in problem.fix


def test_doctor_names_a_broken_plugin(rediscovered: Any, distribution: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = "raise OSError('libvendor.so: cannot open shared object file')"
    rediscovered(distribution("brokenlib", {"broken": "broken_backend"}, broken_backend=source))
    code, said = run("doctor", capsys=capsys)
    assert code == 1
    flat = " ".join(said.split())
    assert "backend broken of brokenlib failed: OSError: libvendor.so" in flat
    assert "fix or uninstall brokenlib" in flat


@pytest.mark.parametrize("argv", [["info"], NPU_CALL], ids=["info", "explain"])
def test_answers_within_a_second_beyond_torch(argv: list[str]) -> None:
    def took(*command: str) -> float:
        """Seconds of processor time, the least of three runs: a busy machine stretches the clock's."""
        times: list[float] = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *command], check=False, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(times)

    assert took("-m", "fusedops", *argv) - took("-c", "import torch") < 1.0
