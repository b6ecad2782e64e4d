"""``make gpu``: run every step on a machine with a GPU, within nine minutes.

    python -m benchmarks.gpu [--out FOLDER] [--wheels FOLDER] [--commit HASH]
    python -m benchmarks.gpu --dry                   # every step on a CPU, small: `make gpu-dry`

It needs a Python 3.11 or newer with torch, triton, pluggy, rich, pytest and matplotlib; nothing is installed, built or
downloaded. Wheels of other libraries are unpacked from --wheels. The folder gets summary.md, steps.jsonl, logs.txt and
the measurements, one JSON file each; they are written after each step. Ctrl-C stops the steps and keeps what is there.
The exit code is 1 where a step failed or was stopped at its limit, 2 where nothing ran, 130 after Ctrl-C.
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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from benchmarks import report
from benchmarks.gpu.packages import COMMIT, ROOT, python_path
from benchmarks.gpu.runner import Outcome, log_of, run_all
from benchmarks.gpu.steps import Target, phases

SECONDS = 530.0
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
    parser.add_argument("--commit", help="of the sources, where they are in no repository")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="run these steps alone, as summary.md names them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the limit of all steps")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    if options.wheels is not None and not any(options.wheels.glob("*.whl")):
        parser.error(f"got {options.wheels} without a .whl file, expected wheels; to fix: make gpu-wheels, on Linux")
    work = ROOT / "build" / ("gpu-dry" if options.dry else "gpu")
    results = work / "results"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2"}  # up to 19 processes run at the same time
    environment |= {COMMIT: options.commit} if options.commit else {}
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
    steps, outcomes = phases(Target(results, options.dry)), list[Outcome]()
    order = [step.name for phase in steps for step in phase]
    if unknown := sorted({*(options.only or ())} - {*order}):
        parser.error(f"got --only {', '.join(unknown)}, expected names of steps: {', '.join(order)}")
    if options.only:
        steps = [[step for step in phase if step.name in options.only] for phase in steps]
    with _interruptible() as interrupted:
        for outcome in run_all(steps, environment, work / "logs", ROOT, end - time.monotonic(), interrupted):
            print(f"{outcome.status:8} {outcome.seconds:6.1f} s  {outcome.step}  {outcome.detail}", flush=True)
            outcomes.append(outcome)
            outcomes.sort(key=lambda each: order.index(each.step))
            _write(outcomes, name, results, work / "logs", out)
    bad = [outcome.step for outcome in outcomes if outcome.is_bad]
    print(f"failed: {', '.join(bad) or 'none'}; results are in {out}: start with summary.md")
    return 130 if interrupted.is_set() else int(bool(bad))


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


def _write(outcomes: Sequence[Outcome], name: str, results: Path, logs: Path, out: Path) -> None:
    """Write summary.md, steps.jsonl and logs.txt, and copy the measurements. These are eight files at most."""
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


if __name__ == "__main__":
    sys.exit(main())
