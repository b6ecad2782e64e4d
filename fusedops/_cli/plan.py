"""``fusedops plan``: the calls of a whole model on a device that need not exist."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.nn import Module

import fusedops
from fusedops._cli.arguments import capability, count, floating_dtype
from fusedops._cli.output import print_error, print_json
from fusedops._explain import find_op
from fusedops._plugins.registry import registry
from fusedops._report.direction import call_name
from fusedops._report.foreign_text import error_text
from fusedops._report.suggestion import unknown_name
from fusedops.errors import InvalidInputError, PolicyError

if TYPE_CHECKING:
    from fusedops._plan.report import PlanRow

HELP = "the calls of a whole model on a device that need not exist"
DESCRIPTION = (
    "MODEL is a config.json of transformers, or its folder; the name of a config class with sizes, such as "
    "LlamaConfig:num_hidden_layers=2; or module:function, which returns a model. No weights are read or made."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="what to plan")
    device = "a device type, or a chip that a backend knows, such as A2 or H100; of several also what the others change"
    parser.add_argument("--device", metavar="DEVICE", nargs="+", default=["cpu"], help=f"{device}; default: cpu")
    parser.add_argument("--capability", metavar="MAJOR.MINOR", help="the compute capability of the device")
    packages = "packages that are installed beside the device, such as flash-attn"
    parser.add_argument("--packages", metavar="NAME", nargs="+", default=[], help=packages)
    parser.add_argument("--dtype", metavar="DTYPE", help="of the weights; default: the config's, else bfloat16")
    parser.add_argument("--batch", type=count, metavar="N", default=1, help="sequences or images; default: 1")
    parser.add_argument("--length", type=count, metavar="N", default=128, help="tokens; default: %(default)s")
    run = parser.add_mutually_exclusive_group()
    run.add_argument("--train", action="store_true", help="a step of training; else one forward in evaluation")
    run.add_argument("--generate", type=count, metavar="N", help="a prompt, and N steps with the cache")
    parser.add_argument("--policy", metavar="POLICY", help="as of fusedops.use()")
    require = "exit with 1 where another backend serves a call, of some ops or of all, or none is made"
    parser.add_argument("--require", metavar="BACKEND[:OP,...]", help=require)
    saved = "show first what changed since a plan of one device that --json wrote, as by another release"
    parser.add_argument("--compare", metavar="FILE", help=saved)
    parser.add_argument("--html", metavar="FILE", help="write a page that shows the calls")


def run(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    from fusedops._plan.plan import device_named  # not at import: it loads torch's counters of products

    if options.json and options.compare is not None:
        raise InvalidInputError("plan: got --json and --compare, expected one of them; to fix: Plan.compare in Python")
    required = None if options.require is None else _required(options.require)
    model = _model(options.model, None if options.dtype is None else floating_dtype(options.dtype))
    sizes = {"batch": options.batch, "length": options.length}
    has = None if options.capability is None else capability(options.capability)

    def made(name: str) -> fusedops.Plan:
        spec, steps = device_named(name), options.generate or False
        spec = replace(spec, capability=has or spec.capability, packages=(*spec.packages, *options.packages))
        return fusedops.plan(model, sizes, device=spec, train=options.train, generate=steps, policy=options.policy)

    plans = [made(name) for name in options.device]
    if options.html is not None:
        plans[0].to_html(options.html, *plans[1:])
    before = None if options.compare is None else _saved(options.compare)
    if options.json:
        print_json([plan.data for plan in plans] if len(plans) > 1 else plans[0].data)
    else:
        changes = [] if before is None else [before.compare(plan) for plan in plans]
        parts = map(repr, [*changes, *plans, *(plans[0].compare(plan) for plan in plans[1:])])
        print("\n\n".join(parts))
    missed = [_missed(plan, *required) for plan in plans] if required is not None else []
    return int(any(missed))


def _saved(path: str) -> fusedops.Plan:
    try:
        return fusedops.Plan.from_json(Path(path).read_text("utf-8"))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidInputError(
            f"plan: got --compare {path!r}: {error_text(error)}, expected the output of a plan of one device with "
            "--json; to fix: write that to a file"
        ) from error


def _required(text: str) -> tuple[str, list[str]]:
    """Return a backend, and the names of the ops that it is to serve; none stands for all."""
    backend, _, names = text.partition(":")
    if registry.find(backend) is None:
        raise PolicyError(f"--require: {registry.unknown_backend(backend)}")
    return backend, [find_op(name, "--require").name for name in names.split(",") if name]


def _missed(plan: fusedops.Plan, backend: str, ops: Sequence[str]) -> bool:
    """Print each call that the required backend does not serve, with the reason, and each op that the model does not
    call; return True where there are any.
    """
    missed: dict[str, list[PlanRow]] = {}
    for row in plan.fallbacks(backend, ops):
        missed.setdefault(call_name(row.op, row.direction), []).append(row)
    called = {row.op for row in plan.rows}
    absent = [f"call of {op}" for op in ops if op not in called] or (["call of an op"] if not called else [])
    for what in absent:
        print_error(f"{plan.device}: {plan.model} makes no {what}, which {backend} is to serve: apply replaced none")
    for name, rows in missed.items():
        reasons = [each.reason for row in rows for each in row.refused if each.backend == backend]
        default = "it has no kernel for it" if rows[0].direction == "forward" else f"forward runs on {rows[0].backend}"
        why = f"{reasons[0].detail}; to fix: {reasons[0].fix}" if reasons else default
        calls = sum(row.calls for row in rows)
        print_error(
            f"{plan.device}: {calls} call{'s' * (calls != 1)} of {name} run on {rows[0].backend}, "
            f"not on {backend}: {why}"
        )
    return bool(missed or absent)


def _model(text: str, wanted: torch.dtype | None) -> Module:
    """Return the model that the command line names, on the meta device."""
    name, colon, rest = text.partition(":")
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    try:
        if path.suffix == ".json" or name.endswith("Config"):
            transformers: Any = import_module("transformers")
            transformers.logging.set_verbosity_error()  # of loss and generation, which are not at issue
            if path.suffix == ".json":
                fields: dict[str, Any] = json.loads(path.read_text("utf-8"))
                config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            else:
                sizes = dict(each.split("=", 1) for each in rest.split(",") if each)
                known = getattr(transformers, name)()
                wrong = [key for key in sizes if not hasattr(known, key)]
                if wrong:
                    raise InvalidInputError(f"plan: {unknown_name(f'size of {name}', wrong[0], [*known.to_dict()])}")
                config = type(known)(**{key: ast.literal_eval(each) for key, each in sizes.items()})
            with torch.device("meta"):
                return _class_of(transformers, config)._from_config(
                    config, dtype=wanted or config.dtype or torch.bfloat16
                )
        if colon:
            sys.path.insert(0, "")
            with torch.device("meta"):
                made = getattr(import_module(name), rest)()
            return made if wanted is None else made.to(wanted)
    except InvalidInputError:
        raise
    except Exception as error:  # any error of a foreign file, config or function
        raise InvalidInputError(
            f"plan: got {text!r}, which makes no model: {error_text(error)}, expected a config of transformers or "
            "module:function; to fix: see `fusedops plan --help`"
        ) from error
    raise InvalidInputError(
        f"plan: got {text!r}, expected a config.json, a config class such as LlamaConfig, or module:function; to fix: "
        "save the config with config.save_pretrained(folder)"
    )


def _class_of(transformers: Any, config: Any) -> Any:
    """Return the class of a config's model: the first of its architectures, else by the kind of the model."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    kinds = ("ForSeq2SeqLM", "ForSpeechSeq2Seq") if config.is_encoder_decoder else ()
    for kind in (*kinds, "ForMaskedLM", "ForCausalLM", "ForImageClassification", ""):
        mapping = getattr(transformers, f"AutoModel{kind}")._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return cast("Any", found)[0] if isinstance(found, tuple) else found
    raise InvalidInputError(
        f"plan: got {type(config).__name__}, expected a config with a model; to fix: set its architectures"
    )
