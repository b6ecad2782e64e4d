"""The steps of ``make gpu``, as data: three commands, each a list of phases, whose steps run at the same time.

The first command has what teaches most where no other one runs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import headline
from benchmarks.peers import PEERS


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


class Measured(NamedTuple):
    """A run of ``python -m benchmarks``.

    Attributes:
        options: the sweep, sizes and dtypes.
        ops: that are measured.
        seconds: its limit.
        ahead: the processes that compile its calls before.
        small: the ops of the dry run, which Triton's interpreter computes.
        without: the providers that are left out.
    """

    options: tuple[str, ...]
    ops: tuple[str, ...]
    seconds: float
    ahead: int = 0
    small: tuple[str, ...] = ("rms_norm",)
    without: tuple[str, ...] = ()


#: The providers that are not fusedops.
OTHERS = ("torch", "torch.compile", "torch sdpa", *sorted({name for peers in PEERS.values() for name in peers}))
_HEADLINE = ("--sweep", "headline", "--elements", str(2**30), "--dtypes", "bfloat16")
_BOTH = ("--elements", str(2**28), "--dtypes", "bfloat16", "float32")
#: Ops whose chains of torch calls are loops, which take minutes to compile.
_LOOPS = ("linear_attention", "experts")
#: fusedops alone, all calls; and the same beside the others, the op of the shorter loop last.
MEASUREMENTS = {
    "headline ours": Measured(_HEADLINE, (*headline.CALLS,), 150, without=OTHERS),
    "headline": Measured(
        _HEADLINE, (*(op for op in headline.CALLS if op not in _LOOPS), "experts"), 170, 4, without=("torch",)
    ),
    "large": Measured(("--sweep", "large", "--grow", *_BOTH), BYTES, 90, 3),
    "length": Measured(("--sweep", "length", *_BOTH), ("scaled_masked_softmax", "rms_norm"), 35, 2),
}

#: The exit status of a measurement whose process can no longer use its device, and the calls of a measurement that may
#: end its process so, or by a signal, such as a peer with an illegal access: it continues with the next call.
BROKEN = 75
_RESTARTS = 3

#: Without it the caching allocator of torch hands out parts of large blocks, and memcheck sees no access beside a part.
NO_CACHING = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
#: A process compiles in itself: many run at the same time, and each graph has one kernel.
IN_PROCESS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


#: Selects what no GPU has run, or not as it is today; and the ops whose kernels the step "kernels" lists.
_NEW = "(linear_attention or quantized or log_probs or grouped or experts or causal_conv1d or merge)"
_LISTED = ("experts", "linear_attention", "linear_cross_entropy", "causal_conv1d")


def commands(target: Target) -> list[list[list[Step]]]:
    """Return the steps. Phases follow each other; nothing runs beside a measurement, but in the dry run, which has none
    that counts: it has the measurements of a command in one phase.
    """
    return [
        [
            [
                Step("info", _python("-m", "fusedops", "info"), 30),
                Step("doctor", _python("-m", "fusedops", "doctor"), 30),
            ],
            [_tests(target, "tests, new", f"triton and {_NEW}", 100)],
            [_same_bits(target), *_sanitizers(target, "new", f"triton and bfloat16 and {_NEW}", 70)],
            *_measured(target, _kernels(target), _measure(target, "headline ours")),
            # about 120 processor-seconds on each of 16: 12 processes, beside 10 others, took 139 s, and more ops came
            [_tests(target, "tests", f"not calls and not (triton and {_NEW})", 185)],
        ],
        [
            [step for name in MEASUREMENTS for step in _compile_ahead(target, name)],
            *_measured(
                target,
                _measure(target, "headline"),
                _launch(target),
                _measure(target, "large"),
                _measure(target, "length"),
            ),
            [Step("report", _python("-m", "benchmarks", "report", str(target.results)), 30)],
        ],
        [
            [
                *(
                    step
                    for dtype in ("bfloat16", "float32")
                    for step in _sanitizers(target, dtype, f"{dtype} and (triton or long)", 280)
                ),
                _kit(target, "sdpa"),
                _kit_calls(target),
                _large_tensors(target),
            ],
        ],
    ]


def _measured(target: Target, *steps: Step) -> list[list[Step]]:
    return [[*steps]] if target.dry else [[step] for step in steps]


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


def _tests(target: Target, name: str, select: str, seconds: float) -> Step:
    few = "any_layout and float32-64" if name == "tests" else "triton-bias_gelu-ragged-float32"
    kit = () if target.dry else ("--fusedops-backend", "triton", "--fusedops-device", "cuda")
    files = (f"tests/gpu/test_gpu{part}.py" for part in ("", "_graphs", "_cudnn"))
    command = _pytest(1 if target.dry else 16, *files, "-k", few if target.dry else select, *kit)
    return Step(name, command, seconds, _interpreted(target))


def _same_bits(target: Target) -> Step:
    few = ("-k", "without") if target.dry else ()
    return Step("same bits", _pytest(1, "tests/gpu/test_gpu_repeats.py", *few), 70, _interpreted(target))


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


def _sanitizers(target: Target, name: str, select: str, seconds: float) -> list[Step]:
    # those of other libraries are not ours to check; long rows have no backend in their name
    few = f"triton-bias_gelu-{'float32' if name == 'float32' else 'bfloat16'}"
    tests = _pytest(1, "tests/gpu/test_gpu.py", "-k", f"for_the_sanitizer and {few if target.dry else select}")
    environment = {**NO_CACHING, **_interpreted(target)}
    program = "" if target.dry else "compute-sanitizer"
    steps: list[Step] = []
    for tool in ("memcheck", "racecheck"):
        # torch's start asks for a context where there is none: an error of an API call, not of memory
        options = ("--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no")
        command = (program, *options, *tests) if program else tests
        steps.append(Step(f"{tool} {name}", command, seconds, environment, program))
    return steps


def _kernels(target: Target) -> Step:
    small = ("--device", "cpu", "--elements", "4096", "--dtype", "float32") if target.dry else ()
    ops = ("rms_norm",) if target.dry else _LISTED
    out = ("--out", str(target.results / "kernels.jsonl"))
    return Step("kernels", _python("-m", "benchmarks.kernels", "--ops", *ops, *small, *out), 90 if target.dry else 30)


def _large_tensors(target: Target) -> Step:
    few = ("-k", "swiglu or count_in_softmax") if target.dry else ()
    tests = _pytest(1, "tests/gpu/test_gpu_large.py", *few)
    return Step("large tensors", tests, 180 if target.dry else 60, _interpreted(target))


def _launch(target: Target) -> Step:
    rounds = ("--rounds", "3") if target.dry else ()
    out = str(target.results / "launch.jsonl")
    return Step("launch", _python("-m", "benchmarks.launch", "--out", out, *rounds), 90 if target.dry else 20)


def _options(target: Target, name: str) -> tuple[str, ...]:
    run = MEASUREMENTS[name]
    shared = ("--modes", "forward", "backward", "--without", "fusedops.eager", "megatron's torch path", *run.without)
    if target.dry:
        size = ("--device", "cpu", "--elements", "4096", "--seconds", "0.001", "--dtypes", "float32")
        return (*run.options, "--ops", *run.small, *shared, "torch.compile", *size)
    return (*run.options, "--ops", *run.ops, *shared, "--device", "cuda", "--seconds", "0.03")


def _compile_ahead(target: Target, name: str) -> list[Step]:
    count = min(MEASUREMENTS[name].ahead, 1 if target.dry else 16)
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
    seconds = MEASUREMENTS[name].seconds * (3 if target.dry else 1)  # on a CPU, beside the others
    out = target.results / f"{name.replace(' ', '-')}.jsonl"
    options = ("--limit", f"{seconds - 10:g}", "--out", str(out), "--continue")
    command = _python("-m", "benchmarks", *_options(target, name), *options)
    environment = {**IN_PROCESS, **_interpreted(target)}
    return Step(f"measure {name}", command, seconds, environment, restarts=_RESTARTS)
