"""The data of the explorer page: backends, ops and their kernels, with constraints and formulas as JSON.

A constraint is its ``to_dict()`` with its code, its phrase for tables, and True where None meets it. Each type of
constraint needs a function of that name in the page's ``kinds_*.js``: :func:`missing_kinds`.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fusedops
from explorer.encoding import encoded
from explorer.formulas import Formulas
from fusedops import Kernel, TensorSpec
from fusedops._cli.arguments import default_dtype
from fusedops._cli.explain import option
from fusedops._contract.op import Op
from fusedops._plugins.record import Record
from fusedops._plugins.registry import OWN_DISTRIBUTION, registry
from fusedops.constraints import Constraint
from fusedops.testing import Case

HERE = Path(__file__).parent
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def everything() -> dict[str, Any]:
    """Return the data of all ops and backends of this distribution."""
    formulas = Formulas()
    records = [record for record in registry.records() if record.distribution == OWN_DISTRIBUTION]
    ops = [_op(fusedops.ops.OPS[name], records, formulas) for name in fusedops.ops.__all__]
    return {
        "version": fusedops.__version__,
        "dtypes": {_name(each): {"itemsize": each.itemsize, "floating": each.is_floating_point} for each in DTYPES},
        "promotions": {
            f"{_name(one)},{_name(other)}": _name(torch.promote_types(one, other))
            for one, other in itertools.product(DTYPES, DTYPES)
        },
        "backends": [_backend(record) for record in records],
        "ops": {op["name"]: op for op in ops},
        "formulas": formulas.functions,
    }


def missing_kinds(data: Mapping[str, Any]) -> list[str]:
    """Return the types of constraints in the data for which the page has no function."""
    written = {
        name
        for path in HERE.glob("kinds_*.js")
        for name in re.findall(r"^  ([A-Z]\w*)[(:]", path.read_text(encoding="utf-8"), re.M)
    }
    return sorted({each["type"] for each in _constraints(data)} - written)


def data_text(data: Mapping[str, Any]) -> str:
    """Return the data as JSON that may stand in a script element; ValueError where the page cannot evaluate it."""
    missing = missing_kinds(data)
    if missing:
        raise ValueError(
            f"got constraints of the types {', '.join(missing)}, expected those of docs/explorer/kinds_*.js; to fix: "
            f"write a function for each, which returns what its reasons() returns"
        )
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")


def _constraints(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every constraint in the data, those inside of another one too."""
    if isinstance(value, Mapping):
        if "type" in value and "phrase" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _constraints(each)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _backend(record: Record) -> dict[str, Any]:
    assert record.backend is not None, record.error
    backend = record.backend
    return {
        "name": backend.name,
        "device_types": list(backend.device_types),
        "optional": backend.optional,
        "needs": backend.needs,
        "ops": list(dict.fromkeys(item.op for item in backend.kernels)),
    }


def _op(op: Op, records: Sequence[Record], formulas: Formulas) -> dict[str, Any]:
    kernels = [
        {"backend": record.name, **_kernel(item, formulas)}
        for record in records
        for item in (record.backend.kernels if record.backend else ())
        if item.op == op.name
    ]
    first = op.evidence.sample(2, 64) if op.evidence.sample else op.evidence.cases[0].args
    return {
        "name": op.name,
        "formula": op.evidence.formula,
        "summary": (inspect.getdoc(op.function) or "").partition("\n")[0],
        "parameters": [_parameter(op, name, first) for name in op.parameters],
        "float_indices": list(op.float_indices),
        "conditions": [_constraint(each) for each in op.conditions],
        "prepare_args": None if op.prepare_args is None else formulas.add(op.prepare_args),
        "output_dtype": None if op._output_dtype is None else formulas.add(op._output_dtype),
        "min_bytes": formulas.add(op.evidence.min_bytes),
        "grads": list(op.backward_call.grads),
        "outputs": list(op.outputs),
        "saved": [value.name for value in op.saved],
        "backward_parameters": list(op.backward_parameters),
        "padding": None
        if op.padding is None
        else {
            "dims": list(op.padding.dims),
            "forward": formulas.add(op.padding.forward),
            "backward": formulas.add(op.padding.backward),
        },
        "kernels": kernels,
        "cases": [_case(op, case) for case in (*op.evidence.cases, *op.evidence.measured)],
    }


def _parameter(op: Op, name: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    public = op.signature.parameters[name]
    about = [each for each in op.constraints if each.name == name]
    described = [each.describe().removeprefix(f"{name}: ") for each in about]
    required = public.default is inspect.Parameter.empty
    return {
        "name": name,
        "tensor": name in op.tensors,
        "required": name in op.required_tensors,
        "number": name in op.tensors and bool(re.search(r"\b(int|float)\b", str(public.annotation))),
        "type": op.types[name],
        "default": None if required else encoded(public.default),
        "dtype": _name(default_dtype(op, name, torch.float32)) if name in op.tensors else None,
        "dtype_beside": _dtypes_beside(op, name) if name in op.tensors else {},
        "option": option(name),
        "hints": list(dict.fromkeys(described)),
        "choices": [] if name in op.tensors else _choices(op, about, sample),
    }


def _dtypes_beside(op: Op, name: str) -> dict[str, str]:
    """Return the dtype of a tensor that is written without one, by the dtype of the first tensor."""
    return {_name(first): _name(default_dtype(op, name, first)) for first in DTYPES}


def _choices(op: Op, about: Iterable[Constraint], sample: Mapping[str, Any]) -> list[Any]:
    """Return the texts and bools that the op's constraints offer for a parameter."""
    case = Case("", sample)
    call = {name: TensorSpec(value) if isinstance(value, tuple) else value for name, value in case.args.items()}
    args = dict.fromkeys(op.parameters) | call
    offered = [value for each in about for value in each.examples(args).values()]
    kept = [value for value in offered if isinstance(value, (str, bool))]
    whole = [value for each in about for value in getattr(each, "choices", ())]
    return encoded(list(dict.fromkeys([*kept, *whole])))


def _kernel(item: Kernel, formulas: Formulas) -> dict[str, Any]:
    devices = item.rows_independent if isinstance(item.rows_independent, Mapping) else ("*",)
    return {
        "direction": item.direction,
        "constraints": [_constraint(each) for each in item.constraints if each not in item.for_speed],
        "for_speed": [_constraint(each) for each in item.for_speed],
        "why_rows_depend": {device: item.why_rows_depend(device) for device in devices},
        "device_types": list(item.device_types),
        "source": item.source,
        "deviations": [{"name": each.name, "sentence": each.sentence} for each in item.deviations],
        "adaptations": [
            {"name": each.name, "sentence": each.sentence, "cost": formulas.add(each.cost)} for each in item.adaptations
        ],
    }


def _constraint(constraint: Constraint) -> dict[str, Any]:
    fields = {
        key: _constraint(value) if isinstance(value, Constraint) else encoded(value)
        for key, value in vars(constraint).items()
    }
    fields.pop("code", None)
    return {
        "type": type(constraint).__name__,
        **fields,
        "code": constraint.code.value,
        "phrase": constraint.describe(),
        "none_is_met": constraint.none_is_met,
    }


def _case(op: Op, case: Case) -> dict[str, Any]:
    args = {name: list(value) if isinstance(value, tuple) else encoded(value) for name, value in case.args.items()}
    tensors = [name for name, value in case.args.items() if isinstance(value, tuple) and name in op.tensors]
    return {"name": case.name, "source": case.source, "args": args, "tensors": tensors}
