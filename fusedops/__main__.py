"""``python -m fusedops`` (and ``fusedops``): looks at an installation, at choices, at speed, at conformance.

    fusedops info                  versions, devices, backends and why not: the text to paste into an issue
    fusedops explain OP --x 8,16,512,512:bf16@npu --mask 8,1,512,512 --scale 0.125
    fusedops matrix                op by backend, with each backend's limits
    fusedops doctor                what is wrong with this installation, and the fix
    fusedops check NAME            whether a backend's kernels hold what the ops' contracts say
    fusedops bench [OP ...]        how fast each backend is here, beside plain torch and a copy

Exit codes: 0 all is well; 1 doctor found a problem, a check failed, or explain's call would fall back; 2 the command
line, or the call that it describes, is not valid, or the backend to check cannot run; 3 explain's call would be served
by nobody.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import torch

import fusedops
from fusedops._op import OPS
from fusedops._policy import unknown_name

_WIDTH = 80
_SHOWN = 3  # failures of one check: a kernel that is wrong is so in every case
_COLOURS = {"ready": "32", "unavailable": "33", "failed": "31", "chosen": "32", "refused": "33", "problem": "31"}
_DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "f16": torch.float16, "half": torch.float16, "fp32": torch.float32,
    "f32": torch.float32, "float": torch.float32, "fp64": torch.float64, "f64": torch.float64, "double": torch.float64,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="fusedops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("info", "matrix", "doctor"):
        commands.add_parser(name).add_argument("--json", action="store_true")
    checking = commands.add_parser("check", help="whether a backend holds what the ops' contracts say")
    checking.add_argument("backend", metavar="NAME")
    checking.add_argument("--device", help="where to run it; the CPU where it serves that, else its first device type")
    checking.add_argument("--op", help="one op alone")
    checking.add_argument(
        "--elements", type=int, default=2**17, help="how large named cases may be; default %(default)s"
    )
    checking.add_argument("--json", action="store_true")
    explaining = commands.add_parser("explain", help="who would serve a call, who refused it, and why")
    of_ops = explaining.add_subparsers(dest="op", required=True, metavar="OP")
    for op in OPS.values():
        one = of_ops.add_parser(op.name, help=op.formula)
        one.add_argument("--backend", help="a policy for this call alone")
        one.add_argument("--adapt", help="the adapt setting: none or pad")
        one.add_argument("--json", action="store_true")
        for parameter in op.parameters:
            shape = "sizes[:dtype][@device]" if parameter in op.tensors else None
            one.add_argument(f"--{parameter.replace('_', '-')}", dest=f"arg_{parameter}", metavar=shape)
    timing = commands.add_parser("bench", help="how fast each backend is here, beside plain torch and a copy")
    timing.add_argument("ops", nargs="*", metavar="OP", help=f"of {', '.join(OPS)}; all, where none is named")
    timing.add_argument("--device", help="a torch device; the accelerator where there is one, else cpu")
    timing.add_argument("--dtype", default="float32", help="of the tensors, such as bf16")
    timing.add_argument("--elements", type=int, default=2**22, help="of the largest tensor; cases are cut to it")
    timing.add_argument("--seconds", type=float, default=0.2, help="for each line, about")
    timing.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        return _COMMANDS[options.command](options)
    except BrokenPipeError:  # `fusedops matrix | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (fusedops.InvalidInputError, fusedops.PolicyError, fusedops.PluginError) as error:
        print(f"fusedops: {error}", file=sys.stderr)
        return 2


def _info(options: argparse.Namespace) -> int:
    from fusedops import _health

    found = _health.environment()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(f"fusedops  {found['fusedops']}")
    print(f"torch     {found['torch']}")
    for name, version in found["versions"].items():
        print(f"{name:9} {version or 'not installed'}")
    print(f"python    {found['python']} on {found['platform']}")
    for kind, names in found["devices"].items():
        print(f"{kind:9} {', '.join(dict.fromkeys(names))}" + (f" (x {len(names)})" if len(names) > 1 else ""))
    for name, value in found["variables"].items():
        print(f"{name}={value}")
    _wrapped("policy    ", found["policy"])
    print(f"\n{'backend':10} {'state':12} {'priority':>8}  {'devices':12} {'from'}")
    for row in found["backends"]:
        where = f"{row['distribution']} {row['version']}".strip()
        state = _coloured(f"{row['state']:12}", row["state"])
        print(f"{row['name']:10} {state} {row['priority']:>8}  {','.join(row['devices']) or '-':12} {where}")
        _wrapped("           ", row["file"] or "(no file)")
        if row["why"]:
            _wrapped("           ", row["why"])
            _wrapped("           to do: ", row["fix"])
    return 0


def _explain(options: argparse.Namespace) -> int:
    from fusedops._constraint import ReasonCode

    op = OPS[options.op]
    given: dict[str, Any] = {}
    device = "cpu"
    for name in op.parameters:
        text = getattr(options, f"arg_{name}")
        if text is None:
            continue
        if name in op.tensors:
            given[name] = spec = _spec(text, "bool" if name == "mask" else "float32", device)
            device = spec.device  # the first tensor's, for those that name none
        else:
            given[name] = _scalar(op.name, name, text)
    with fusedops.use(adapt=options.adapt):
        decision = fusedops.explain(op.name, **given, backend=options.backend)
    if options.json:
        print(json.dumps(decision.to_dict(), indent=2))
    else:
        for line in str(decision).splitlines():
            # the text begins at column 12, behind the kind of line, or at 21, behind the backend too
            start = 21 if line[:11].strip() in ("", "chosen", "eligible", "refused") else 12
            start = start if line.startswith("  ") else 0
            _wrapped(line[:start], line[start:])
    if decision.backend is None:
        return 3
    for verdict in decision.candidates:
        if verdict.backend == decision.backend:
            return 0
        if any(reason.code not in (ReasonCode.DEVICE, ReasonCode.NO_KERNEL) for reason in verdict.reasons):
            return 1  # a backend for this device, or one that the policy names, was to serve it and does not
    return 0


def _matrix(options: argparse.Namespace) -> int:
    from fusedops import _health

    found = _health.limits()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for name, rows in found.items():
        print(f"{name}: {OPS[name].formula}")
        for row in rows:
            ready = "" if row["ready"] else ", not ready here"
            kind = "" if row["direction"] else "no kernel: another backend serves "
            where = f"{kind}on {','.join(row['devices'])}{ready}"
            _wrapped(f"  {row['backend']:8} {row['direction'] or 'none':8} ", where)
            for text in row["limits"]:
                _wrapped("                    - ", text)
            for text in row["deviations"]:
                _wrapped("                    deviation ", text)
            for text in row["adaptations"]:
                _wrapped("                    adapts ", text)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fusedops import _health

    found = list(_health.problems())
    if options.json:
        print(json.dumps([{"what": problem.what, "fix": problem.fix} for problem in found], indent=2))
        return int(bool(found))
    for problem in found:
        _wrapped("problem  ", problem.what, "problem")
        _wrapped("fix      ", problem.fix)
    ready = [row["name"] for row in _health.environment()["backends"] if row["state"] == "ready"]
    print(f"{len(found) or 'no'} problem{'s' * (len(found) != 1)}; ready here: {', '.join(ready) or 'none'}")
    return int(bool(found))


def _check(options: argparse.Namespace) -> int:
    from fusedops import testing

    found = testing.checks(options.backend, options.device, options.op, options.elements)
    info = next(info for info in fusedops.backends() if info.name == options.backend)
    head = {
        "backend": options.backend,
        "distribution": info.distribution,
        "version": info.version,
        "device": found[0].device,
        "fusedops": fusedops.__version__,
        "torch": str(torch.__version__),
    }
    results: list[testing.Result] = []
    if not options.json:
        _wrapped("", ", ".join(f"{key} {value}" for key, value in head.items() if value))
        print(f"{'op':22} {'direction':9} {'check':12} {'cases':>5}")
    for check in found:
        result = check.run()
        results.append(result)
        if not options.json:
            failed, excused = len(result.failures), len(result.excused)
            verdict = _coloured("FAIL", "problem") + f" {failed}" if failed else _coloured("pass", "ready")
            verdict += f", {excused} excused" if excused else ""
            print(f"{check.op:22} {check.direction:9} {check.name:12} {result.cases:>5}  {verdict}", flush=True)
    if options.json:
        print(json.dumps({**head, "checks": [result.to_dict() for result in results]}, indent=2))
    else:
        _told(results)
    return int(any(result.failures for result in results))


def _told(results: Sequence[Any]) -> None:
    """Each failure, and the count of them."""
    for result in results:
        for failure in result.failures[:_SHOWN]:
            print()
            _wrapped("failed    ", f"{result.check.id}: {failure.case}", "problem")
            _wrapped("seen      ", failure.seen)
            _wrapped("contract  ", result.check.contract)
            print(f"reproduce {failure.reproduce}")  # one line, to be copied
        if len(result.failures) > _SHOWN:
            print(f"\n{len(result.failures) - _SHOWN} more of {result.check.id}; --json has them all")
    failed = [result for result in results if result.failures]
    deviations = sorted({deviation for result in results for _, deviation in result.excused})
    cases, wrong = sum(r.cases for r in results), sum(len(r.failures) for r in results)
    said = f"{len(failed) or 'none'} of {len(results)} checks failed, {wrong or 'none'} of {cases} cases"
    print()
    _wrapped("", f"{said}; excused by a declared deviation: {', '.join(deviations)}" if deviations else said)


def _bench(options: argparse.Namespace) -> int:
    from fusedops import _bench

    for name in options.ops:
        if name not in OPS:
            raise fusedops.PolicyError(f"bench: {unknown_name('op', name, list(OPS))}")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = options.device or (accelerator.type if accelerator else "cpu")
    dtype = _dtype(options.dtype)
    if dtype is None or not dtype.is_floating_point:
        raise fusedops.InvalidInputError(
            f"--dtype is given as {options.dtype!r}; needs a floating dtype of torch; write it like bf16"
        )
    records: list[dict[str, Any]] = []
    for op, case in _bench.cases(options.ops, options.elements):
        if not options.json:
            print(f"\n{op.name}, {case.name}: {case.args['x']} {options.dtype} on {device}")
        for row in _bench.measure(op, case, dtype, device, options.seconds):
            records.append(row)
            if not options.json:
                print(
                    f"  {row['direction']:8}  {row['who']:12} {row['ms']:12.3f} ms {row['copies']:8.2f} copies "
                    f"{row['speedup']:8.2f}x plain torch"
                )
    if options.json:
        print(json.dumps(records, indent=2))
    return 0


_COMMANDS = {
    "info": _info,
    "explain": _explain,
    "matrix": _matrix,
    "doctor": _doctor,
    "check": _check,
    "bench": _bench,
}


def _dtype(name: str) -> torch.dtype | None:
    found = _DTYPES.get(name, getattr(torch, name, None))
    return found if isinstance(found, torch.dtype) else None


def _spec(text: str, dtype: str, device: str) -> fusedops.TensorSpec:
    """``8,16,512,512:bf16@npu``; dtype and device may be left out."""
    rest, _, on = text.partition("@")
    sizes, _, name = rest.partition(":")
    kind = _dtype(name or dtype)
    try:
        shape = tuple(int(size) for size in sizes.replace("x", ",").split(",") if size.strip())
    except ValueError:
        shape = None
    if shape is None or kind is None:
        raise fusedops.InvalidInputError(
            f"a tensor is given as {text!r}; needs sizes[:dtype][@device]; write it like 8,16,512,512:bf16@npu"
        )
    return fusedops.TensorSpec(shape, kind, on or device)


def _scalar(op: str, name: str, text: str) -> Any:
    kind = str(OPS[op].signature.parameters[name].annotation).split(" ")[0]
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        return {"float": float, "int": int}.get(kind, str)(text)
    except (KeyError, ValueError):
        raise fusedops.InvalidInputError(
            f"{op}: {name} is given as {text!r}; needs {'true or false' if kind == 'bool' else f'one {kind}'}; "
            f"write it like {'true' if kind == 'bool' else '1'}"
        ) from None


def _coloured(text: str, what: str) -> str:
    plain = not sys.stdout.isatty() or "NO_COLOR" in os.environ
    return text if plain else f"\033[{_COLOURS[what]}m{text}\033[0m"


def _wrapped(head: str, text: str, colour: str = "") -> None:
    width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
    indent = " " * len(head)
    lines = textwrap.wrap(text, max(20, width - len(indent)), break_on_hyphens=False) or [""]
    for at, line in enumerate(lines):
        before = indent if at else _coloured(head, colour) if colour else head
        print(f"{before}{line}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
