"""The steps of ``make gpu``, as data: one list for each phase, whose steps run at the same time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import headline


class Step(NamedTuple):
    """A command with a limit of time.

    Attributes:
        name: of the step, unique.
        command: the program and its arguments.
        seconds: after this time the command is ended.
        environment: variables beside those of all steps.
        needs: a program without which the step is skipped.
        restarts: how often the command is started again after a signal or an exit status of BROKEN: it continues then.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = {}
    needs: str = ""
    restarts: int = 0


class Target(NamedTuple):
    """The folder of results. ``dry``: on a CPU, with small sizes, Triton's interpreter and a stub of the driver."""

    results: Path
    dry: bool = False


#: Ops whose time is that of their bytes.
BYTES = (
    "scaled_masked_softmax", "cross_entropy", "rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "swiglu",
    "geglu", "rotary_embedding", "bias_gelu", "bias_dropout", "bias_dropout_add",
)  # fmt: skip

_BOTH = ("--elements", str(2**28), "--dtypes", "bfloat16", "float32")

#: The measurements, the first ones first: their options, seconds, the processes that compile ahead, and the ops of the
#: dry run, which Triton's interpreter computes; tests/docs/test_benchmarks.py measures every op.
MEASUREMENTS = {
    "headline": (
        ("--sweep", "headline", "--elements", str(2**30), "--dtypes", "bfloat16", "--ops", *headline.CALLS),
        105.0,
        3,
        ("linear_cross_entropy", "rms_norm"),
    ),
    "large": (("--sweep", "large", "--grow", *_BOTH, "--ops", *BYTES), 90.0, 3, ("rms_norm",)),
    "length": (("--sweep", "length", *_BOTH, "--ops", "scaled_masked_softmax", "rms_norm"), 35.0, 2, ("rms_norm",)),
}

#: The exit status of a measurement whose process can no longer use its device, and the calls of a measurement that may
#: end its process so, or by a signal, such as a peer with an illegal access: it continues with the next call.
BROKEN = 75
_RESTARTS = 3

#: Without it the caching allocator of torch hands out parts of large blocks, and memcheck sees no access beside a part.
NO_CACHING = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
#: A process compiles in itself: many run at the same time, and each graph has one kernel.
IN_PROCESS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def phases(target: Target) -> list[list[Step]]:
    """Return the steps. Phases follow each other; nothing runs beside a measurement, but in the dry run, which has none
    that counts: it has the measurements in one phase.
    """
    info = Step("info", _python("-m", "fusedops", "info"), 30)
    doctor = Step("doctor", _python("-m", "fusedops", "doctor"), 30)
    compile_ahead = [step for name in MEASUREMENTS for step in _compile_ahead(target, name)]
    sanitizers = [_sanitizer(target, tool) for tool in ("memcheck", "racecheck")]
    plots = Step("report", _python("-m", "benchmarks", "report", str(target.results)), 30)
    measured = [
        [_measure(target, "headline")],
        [_launch(target)],
        [_measure(target, "large")],
        [_large_tensors(target), _kit_calls(target)],
        [_measure(target, "length")],
    ]
    if target.dry:
        measured = [[step for phase in measured for step in phase]]
    return [[info, doctor, _tests(target), _kit(target, "sdpa"), *sanitizers, *compile_ahead], *measured, [plots]]


def _python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def _pytest(workers: int, *arguments: str) -> tuple[str, ...]:
    """Return a run of pytest without the settings of the other tests, in several processes where xdist is there."""
    parallel = workers > 1 and importlib.util.find_spec("xdist") is not None
    options = ("-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider", "--confcutdir", "tests/gpu")
    several = ("-n", str(workers), "--dist", "worksteal") if parallel else ()
    return _python("-m", "pytest", "-v", "-rfE", "--tb=short", *options, *several, *arguments)


def _interpreted(target: Target) -> Mapping[str, str]:
    return {"GPU_TESTS_ON": "cpu", "TRITON_INTERPRET": "1"} if target.dry else {}


def _tests(target: Target) -> Step:
    few = ("-k", "triton-bias_gelu-ragged-float32 or any_layout and float32-64") if target.dry else ("-k", "not calls")
    kit = () if target.dry else ("--fusedops-backend", "triton", "--fusedops-device", "cuda")
    files = (f"tests/gpu/test_gpu{name}.py" for name in ("", "_graphs", "_cudnn"))
    return Step("tests", _pytest(1 if target.dry else 12, *files, *few, *kit), 150, _interpreted(target))


def _kit(target: Target, backend: str) -> Step:
    device = "cpu" if target.dry else "cuda"
    select = f"{backend} and kernel" if target.dry else backend
    # pytest needs a file; none of its tests is selected
    options = ("--fusedops-backend", backend, "--fusedops-device", device, "tests/gpu/test_gpu_graphs.py", "-k", select)
    return Step(f"kit {backend}", _pytest(1 if target.dry else 2, *options), 130, _interpreted(target))


def _kit_calls(target: Target) -> Step:
    """Return the check of the kit that compiles most: a kernel for nearly each of its calls."""
    kit = ("--fusedops-backend", "triton", "--fusedops-device", "cpu" if target.dry else "cuda")
    select = "triton and bias_gelu and kernel" if target.dry else "calls and fusedops"
    tests = _pytest(1 if target.dry else 14, *kit, "tests/gpu/test_gpu_graphs.py", "-k", select)
    return Step("kit calls", tests, 110, _interpreted(target))


def _sanitizer(target: Target, tool: str) -> Step:
    # those of other libraries are not ours to check; long rows have no backend in their name
    select = "for_the_sanitizer and triton-bias_gelu" if target.dry else "for_the_sanitizer and (triton or long)"
    tests = _pytest(1, "tests/gpu/test_gpu.py", "-k", select)
    environment = {**NO_CACHING, **_interpreted(target)}
    if target.dry:
        return Step(tool, tests, 60, environment)
    program = "compute-sanitizer"
    # torch's start asks for a context where there is none: an error of an API call, not of memory
    options = ("--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no")
    return Step(tool, (program, *options, *tests), 150, environment, program)


def _large_tensors(target: Target) -> Step:
    few = ("-k", "swiglu or count_in_softmax") if target.dry else ()
    tests = _pytest(1, "tests/gpu/test_gpu_large.py", *few)
    return Step("large tensors", tests, 180 if target.dry else 60, _interpreted(target))


def _launch(target: Target) -> Step:
    rounds = ("--rounds", "3") if target.dry else ()
    out = str(target.results / "launch.jsonl")
    return Step("launch", _python("-m", "benchmarks.launch", "--out", out, *rounds), 90 if target.dry else 20)


def _options(target: Target, name: str) -> tuple[str, ...]:
    shared = ("--modes", "forward", "backward", "--without", "fusedops.eager", "megatron's torch path")
    if target.dry:
        sweep, _, _ = " ".join(MEASUREMENTS[name][0]).partition(" --ops ")
        few = ("--ops", *MEASUREMENTS[name][3])
        size = ("--device", "cpu", "--elements", "4096", "--seconds", "0.001", "--dtypes", "float32")
        return (*sweep.split(), *few, "--modes", "forward", "backward", "--without", "torch.compile", *size)
    return (*MEASUREMENTS[name][0], *shared, "--device", "cuda", "--seconds", "0.03")


def _compile_ahead(target: Target, name: str) -> list[Step]:
    count = 1 if target.dry else MEASUREMENTS[name][2]
    return [
        Step(
            f"compile {name} {at + 1}/{count}",
            _python("-m", "benchmarks", *_options(target, name), "--compile-only", f"{at}/{count}", "--limit", "115"),
            130,
            IN_PROCESS,
        )
        for at in range(count)
    ]


def _measure(target: Target, name: str) -> Step:
    seconds = MEASUREMENTS[name][1] * (3 if target.dry else 1)  # on a CPU, beside the others
    options = ("--limit", f"{seconds - 10:g}", "--out", str(target.results / f"{name}.jsonl"), "--continue")
    command = _python("-m", "benchmarks", *_options(target, name), *options)
    environment = {**IN_PROCESS, **_interpreted(target)}
    return Step(f"measure {name}", command, seconds, environment, restarts=_RESTARTS)
