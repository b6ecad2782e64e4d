"""``fusedops check``: the conformance kit on one backend."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

import fusedops
from fusedops._cli.arguments import count, usable_device
from fusedops._cli.output import print_fields, print_json, print_table, print_text
from fusedops._plugins.registration import backends

if TYPE_CHECKING:
    from fusedops.testing import Result

HELP = "run the conformance kit on one backend"
_SHOWN = 5  # messages of one op: a wrong kernel fails in most checks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("backend", metavar="NAME", help="the backend, as a policy names it")
    device = "where to run it; default: the CPU where the backend serves that, else its first device type"
    parser.add_argument("--device", metavar="DEVICE", help=device)
    parser.add_argument("--op", metavar="OP", help="one op alone")
    elements = "the largest tensor of the op's named cases; default %(default)s"
    parser.add_argument("--elements", type=count, metavar="N", default=2**17, help=elements)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from fusedops import testing  # not at import: the kit takes 0.1 s

    device = None if options.device is None else usable_device(options.device)
    checks = testing.checks(options.backend, device, options.op, options.elements)
    info = next(info for info in backends() if info.name == options.backend)
    head = {
        "backend": options.backend,
        "distribution": info.distribution,
        "version": info.version,
        "device": checks[0].device if checks else device,
        "fusedops": fusedops.__version__,
        "torch": str(torch.__version__),
    }
    if options.json:
        results = [check.run() for check in checks]
        print_json({**head, "checks": [result.to_dict() for result in results]})
        return int(any(result.failures for result in results))
    print_text(", ".join(f"{key} {value}" for key, value in head.items() if value))
    results: list[Result] = []
    for op in dict.fromkeys(check.op for check in checks):  # a table for each op: the checks of one take a while
        of_op = [check.run() for check in checks if check.op == op]
        results += of_op
        print_text()
        print_table(("op", "direction", "check", "cases", "result"), list(map(_row, of_op)), right=(3,))
    _print_failures(results)
    return int(any(result.failures for result in results))


def _row(result: Result) -> tuple[Any, ...]:
    check, failures, excused = result.check, len(result.failures), len(result.excused)
    verdict = f"FAIL {failures}" if failures else "pass"
    return check.op, check.direction, check.name, result.cases, verdict + (f", {excused} excused" if excused else "")


def _print_failures(results: Sequence[Result]) -> None:
    from fusedops.testing._failures import causes

    for op in dict.fromkeys(result.check.op for result in results):
        of_op = [result for result in results if result.check.op == op]
        found = causes((result.check.id, failure) for result in of_op for failure in result.failures)
        for cause in found[:_SHOWN]:
            print_text()
            rows = [("failed", f"{cause.check}: {cause.first.case}"), ("seen", cause.first.seen)]
            rows += [("contract", cause.first.contract)] + ([("also", cause.also)] if cause.also else [])
            print_fields(rows, least=(9,))
            print(f"reproduce {cause.first.reproduce}")  # one line, to be copied
        if len(found) > _SHOWN:
            print_text()
            print_text(f"{len(found) - _SHOWN} more messages of {op}; --json has all of them")
    failed = [result for result in results if result.failures]
    deviations = sorted({deviation for result in results for _, deviation in result.excused})
    cases, wrong = sum(r.cases for r in results), sum(len(r.failures) for r in results)
    text = f"{len(failed) or 'none'} of {len(results)} checks failed, {wrong or 'none'} of {cases} cases"
    print_text()
    print_text(f"{text}; excused by a declared deviation: {', '.join(deviations)}" if deviations else text)
