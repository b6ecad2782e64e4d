"""``fusedops bench``: the time of each backend, of plain torch, and of a copy.

A copy of the same size is the yardstick of an op that reads one tensor and writes one. Milliseconds are
of one machine.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fusedops._cli import rank
from fusedops._cli.arguments import count, floating_dtype, seconds, usable_device
from fusedops._cli.output import print_json, print_table, print_text, print_warning
from fusedops._explain import find_op
from fusedops._plugins.registration import backends
from fusedops._plugins.registry import registry
from fusedops.errors import FusedOpsError, InvalidInputError

if TYPE_CHECKING:
    from fusedops import Case, Op

HELP = "the time of each backend here, beside plain torch and a copy"
DESCRIPTION = (
    "ms is the median, p20-p80 its spread; copies is the median in units of the time of a copy of the first tensor, "
    "the yardstick of an op that reads and writes one; x plain torch is plain torch's median divided by this one."
)
INTERRUPTED = 130  # as a shell reports Ctrl-C
_PLAIN = "plain torch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("ops", nargs="*", metavar="OP", help="the ops; default: all")
    parser.add_argument("--device", metavar="DEVICE", help="a torch device; default: the accelerator, else cpu")
    parser.add_argument("--dtype", default="float32", metavar="DTYPE", help="of the tensors; default %(default)s")
    elements = "the largest tensor, about: cases are cut to it, to 32 rows at least; default %(default)s"
    parser.add_argument("--elements", type=count, default=2**22, metavar="N", help=elements)
    length = "measuring time of each line, about; default %(default)s"
    parser.add_argument("--seconds", type=seconds, default=0.2, metavar="S", help=length)
    ranked = "print a policy with the backends in the order of their times instead; default KIND: %(const)s"
    parser.add_argument("--rank", nargs="?", choices=rank.KINDS, const=rank.KINDS[0], metavar="KIND", help=ranked)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    registry.records()
    ops = [find_op(name, "bench") for name in dict.fromkeys(options.ops)] or list(registry.ops.values())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    default = accelerator.type if accelerator else "cpu"
    device = usable_device(default if options.device is None else options.device)
    kind = floating_dtype(options.dtype)
    _warn_if_busy()
    records: list[dict[str, Any]] = []
    code = 0
    try:
        for op, case in cases(ops, options.elements):
            _measure_case(op, case, kind, device, options, records)
    except KeyboardInterrupt:
        print_warning(f"stopped; {len(records)} measurements are kept")
        code = INTERRUPTED
    if options.rank:
        _print_policy(records, options.json)
    elif options.json:
        print_json(records)
    elif records:
        print_text()
        print_text("copies: the time in units of a copy of the first tensor")
    return code or int(not records)


def _print_policy(records: list[dict[str, Any]], json: bool) -> None:
    orders, general = rank.orders_of(records, _PLAIN)
    text = rank.policy_text(orders, general)
    if json:
        print_json({"policy": text, "orders": orders})
    elif orders:
        print(text)  # on one line, to be copied


def _measure_case(
    op: Op, case: Case, dtype: torch.dtype, device: str, options: argparse.Namespace, records: list[dict[str, Any]]
) -> None:
    """Measure one case, add its records, and print them; also those of a case that Ctrl-C stopped."""
    start = len(records)
    try:
        for record in measure(op, case, dtype, device, options.seconds, options.rank != rank.KINDS[0]):
            records.append(record)  # one by one: Ctrl-C keeps the finished ones
    finally:
        if not (options.json or options.rank) and records[start:]:
            print_text()
            print_text(f"{op.name}, {case.name}: {case.args[op.tensors[0]]} {options.dtype} on {device}")
            header = ("direction", "provider", "ms", "p20-p80", "copies", "x plain torch")
            print_table(header, list(map(_row, records[start:])), right=(2, 3, 4, 5))


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    spread = f"{record['ms_p20']:.3f}-{record['ms_p80']:.3f}"
    ratios = f"{record['copies']:.2f}", f"{record['speedup']:.2f}" if record["speedup"] else "-"
    return record["direction"], record["provider"], f"{record['ms']:.3f}", spread, *ratios


def cases(ops: list[Op], elements: int) -> Iterator[tuple[Op, Case]]:
    """Yield the ops' own cases, cut to tensors of about ``elements`` elements, with 32 rows at least.

    A case is left out where a size of one tensor is cut alone, such as the keys of a mask.
    """
    from fusedops import testing  # not at import: the kit takes 0.1 s
    from fusedops.testing._calls import specs

    for op in ops:
        for case in op.evidence.cases:
            cut = testing.shrunk(case, elements)
            if op.invalid(op.prepared(op.bind((), specs(op, cut, torch.float32)))) is None:
                yield op, cut


def measure(
    op: Op, case: Case, dtype: torch.dtype, device: str, seconds: float, gradients: bool = True
) -> Iterator[dict[str, Any]]:
    """Yield one record for each direction and each of plain torch and the backends that take the case.

    Without ``gradients`` there is only forward, for which nothing is saved.
    """
    from fusedops import testing
    from fusedops.testing import _timing

    args = testing.arguments(op, case, dtype, device)
    first: torch.Tensor = args[op.parameters.index(op.tensors[0])]
    if first.dtype != dtype:  # arguments() takes an accepted dtype instead
        given, accepted = (str(each).removeprefix("torch.") for each in (dtype, first.dtype))
        raise InvalidInputError(
            f"{op.name}: got --dtype {given}, expected one that the op accepts; to fix: write --dtype {accepted}"
        )
    providers: dict[str, Callable[..., Any]] = {_PLAIN: op.evidence.unfused}
    for info in backends():
        if _timing.refusal(info, op, args) is None:
            providers[info.name] = _timing.served_by(info.name, op)
    leaves, inputs = _timing.with_grad(op, args) if gradients else (list(args), [])
    results = dict(_first_calls(op, providers, leaves))
    if not results:
        return
    work: dict[str, dict[str, Callable[[], object]]] = {
        "forward": {name: (lambda f=providers[name]: f(*leaves)) for name in results}
    }
    outputs = _timing.floating(next(iter(results.values())))
    if inputs and any(y.requires_grad for y in outputs):
        grads = [torch.randn_like(y) for y in outputs]
        work["backward"] = {name: _timing.backward_of(y, inputs, grads) for name, y in results.items()}
    copy = _timing.copy_of(torch.empty_like(first))
    for direction, functions in work.items():
        times = testing.interleaved({**functions, "copy": copy}, device, seconds)
        for name in functions:
            time, plain = times[name], times.get(_PLAIN)
            yield {
                "op": op.name,
                "case": case.name,
                "shape": list(case.args[op.tensors[0]]),
                "dtype": str(dtype).removeprefix("torch."),
                "device": device,
                "direction": direction,
                "provider": name,
                "ms": round(time.p50, 5),
                "ms_p20": round(time.p20, 5),
                "ms_p80": round(time.p80, 5),
                "copies": round(time.p50 / times["copy"].p50, 2),
                "speedup": round(plain.p50 / time.p50, 2) if plain else None,
            }


def _first_calls(op: Op, providers: dict[str, Callable[..., Any]], args: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the results of each provider's first call; one that raises is left out, with a warning."""
    for name, function in providers.items():
        try:
            yield name, function(*args)
        except FusedOpsError:
            raise
        except Exception as error:  # a kernel may raise anything, and another one is still worth its time
            print_warning(f"left out: {name} for {op.name}: {type(error).__name__}: {error}")


def _warn_if_busy() -> None:
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores:
        print_warning(
            f"got a load average of {load:.1f} on {cores} cores, expected an idle machine: times are too long, and "
            f"their spread is wide; to fix: stop other programs"
        )
