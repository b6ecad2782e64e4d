"""The command ``python -m tests.fuzz``: starts the loop in a process of its own, and reports however that ends."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from tests.fuzz.report import Report

_HANG = 120.0  # seconds; the slowest call takes a few on a busy machine


def main(argv: list[str] | None = None) -> int:
    """Run, print the report, and return 1 where a call failed."""
    options = _options(argv)
    if options.child:
        from tests.fuzz import child

        child.run(options)
        return 0
    if options.concurrency:
        from tests.fuzz import concurrency

        return concurrency.run(options.seconds, options.seed, options.calls)
    print(f"seed {options.seed}", flush=True)
    report = Report()
    _supervise(options, report)
    print(report)
    return 1 if report.failing else 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="how long; default 1")
    length.add_argument("--calls", type=int, help="calls of each op on each backend, an eighth on a slow one")
    parser.add_argument("--op", action="append", default=[], help="only this op; may be repeated")
    parser.add_argument("--backend", action="append", default=[], help="only this backend; may be repeated")
    parser.add_argument("--seed", type=int, help="of every call; default: the time")
    parser.add_argument("--situation", action="append", default=[], help="of each call, in turn; may be repeated")
    parser.add_argument("--plugin", action="append", default=[], help="a module with one more backend")
    parser.add_argument("--hang", type=float, default=_HANG, help="seconds after which a call hangs; default 120")
    parser.add_argument(
        "--concurrency",
        action="store_true",
        help="threads, forks and interpreter exit instead; --calls is how often each",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--last", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.seed = int(time.time()) if options.seed is None else options.seed
    options.seconds = 60 * (options.minutes if options.minutes is not None else 1.0)
    return options


def _supervise(options: argparse.Namespace, report: Report) -> None:
    """Run children until one ends by itself, and note the call at which each of the others ended."""
    end = time.monotonic() + options.seconds
    numbers: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        last = pathlib.Path(folder) / "last.json"
        while True:
            code, errors, ended = _child(options, report, last, numbers, max(end - time.monotonic(), 0.0))
            if ended:
                return
            try:
                call = json.loads(last.read_text())
            except (OSError, ValueError):
                raise SystemExit(f"fuzz: the loop ended with {code} before its first call:\n{errors}") from None
            column = "hang" if "Timeout (" in errors else "crash"
            call |= {"target": call["seed"].split(":")[1:4], "kind": column}
            call["message"] = f"the process ended with {code}: {errors[-1200:]}"
            report.failed(column, call)
            numbers[call["place"]] = call["at"] + 1
            if options.calls is None and time.monotonic() > end:
                return


def _child(
    options: argparse.Namespace, report: Report, last: pathlib.Path, numbers: dict[int, int], seconds: float
) -> tuple[int, str, bool]:
    """Run one child; return its exit status, its errors, and True where it came to its end."""
    arguments = ["--seed", str(options.seed), "--hang", str(options.hang), "--last", str(last), "--child"]
    arguments += ["--calls", str(options.calls)] if options.calls is not None else ["--minutes", str(seconds / 60)]
    for flag in ("op", "backend", "situation", "plugin"):
        arguments += [part for value in getattr(options, flag) for part in (f"--{flag}", value)]
    if numbers:
        arguments += ["--start", json.dumps([numbers.get(at, 0) for at in range(max(numbers) + 1)])]
    ended = False
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-m", "tests.fuzz", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            event: dict[str, Any] = json.loads(line)
            if "place" in event:
                numbers[event["place"]] = event["at"] + 1
            if event["event"] == "ran":
                report.ran(event)
            elif event["event"] == "failed":
                report.failed("wrong", event)
            else:
                ended = True
        code = process.wait()
        errors.seek(0)
        text = errors.read()
    if ended and code and "Timeout (" not in text:
        print(f"fuzz: the loop ended with {code} after its last call:\n{text}", file=sys.stderr)
        report.counts[("", "", ""), "crash"] += 1
    return code, text, ended


if __name__ == "__main__":
    sys.exit(main())
