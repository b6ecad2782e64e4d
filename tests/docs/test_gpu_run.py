"""``make gpu`` where there is no GPU: its runner, its steps, its measurements. ``make gpu-dry`` runs every step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT

if not (ROOT / "benchmarks").exists():
    pytest.skip("needs benchmarks, which is not beside the tests here", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as command_line
from benchmarks import calls, headline, measure, report
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import kernel_cache, runner
from benchmarks.gpu.packages import COMMIT, python_path
from benchmarks.gpu.runner import Outcome, log_of, run_all
from benchmarks.gpu.steps import MEASUREMENTS, OTHERS, Step, Target, commands
from fusedops import Case, TensorSpec, testing
from fusedops.testing import _timing


def python(name: str, code: str, seconds: float = 30.0, **fields: Any) -> Step:
    return Step(name, (sys.executable, "-c", code), seconds, **fields)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a step one second after its interrupt, which a shell's background processes ignore."""
    monkeypatch.setattr(runner, "_GRACE", 1.0)


@pytest.mark.usefixtures("short_grace")
def test_no_step_depends_on_another_one(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    steps = [
        [
            python("fails", "print('before'); raise SystemExit(3)"),
            Step("needs it", ("no-such-tool",), 1, {}, "no-such-tool"),
        ],
        [python("hangs", f"{child}; print('began', flush=True); time.sleep(60)", 2.0)],
        [python("reads", "import os; print(os.environ['SHARED'], os.environ['OWN'])", environment={"OWN": "2"})],
        [Step("absent", (str(tmp_path / "none"),), 9), python("late", "print('late')")],
        [python("dies", "import os; os.abort()", restarts=2)],
    ]
    start = time.monotonic()
    environment = {**os.environ, "SHARED": "1"}
    outcomes = {one.step: one for one in run_all(steps, environment, tmp_path / "logs", tmp_path, 60.0)}
    assert time.monotonic() - start < 30
    assert {name: one.status for name, one in outcomes.items()} == {
        "fails": "failed", "needs it": "skipped", "hangs": "stopped", "reads": "passed", "absent": "failed",
        "late": "passed", "dies": "failed",
    }  # fmt: skip
    assert outcomes["fails"].detail == "exit status 3"
    assert outcomes["dies"].detail == f"exit status {-signal.SIGABRT}, after 2 restarts"
    assert "No such file" in outcomes["absent"].detail
    assert outcomes["needs it"].detail == "no-such-tool is not installed"
    assert log_of(tmp_path / "logs", "hangs").read_text().startswith("began")
    assert log_of(tmp_path / "logs", "reads").read_text() == "1 2\n"
    assert [name for name, one in outcomes.items() if one.is_bad] == ["fails", "hangs", "absent", "dies"]


@pytest.mark.usefixtures("short_grace")
def test_what_has_no_time_left_is_skipped(tmp_path: Path) -> None:
    steps = [[python("first", "import time; time.sleep(60)")], [python("second", "print()")]]
    outcomes = list(run_all(steps, os.environ, tmp_path, tmp_path, 0.5))
    assert [(one.step, one.status) for one in outcomes] == [("first", "stopped"), ("second", "skipped")]


REAL, DRY = (
    [step for phases in commands(Target(Path("out"), dry)) for phase in phases for step in phase]
    for dry in (False, True)
)


def test_the_dry_run_has_every_step() -> None:
    def names(steps: list[Step]) -> list[str]:
        return list(dict.fromkeys(step.name.partition("/")[0].rstrip("0123456789") for step in steps))

    assert names(REAL) == names(DRY)
    assert len({step.name for step in REAL}) == len(REAL)


def test_the_environment_of_the_steps_has_no_name_of_a_setting_that_is_none() -> None:
    """The kit fails a call that warns: fusedops names unknown FUSEDOPS_ variables at the first call."""
    assert not COMMIT.startswith("FUSEDOPS")


def test_steps_can_be_chosen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", "--dry", "--only", "info", "nothing"])
    with pytest.raises(SystemExit):
        program.main()
    assert "got --only nothing, expected names of steps: info, doctor, tests" in capsys.readouterr().err


def test_the_table_of_the_headline_calls() -> None:
    def rows(op: str, case: str, provider: str, *times: float, shape: tuple[int, ...]) -> list[dict[str, Any]]:
        return [
            {
                "op": op,
                "case": case,
                "provider": provider,
                "mode": mode,
                "ms_p50": ms,
                "pct_of_copy": 90.0,
                "shape": shape,
            }
            for mode, ms in zip(("forward", "backward"), times)
        ]

    loss = (4096, 4096)
    found = headline.table(
        rows("rms_norm", "4096", "fusedops.triton", 0.1, 0.3, shape=(32768, 4096))
        + rows("rms_norm", "4096", "torch", 0.2, 0.4, shape=(32768, 4096))
        + rows("linear_cross_entropy", "Llama 3", "fusedops.triton", 15.0, 5.0, shape=loss)
        + rows("linear_cross_entropy", "Llama 3", "torch", 10.0, shape=loss)  # its backward has failed
    )
    assert found[2:] == [
        "| rms_norm, 4096 | triton | 100 | 300 | 90, 90 |  | 1.50 |",
        f"| linear_cross_entropy, Llama 3 | triton | 15000 | 5000 |  | {6 * 4096**2 * 128256 / 20e-3 / 1e12:.0f} |  |",
    ]


@pytest.mark.parametrize("command", [1, 2, 3])
def test_the_limits_of_the_phases_fit_in_a_command(command: int) -> None:
    phases = commands(Target(Path("out")))[command - 1]
    longest = sum(max(step.seconds for step in phase) for phase in phases)
    assert longest <= program.SECONDS <= 590 - 15  # in which the kernels are packed
    lines = program._planned(command, phases)
    assert len(lines) == 1 + sum(map(len, phases))
    assert int(lines[0].split()[2]) <= longest


def test_the_plan_has_the_times_of_the_last_run() -> None:
    phase = [Step("launch", (), 20), Step("unknown", (), 30)]
    assert program._planned(2, [phase, [Step("memcheck", (), 60)]]) == [
        "command 2: 90 s by nvidia-h200's last run, by the limit of a new step",
        "  1  launch                   limit   20 s  took 10 s",
        "  1  unknown                  limit   30 s",
        "  2  memcheck                 limit   60 s  took 95 s",
    ]


def test_what_no_gpu_has_timed_is_measured_first_and_alone() -> None:
    ours, beside = MEASUREMENTS["headline ours"], MEASUREMENTS["headline"]
    timed = {
        row["op"]
        for row in map(json.loads, (report.RESULTS / program.LAST / "headline.jsonl").read_text().splitlines())
    }
    assert not {*ours.ops[:4]} & timed
    assert {*ours.ops} == {*headline.CALLS} == {*beside.ops, "linear_attention"}
    assert {"torch", "torch.compile", "liger-kernel", "transformers"} <= {*OTHERS} == {*ours.without}
    assert beside.without == ("torch",)


def test_a_call_has_its_own_order_in_memory_and_its_own_dtype(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (_, inside) = calls.cases(testing.OPS["causal_conv1d"], "headline", 2**12)
    x = calls.arguments(testing.OPS["causal_conv1d"], inside, torch.float32, "cpu")[0]
    assert x.stride(1) == 1 < x.stride(2)
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--ops", "grouped_matmul", "--sweep", "headline", "--dtypes",
        "float32", "--elements", "4096", "--seconds", "0.001", "--device", "cpu", "--modes", "forward", "--without",
        "torch.compile", "fusedops.triton", "--out", str(out)])  # fmt: skip
    assert command_line.main() == 0
    dtypes = {row["case"]: row["dtype"] for row in map(json.loads, out.read_text().splitlines())}
    assert dtypes == {"Qwen3-MoE": "float32", "Qwen3-MoE, float16": "float16"}


def test_numbers_of_large_tensors_are_between_the_bounds_of_their_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decay above 0 would grow by the position."""
    monkeypatch.setattr(calls, "_LIMIT", 0)
    op = testing.OPS["linear_attention"]
    case = next(calls.cases(op, "headline", 2**16))
    args = dict(zip(op.parameters, calls.arguments(op, case, torch.float32, "cpu")))
    assert (args["decay"] <= 0).all()
    assert ((args["beta"] >= 0) & (args["beta"] <= 1)).all()
    packed = testing.OPS["varlen_attention"]
    (case,) = headline.CALLS["varlen_attention"]
    bounds = calls._made(packed, calls.specs(packed, case, torch.float32), "cu_seqlens_q")
    assert bounds.tolist() == [*range(0, 8193, 1024)]


def test_the_sanitizer_is_called_without_the_caching_allocator(tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "caching off: $PYTORCH_NO_CUDA_MEMORY_CACHING, $PYTHONPATH, $*"\n')
    tool.chmod(0o755)
    steps = [[step for step in REAL if step.name == "memcheck float32"]]
    environment = {"PATH": str(tmp_path) + os.pathsep + os.environ["PATH"], "PYTHONPATH": "/carried"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", environment["PATH"])
        (outcome,) = run_all(steps, environment, tmp_path, tmp_path, 30.0)
    assert outcome.status == "passed"
    assert log_of(tmp_path, "memcheck float32").read_text().startswith("caching off: 1, /carried, --tool memcheck ")


@pytest.mark.parametrize("steps", [REAL, DRY], ids=["real", "dry"])
def test_the_sanitizer_sees_each_allocation(steps: list[Step]) -> None:
    sanitized = [step for step in steps if step.name.startswith(("memcheck", "racecheck"))]
    assert len(sanitized) == 6  # of what is new, and all of 16 and of 32 bits
    assert all(step.environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1" for step in sanitized)
    assert {step.needs for step in sanitized} == ({"compute-sanitizer"} if steps is REAL else {""})


def test_entry_points_and_wheels_are_found_without_an_installation(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "peer-1.0-py3-none-any.whl", "w", zipfile.ZIP_LZMA) as wheel:
        wheel.writestr("peer.pth", "peer_files/packages\n")
        wheel.writestr("peer_files/packages/peer_kernels.py", "ANSWER = 42\n")
    code = """
import json, peer_kernels
from importlib.metadata import entry_points, version
names = [entry.name for entry in entry_points(group="fusedops.backends")]
print(json.dumps([peer_kernels.ANSWER, version("fusedops"), names, [e.value for e in entry_points(group="pytest11")]]))
"""
    path = python_path(tmp_path / "work", wheels)
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        cwd="/",
    )
    answer, version, names, plugins = json.loads(done.stdout)
    assert answer == 42
    assert version == __import__("fusedops").__version__
    assert {"eager", "triton", "npu"} <= set(names)
    assert plugins == ["_fusedops_pytest"]


def test_the_import_path_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/carried/wheels")
    assert python_path(tmp_path, None).split(os.pathsep)[-1] == "/carried/wheels"


# --------------------------------------------------------------------------------------------------------- measurements


@pytest.mark.parametrize("name", list(testing.OPS))
def test_headline_calls_are_whole(name: str) -> None:
    found = [case.name for case in calls.cases(testing.OPS[name], "headline", 2**30)]
    assert found == [case.name for case in headline.CALLS.get(name, ())]


@pytest.mark.parametrize("name", list(testing.OPS))
def test_calls_are_as_large_as_asked(name: str) -> None:
    op = testing.OPS[name]
    small = {case.name: case for case in op.evidence.measured}
    for case in calls.cases(op, "large", 2**28, grow=True):
        shapes = {n: value for n, value in case.args.items() if isinstance(value, tuple)}
        before = small[case.name].args
        assert 2**27 < max(torch.Size(shape).numel() for shape in shapes.values()) <= 2**28
        assert all(shape[1:] == before[n][1:] for n, shape in shapes.items())
        factors = {shape[0] // before[n][0] for n, shape in shapes.items()} - {1}
        assert len(factors) == 1


def test_length_sweeps_have_a_mask_or_none() -> None:
    op = testing.OPS["scaled_masked_softmax"]
    plain, masked = (list(calls.cases(op, sweep, 2**28)) for sweep in ("length", "length-masked"))
    assert [case.args["x"][-1] for case in plain] == [2**n for n in range(6, 18)]
    assert {tuple(case.args) for case in plain} == {("x",)}  # without a scale, which peers do not have
    assert all("mask" in case.args for case in masked)
    assert not list(calls.cases(testing.OPS["rms_norm"], "length-masked", 2**28))


def _with_two_pages(case: Case) -> Case:
    """Return the case with two pages in each cache of codes, whose sizes are not cut: a gigabyte of random numbers."""
    args = {
        name: value.replace(shape=(2, *value.shape[1:]))
        if isinstance(value, TensorSpec) and value.dim() == 4
        else value
        for name, value in case.args.items()
    }
    return Case(case.name, args, case.source)


def test_arguments_are_made_on_the_device_as_the_tests_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_LIMIT", 0)
    for op in testing.OPS.values():
        case = testing.shrunk(_with_two_pages(op.evidence.measured[0]), 2**12)
        made, wanted = calls.arguments(op, case, torch.bfloat16, "cpu"), testing.arguments(op, case, torch.bfloat16)
        assert op.specs(made) == op.specs(wanted)
        op.validate(made)
        op.call_public(*made)


def test_a_provider_that_raises_is_left_out_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("no such width")

    def fails_in_backward(x: Any, *rest: Any) -> Any:
        y = torch.softmax(x, -1)
        if y.requires_grad:
            y.register_hook(fails)
        return y

    op = testing.OPS["scaled_masked_softmax"]
    functions = {"fusedops.eager": fails, "torch": op.evidence.unfused, "peer": fails, "other": fails_in_backward}
    monkeypatch.setattr(measure, "providers", lambda op, args, device, without: (functions, {}))
    measurement = measure.Measurement("cpu", ("forward", "backward"), 0.001)
    rows = list(measurement.rows(op, Case("small", {"x": (2, 8)}), torch.float32))
    assert [(row["mode"], row["provider"]) for row in rows] == [
        ("forward", "torch"),
        ("forward", "other"),
        ("backward", "torch"),
    ]
    assert measurement.failures == ["fusedops.eager: scaled_masked_softmax small float32: RuntimeError: no such width"]


def test_the_time_of_the_host_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is busy for longer than the host takes to queue a call, before the first event."""
    events: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            events.append("record")

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append(cycles))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def call() -> None:
        events.append("call")
        time.sleep(0.002)

    host = _timing._host_seconds(call)
    assert _timing._by_events(call, torch.empty(1), host) == 1.0
    assert events[:1] == ["call"]
    cycles = events[1]
    assert events[2:] == ["record", "call", "record"]
    assert cycles >= 2e9 * 0.002


def test_the_summary_has_each_step_with_its_failures_and_the_measurements(tmp_path: Path) -> None:
    results, logs, out = tmp_path / "results", tmp_path / "logs", tmp_path / "out"
    for folder in (results, logs, out):
        folder.mkdir()
    log = "tests/gpu/test_gpu.py::test_a PASSED\nFAILED tests/gpu/test_gpu.py::test_b - AssertionError: x | y\n"
    log_of(logs, "tests").write_text(f"{log}====== 1 failed, 7 passed, 2 skipped in 3.10s ======\n")
    row = {
        "op": "rms_norm", "mode": "forward", "case": "training", "dtype": "bfloat16", "shape": [2, 8], "ms_p50": 1.0,
        "copies": 1.25, "pct_of_copy": 80.0, "peak_bytes": 32, "device": "GPU", "driver": "1", "torch": "2",
        "python": "3", "commit": "f" * 40, "threads": 1, "allocator": "default",
    }  # fmt: skip
    rows = [{**row, "provider": "fusedops.triton"}, {**row, "provider": "quack-kernels", "ms_p50": 2.0}]
    (results / "large.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    outcomes = [Outcome("tests", "failed", 4.0, "exit status 1"), Outcome("doctor", "passed", 1.0, "")]
    program._write(outcomes, "a GPU", results, logs, out)
    lines = (out / "summary.md").read_text().splitlines()
    assert lines[0] == "# a GPU"
    assert "| tests | failed | 4.0 | exit status 1; 1 failed, 7 passed, 2 skipped |" in lines
    assert "| | | | tests/gpu/test_gpu.py::test_b - AssertionError: x / y |" in lines
    assert "| rms_norm, training | forward | triton | 1 | 1.25 | 80 | 2.00 | 1.00 |" in lines
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["status"] for step in steps] == ["failed", "passed"]
    assert steps[0]["failed"] == ["tests/gpu/test_gpu.py::test_b - AssertionError: x | y"]
    assert "==== doctor: passed" in (out / "logs.txt").read_text()
    assert json.loads((out / "large.jsonl").read_text().splitlines()[1])["provider"] == "quack-kernels"
    assert len(list(out.iterdir())) == 4
    for phases in commands(Target(Path("out"))):
        measured = sum(step.name.startswith(("measure", "launch", "kernels")) for phase in phases for step in phase)
        assert 3 + measured + 1 <= 8  # what a lent machine gives back, with the compiled kernels


# --------------------------------------------------------------------------------------------------- compiled kernels

CACHED = """
import shutil, sys, tarfile
from pathlib import Path
import triton, triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from benchmarks.gpu.kernel_cache import pack, unpack

@triton.jit
def doubled(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at))

def compiled(block):
    source = ASTSource(doubled, {"x_ptr": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": block})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))

folder = Path(sys.argv[1])
knobs.cache.dir = str(folder / "first")
wanted = compiled(64).asm["cubin"]
assert pack(folder / "kernels.tar.gz") == (1, 1)
with tarfile.open(folder / "kernels.tar.gz") as tar:
    assert {Path(name).suffix for name in tar.getnames()} == {".cubin", ".json"}
shutil.rmtree(knobs.cache.dir)
knobs.cache.dir = str(folder / "elsewhere")
assert unpack(folder / "kernels.tar.gz") == 1
def fails(*args):
    raise RuntimeError("it is compiled")
CUDABackend.make_cubin = fails
assert compiled(64).asm["cubin"] == wanted
try:
    compiled(128)
except RuntimeError:
    pass
else:
    raise AssertionError("another kernel is not compiled")
"""


def test_compiled_kernels_are_found_where_they_are_unpacked(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(CACHED)  # the source of a kernel is read from a file
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(tmp_path / "kernel.py"), str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_newest_kernels_are_packed_up_to_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_cache", lambda: tmp_path / "cache")
    for at in range(4):
        folder = tmp_path / "cache" / f"kernel{at}"
        folder.mkdir(parents=True)
        (folder / "k.cubin").write_bytes(os.urandom(5 * 2**20))
        (folder / "k.ptx").write_text("text")
        os.utime(folder, (at, at))
    archive = tmp_path / "kernels.tar.gz"
    assert kernel_cache.pack(archive, 8 * 2**20) == (2, 4)
    assert archive.stat().st_size < 16 * 2**20
    monkeypatch.setattr(kernel_cache, "_cache", lambda: tmp_path / "new")
    assert kernel_cache.unpack(archive) == 2
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["kernel2", "kernel3"]
    assert [path.name for path in (tmp_path / "new" / "kernel3").iterdir()] == ["k.cubin"]


@pytest.mark.parametrize("data", [None, b"half of it"], ids=["absent", "broken"])
def test_kernels_that_cannot_be_read_are_compiled(data: bytes | None, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / "kernels.tar.gz").write_bytes(data)
    assert program._unpacked(tmp_path / "kernels.tar.gz").startswith("no compiled kernels: ")
