"""``make gpu``: run every step on a machine with a GPU, within nine minutes.

    python -m benchmarks.gpu [--out FOLDER] [--wheels FOLDER] [--commit HASH]
    python -m benchmarks.gpu --dry                   # every step on a CPU, small: `make gpu-dry`

It needs a Python 3.11 or newer with torch, triton, pluggy, rich, pytest and matplotlib; nothing is installed, built or
downloaded. Wheels of other libraries are unpacked from --wheels. The folder gets summary.md, steps.jsonl, logs.txt and
the measurements, one JSON file each. The exit code is 1 where a step failed or was stopped at its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.gpu.packages import COMMIT, ROOT, python_path
from benchmarks.gpu.runner import Outcome, log_of, run_all
from benchmarks.gpu.steps import Target, phases

SECONDS = 530.0
_COUNTS = re.compile(
    r"^=*\s*((?:\d+ \w+, )*\d+ (?:passed|failed|errors?|skipped|deselected)\b.*?)(?: in [\d.]+s.*)?=*$"
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
    parser.add_argument("--seconds", type=float, default=SECONDS, help="the limit of all steps")
    options = parser.parse_args()
    work = ROOT / "build" / ("gpu-dry" if options.dry else "gpu")
    shutil.rmtree(work, ignore_errors=True)
    results = work / "results"
    results.mkdir(parents=True)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": python_path(work, options.wheels), "PYTHONUNBUFFERED": "1"}
    if options.commit:
        environment[COMMIT] = options.commit
    name = "a CPU, dry" if options.dry else _gpu(environment)
    if name is None:
        return 2
    out: Path = options.out or (results if options.dry else report.RESULTS / re.sub(r"\W+", "-", name.lower()))
    out.mkdir(parents=True, exist_ok=True)
    logs, outcomes = work / "logs", list[Outcome]()
    for outcome in run_all(phases(Target(results, options.dry)), environment, logs, ROOT, options.seconds):
        print(f"{outcome.status:8} {outcome.seconds:6.1f} s  {outcome.step}  {outcome.detail}", flush=True)
        outcomes.append(outcome)
    _write(outcomes, name, results, logs, out)
    bad = [outcome.step for outcome in outcomes if outcome.is_bad]
    print(f"failed: {', '.join(bad) or 'none'}; results are in {out}: start with summary.md")
    return int(bool(bad))


def _gpu(environment: dict[str, str]) -> str | None:
    """Return the name of the GPU, or None with a message."""
    command = (sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    why = done.stderr.strip().splitlines()[-1:] or ["no message"]
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
