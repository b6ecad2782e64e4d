"""``fusedops explain``: the backend that serves a call, the refusals, and the fixes. Runs nothing."""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch

import fusedops
from fusedops._cli.arguments import capability, default_dtype, is_flag, is_optional, scalar, tensor, type_name
from fusedops._cli.output import JOINED, print_fields, print_json, print_text
from fusedops._contract.op import Op
from fusedops._plugins.registry import registry
from fusedops._policy.context import active_policy
from fusedops._policy.policy import AUTO
from fusedops._report.decision import Decision
from fusedops._report.reason import NOT_ABOUT_ARGUMENTS, ReasonCode
from fusedops.errors import InvalidInputError

HELP = "the backend that serves a call, the refusals, and the fixes"
DESCRIPTION = (
    "A tensor is written as sizes[:dtype][@device], such as 8,16,512,512:bf16@npu; this machine need not have the "
    "device. Without a dtype or a device it has those of the first tensor, and where the argument cannot have that "
    "dtype one that the op accepts; the first tensor is float32 on the CPU. Sizes may also be written as 8x16 or "
    "'(8,16)'. An argument that may be None is written as none."
)
_NONE = inspect.Parameter.empty  # the default of a parameter without one
_OPTIONS = {
    "backend": ("POLICY", "the argument backend= of the call, such as npu,eager"),
    "policy": ("POLICY", "the policy around the call, as of fusedops.use()"),
    "fallback": ("LEVEL", "the fallback level: warn, silent or raise"),
    "adapt": ("SETTING", "the adapt setting: none or pad"),
    "rows": ("SETTING", "the rows setting: any or independent"),
    "capability": ("MAJOR.MINOR", "the compute capability of the device; default: any"),
}


def add_ops(parser: argparse.ArgumentParser, words: Collection[str]) -> None:
    """Add one parser for each op, those of plugins included. Only an op that is in ``words`` gets its arguments."""
    registry.records()
    parsers = parser.add_subparsers(dest="op", required=True, metavar="OP", title="ops")
    for op in registry.ops.values():
        text = _literal(op.evidence.formula)
        one = parsers.add_parser(op.name, help=text, description=f"{text}. {DESCRIPTION}", allow_abbrev=False)
        one.set_defaults(parser=one)
        if op.name not in words:
            continue
        arguments = one.add_argument_group("arguments of the call")
        for name in op.parameters:
            is_tensor = name in op.tensors
            flag: dict[str, Any] = {"nargs": "?", "const": "true"} if is_flag(op, name) else {}
            arguments.add_argument(
                option(name),
                dest=f"arg_{name}",
                **flag,
                metavar="TENSOR" if is_tensor else type_name(op, name).partition("[")[0].upper(),
                help=_literal(_help(op, name)),
            )
        settings = one.add_argument_group("settings")
        for name, (metavar, sentence) in _OPTIONS.items():
            settings.add_argument(f"--{name}", metavar=metavar, help=sentence)
        settings.add_argument("--json", action="store_true", help="print JSON")


def option(name: str) -> str:
    """Return the option of a parameter. One that has the name of a setting is ``--arg-NAME``."""
    taken = name in (*_OPTIONS, "json", "help")
    return f"--{'arg-' * taken}{name.replace('_', '-')}"


def _help(op: Op, name: str) -> str:
    described = [constraint.describe() for constraint in op.constraints if constraint.name == name]
    # None is written as none here, which the note below has
    rules = [re.sub(r", or None$|^None, or ", "", text.removeprefix(f"{name}: ")) for text in described]
    default = op.signature.parameters[name].default
    notes = ["or none"] if is_optional(op, name) else []
    notes += [f"default {default}"] if default not in (None, _NONE) else []
    return "; ".join([*rules, *notes]) or type_name(op, name)


def _literal(text: str) -> str:
    return text.replace("%", "%%")


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    op = registry.ops[options.op]
    args = _arguments(op, options)
    with fusedops.use(options.policy, fallback=options.fallback, adapt=options.adapt, rows=options.rows):
        decision = fusedops.explain(op.name, **args, backend=options.backend)
        active = active_policy() if options.backend is None else active_policy().with_argument(options.backend)
    if options.json:
        print_json(decision.to_dict())
    else:
        _print(decision)
    if decision.backend is None:
        return 3
    named = list(itertools.takewhile(lambda name: name != AUTO, active.policy.order(op.name)))
    return int(_falls_back(decision, named))


def _arguments(op: Op, options: argparse.Namespace) -> dict[str, Any]:
    args: dict[str, Any] = {}
    device, dtype = "cpu", torch.float32
    has = None if options.capability is None else capability(options.capability)
    for name in op.parameters:
        text = getattr(options, f"arg_{name}")
        has_default = op.signature.parameters[name].default is not _NONE
        if text is None:
            if not has_default and is_optional(op, name):
                args[name] = None
        elif name not in op.tensors:
            args[name] = scalar(op, name, text)
        elif text.lower() == "none":
            args[name] = None
        else:
            args[name] = spec = tensor(text, default_dtype(op, name, dtype), device, has)
            device, dtype = (spec.device, spec.dtype) if name == op.tensors[0] else (device, dtype)
    missing = [name for name in op.parameters if name not in args and op.signature.parameters[name].default is _NONE]
    if missing:
        options_missing, examples = map(option, missing), (_example(op, name) for name in missing)
        raise InvalidInputError(
            f"{op.name}: got no {', '.join(options_missing)}, expected every argument without a default; to fix: "
            f"add it, such as {' '.join(examples)}"
        )
    return args


def _example(op: Op, name: str) -> str:
    """Return an argument as the command line takes it, with the value of the op's first case."""
    value = op.evidence.cases[0].args.get(name) if op.evidence.cases else None
    if isinstance(value, tuple):
        value = ",".join(map(str, cast("tuple[int, ...]", value)))
    return f"{option(name)} {type_name(op, name).upper() if value is None else value}"


def _falls_back(decision: Decision, named: Sequence[str]) -> bool:
    """Return True where the call would report a fallback: a backend before the selected one refuses it.

    A backend for another device is passed over without a report unless a policy names it and not the selected one; so
    is a backend that no policy names and that is optional, cannot run here, has no kernel for the op, or does not
    promise independent rows.
    """
    for candidate in decision.candidates:
        if candidate.backend == decision.backend:
            return False
        code = candidate.reasons[0].code if candidate.reasons else None
        is_named = candidate.backend in named
        if not is_named and _is_optional_backend(candidate.backend):
            continue
        if code is ReasonCode.DEVICE:
            is_named = is_named and decision.backend not in named
        if code is not None and (is_named or code not in (*NOT_ABOUT_ARGUMENTS, ReasonCode.ROWS)):
            return True
    return False


def _is_optional_backend(name: str) -> bool:
    record = registry.find(name)
    return record is not None and record.backend is not None and record.backend.optional


def _joined(given: str) -> str:
    """Return the text of a call's arguments, whose lines break between short arguments, not inside of one."""
    items = re.split(r", (?=[a-z_]\w* )", given)
    return ", ".join(item.replace(" ", JOINED) if len(item) < 40 else item for item in items)


def _print(decision: Decision) -> None:
    print_text(f"{decision.op}: {decision.served}")
    fields = [("given", _joined(decision.given))]
    for preference in decision.preferences:
        overridden = "" if preference.in_effect else " (overridden)"
        fields.append(("prefer", f'{preference.channel}: "{preference.text}"{overridden}'))
    if not decision.preferences:
        fields.append(("prefer", "nothing set: default order, by priority"))
    fields.append(("fallback", decision.fallback))
    fields += [("adapt", decision.adapt)] if decision.adapt != "none" else []
    fields += [("rows", decision.rows)] if decision.rows != "any" else []
    fields += [("assumed", decision.assumed)] if decision.assumed else []
    print_fields(fields, indent=2, least=(9,))
    lines: list[tuple[str, str, str]] = []
    for candidate in decision.shown:
        first, *notes = candidate.notes or [""]
        lines.append((candidate.status, candidate.backend, first))
        lines += [("", "", note) for note in notes]
    print_fields(lines, indent=2, least=(9, 8))
    if decision.others:
        print_fields([("others", decision.others)], indent=2, least=(9,))
