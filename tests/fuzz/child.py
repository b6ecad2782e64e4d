"""The loop of calls, in a process of its own: a crash or a hang of a kernel ends this process, and not the run.

It writes each event as a line of JSON, and the program of the call that is about to run into a file.
"""

from __future__ import annotations

import faulthandler
import json
import math
import pathlib
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

import fusedops
from tests.fuzz.call import Call
from tests.fuzz.check import Outcome, check
from tests.fuzz.generate import generate
from tests.fuzz.machine import Target, prepare, targets
from tests.fuzz.shrink import shrunk
from tests.fuzz.situations import SITUATIONS

SLICE = 3.0  # seconds for each target before the next one has its turn
_SLOW = 8  # how many times fewer calls a target with small tensors has


def run(options: Namespace) -> None:
    """Run calls until the time or their number is reached."""
    if not {*options.situation} <= {*SITUATIONS}:
        raise SystemExit(f"fuzz: got situations {options.situation}, expected some of {', '.join(SITUATIONS)}")
    prepare(options.plugin)
    aims = targets(options.op, options.backend)
    reported: set[tuple[int, str]] = set()
    with pathlib.Path(options.last).open("w+") as last:
        for place, at in _turns(aims, options):
            _one(aims[place], place, at, options, last, reported)
    _write({"event": "end"})


def _turns(aims: Sequence[Target], options: Namespace) -> Iterator[tuple[int, int]]:
    """Yield the target and the number of each call."""
    start = options.start or []  # the places up to the one whose process ended
    numbers = [start[place] if place < len(start) else 0 for place in range(len(aims))]
    largest = max(aim.elements for aim in aims)
    if options.calls is not None:
        for place, aim in enumerate(aims):
            count = options.calls if aim.elements == largest else math.ceil(options.calls / _SLOW)
            yield from ((place, at) for at in range(numbers[place], count))
        return
    end = time.monotonic() + options.seconds
    while True:
        for place in range(len(aims)):
            turn = time.monotonic() + SLICE
            while time.monotonic() < turn:
                if time.monotonic() > end:
                    return
                yield place, numbers[place]
                numbers[place] += 1


def _one(target: Target, place: int, at: int, options: Namespace, last: Any, reported: set[tuple[int, str]]) -> None:
    """Make one call. ``reported``: the targets and kinds of the failures so far, of which the report has one each."""
    seed = f"{options.seed}:{target.op}:{target.backend}:{target.device}:{at}"
    plugins = tuple(options.plugin)
    call = generate(target, seed)
    if options.situation:
        call = replace(call, situation=options.situation[at % len(options.situation)])
    _note(last, {"place": place, "at": at, "seed": seed, "program": call.program(plugins)})
    faulthandler.dump_traceback_later(options.hang, exit=True)
    try:
        outcome = execute(call)
    except Exception as error:  # a kernel may raise anything
        kind = kind_of(error)
        faulthandler.dump_traceback_later(10 * options.hang, exit=True)
        small = call if (place, kind) in reported else shrunk(call, lambda other: _fails(other, kind))
        reported.add((place, kind))
        message = _message(small) or f"{type(error).__name__}: {error}"
        _write(
            {"event": "failed", "target": target[:3], "at": at, "seed": seed, "kind": kind, "message": message}
            | {"program": small.program(plugins), "place": place}
        )
    else:
        _write({"event": "ran", "target": target[:3], "outcome": outcome.__dict__, "place": place, "at": at})
    finally:
        faulthandler.cancel_dump_traceback_later()


def execute(call: Call) -> Outcome:
    """Run the program of a call, as a failure prints it, and return its outcome."""
    space: dict[str, Any] = {"torch": torch, "math": math, "fusedops": fusedops, "check": check}
    exec(compile(call.body(), f"<call of {call.op}>", "exec"), space)
    return space["outcome"]


def kind_of(error: Exception) -> str:
    """Return what sort of failure it is: its type, and the words of its text that are no numbers or names."""
    words = [word for word in str(error).split()[:9] if word.isalpha()]
    return " ".join([type(error).__name__, *words[:4]])


def _fails(call: Call, kind: str) -> bool:
    try:
        execute(call)
    except Exception as error:
        return kind_of(error) == kind
    return False


def _message(call: Call) -> str:
    try:
        execute(call)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _note(last: Any, fields: dict[str, Any]) -> None:
    last.seek(0)
    last.truncate()
    last.write(json.dumps(fields))
    last.flush()


def _write(event: dict[str, Any]) -> None:
    sys.__stdout__.write(json.dumps(event) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]
