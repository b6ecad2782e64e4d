"""``make gpu``: the steps on a machine with a GPU, as three commands of less than ten minutes each.

    python -m benchmarks.gpu [--command 1 2 3] [--out FOLDER] [--wheels FOLDER] [--kernels FILE] [--commit HASH]
    python -m benchmarks.gpu --dry                   # every step on a CPU, small: `make gpu-dry`

Where there is time for one alone, it is the first: what is new, the same bits, the kernels, fusedops' headline calls,
all tests. The second has the other libraries and sizes, the third the sanitizers. It needs a Python 3.11 or newer with
torch, triton, pluggy, rich, pytest and matplotlib; nothing is installed, built or downloaded. Wheels of other libraries
are unpacked from --wheels. The folder gets summary.md, steps.jsonl, logs.txt and the measurements, one JSON file each;
they are written after each step, and each command prints summary.md last. Ctrl-C stops the steps and keeps what is
there. The exit code is 1 where a step failed or was stopped at its limit, 2 where nothing ran, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from benchmarks import report
from benchmarks.gpu import kernel_cache
from benchmarks.gpu.packages import COMMIT, ROOT, python_path
from benchmarks.gpu.runner import Outcome, log_of, run_all
from benchmarks.gpu.steps import Step, Target, commands

SECONDS = 570.0  # the kernels are packed after it
PACKED = "kernels.tar.gz"
LAST = "nvidia-h200"  # the folder of the committed run
_GPU_SECONDS = 60.0  # a driver that takes longer to name its GPU does not work
_COUNTS = re.compile(
    r"^=*\s*((?:\d+ \w+, )*\d+ (?:passed|failed|errors?|skipped|deselected)\b.*?|stopped after [\d.]+ s: .*?)"
    r"(?: in [\d.]+s.*)?=*$"
)
_FAILED = re.compile(r"^(?:FAILED|ERROR|failed:|slower:) ?(.*)")


def main() -> int:
    """Run the steps, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<GPU>")
    parser.add_argument("--wheels", type=Path, help="a folder of .whl files to unpack and import from")
    parser.add_argument("--command", type=int, nargs="+", default=(1, 2, 3), choices=(1, 2, 3), help="default: all")
    parser.add_argument(
        "--kernels", type=Path, help=f"compiled kernels: unpacked from this file, if it is there; packed as {PACKED}"
    )
    parser.add_argument("--commit", help="of the sources, where they are in no repository")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run these steps alone, as summary.md names them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the limit of a command")
    options = parser.parse_args()
    if options.wheels is not None and not any(options.wheels.glob("*.whl")):
        parser.error(f"got {options.wheels} without a .whl file, expected wheels; to fix: make gpu-wheels, on Linux")
    work = ROOT / "build" / ("gpu-dry" if options.dry else "gpu")
    results = work / "results"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2"}  # up to 22 processes run at the same time
    environment |= kernel_cache.ENVIRONMENT | ({COMMIT: options.commit} if options.commit else {})
    name = "a CPU, dry" if options.dry else _gpu(environment)
    if name is None:
        return 2
    out: Path = options.out or (results if options.dry else report.RESULTS / re.sub(r"\W+", "-", name.lower()))
    try:
        shutil.rmtree(work, ignore_errors=True)
        results.mkdir(parents=True)
        environment["PYTHONPATH"] = python_path(work, options.wheels)
        out.mkdir(parents=True, exist_ok=True)
        _write([], name, results, work / "logs", out)
    except OSError as error:
        print(f"got {error}, expected folders to write to; to fix: remove {work}, or pass another --out")
        return 2
    all_commands, outcomes = commands(Target(results, options.dry)), list[Outcome]()
    chosen = {number: all_commands[number - 1] for number in options.command}
    order = [step.name for phases in chosen.values() for phase in phases for step in phase]
    if unknown := sorted({*(options.only or ())} - {*order}):
        parser.error(f"got --only {', '.join(unknown)}, expected names of steps: {', '.join(order)}")
    if options.kernels is not None:
        print(_unpacked(options.kernels), flush=True)
    with _interruptible() as interrupted:
        for number, phases in chosen.items():
            end = time.monotonic() + options.seconds
            steps = [[step for step in phase if step.name in (options.only or order)] for phase in phases]
            print("\n".join(_planned(number, steps)), flush=True)
            for outcome in run_all(steps, environment, work / "logs", ROOT, end - time.monotonic(), interrupted):
                print(f"{outcome.status:8} {outcome.seconds:6.1f} s  {outcome.step}  {outcome.detail}", flush=True)
                outcomes.append(outcome)
                outcomes.sort(key=lambda each: order.index(each.step))
                _write(outcomes, name, results, work / "logs", out)
            if options.kernels is not None:
                count, all_kernels = kernel_cache.pack(out / PACKED)
                print(f"packed {count} of {all_kernels} compiled kernels into {out / PACKED}")
            print("\n".join(_write(outcomes, name, results, work / "logs", out)), flush=True)
    bad = [outcome.step for outcome in outcomes if outcome.is_bad]
    print(f"failed: {', '.join(bad) or 'none'}; results are in {out}: start with summary.md")
    return 130 if interrupted.is_set() else int(bool(bad))


def _planned(number: int, phases: Sequence[Sequence[Step]]) -> list[str]:
    """Return a line for each step: its limit, and its time in the last run that is committed, on 16 cores."""
    path = report.RESULTS / LAST / "steps.jsonl"
    last = {row["step"]: row["seconds"] for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    expected = [[min(last.get(step.name, step.seconds), step.seconds) for step in phase] for phase in phases if phase]
    lines = [f"command {number}: {sum(map(max, expected)):.0f} s by {LAST}'s last run, by the limit of a new step"]
    for at, phase in enumerate(phases, 1):
        for step in phase:
            took = f"took {last[step.name]:.0f} s" if step.name in last else ""
            lines.append(f"  {at}  {step.name:24} limit {step.seconds:4.0f} s  {took}".rstrip())
    return lines


def _unpacked(kernels: Path) -> str:
    try:
        return f"unpacked {kernel_cache.unpack(kernels)} compiled kernels"
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        return f"no compiled kernels: {error}"


@contextmanager
def _interruptible() -> Iterator[Event]:
    """Yield what the first Ctrl-C, or SIGTERM, sets. A second one ends this process."""
    interrupted, before = Event(), {which: signal.getsignal(which) for which in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for which, handler in before.items():
            signal.signal(which, handler)

    def interrupt(*_: object) -> None:
        interrupted.set()
        restore()

    for which in before:
        signal.signal(which, interrupt)
    try:
        yield interrupted
    finally:
        restore()


def _gpu(environment: dict[str, str]) -> str | None:
    """Return the name of the GPU, or None with a message."""
    command = (sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())")
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=_GPU_SECONDS
        )
    except subprocess.TimeoutExpired:
        why = [f"no answer of the driver in {_GPU_SECONDS:.0f} s"]
    else:
        if done.returncode == 0:
            return done.stdout.strip().splitlines()[-1]
        why = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    print(f"got no GPU in {sys.executable} ({why[0]}), expected one; to fix: pass a Python with torch for the GPU")
    return None


def _write(outcomes: Sequence[Outcome], name: str, results: Path, logs: Path, out: Path) -> list[str]:
    """Write summary.md, steps.jsonl and logs.txt, and copy the measurements: seven files at most for a command. Return
    the lines of summary.md.
    """
    lines = [f"# {name}", "", "| step | outcome | seconds | detail |", "|---|---|---|---|"]
    steps: list[str] = []
    with (out / "logs.txt").open("w", encoding="utf-8") as all_logs:
        for outcome in outcomes:
            path = log_of(logs, outcome.step)
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
            all_logs.write(f"\n==== {outcome.step}: {outcome.status} {outcome.detail}\n{text}")
            log = text.splitlines()
            counts = [match[1].strip(" =") for line in log if (match := _COUNTS.match(line.strip()))]
            failed = [match[1] for line in log if (match := _FAILED.match(line))]
            detail = "; ".join(filter(None, [outcome.detail, *counts[-1:]]))
            lines.append(f"| {outcome.step} | {outcome.status} | {outcome.seconds:.1f} | {detail} |")
            steps.append(json.dumps({**outcome._asdict(), "counts": counts[-1:], "failed": failed}))
            lines += [f"| | | | {entry[:200].replace('|', '/')} |" for entry in failed[:20]]
    (out / "steps.jsonl").write_text("\n".join(steps) + "\n", encoding="utf-8")
    lines += ["", *report.sections(results)]
    (out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if out.resolve() != results.resolve():
        for path in sorted(results.glob("*.jsonl")):
            shutil.copy(path, out)
    return lines


if __name__ == "__main__":
    sys.exit(main())
