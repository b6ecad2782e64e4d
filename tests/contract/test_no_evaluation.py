"""What SECURITY.md promises of the sources: no pickle, no evaluated text, one exec, no process, no connection."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from repository import ROOT, nodes

import fusedops
from fusedops import constraints
from fusedops.constraints import Constraint, compile_check

SOURCES = [*(ROOT / "fusedops").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
CALLS = {"eval", "exec", "compile", "__import__", "system", "popen", "load_module"}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "subprocess", "socket", "urllib", "http", "requests"}


def findings(source: str) -> Iterator[str]:
    """Yield the names of functions, calls and imports that a source should not have."""
    for node in nodes(source):
        if isinstance(node, ast.Name) and node.id in CALLS:  # called, or given to something else
            yield node.id
        if isinstance(node, ast.Call):
            owner = ast.unparse(node.func).partition(".")[0]
            method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if method in CALLS and owner not in ("re", "torch", "triton"):
                yield method
            if ast.unparse(node.func) == "torch.load":
                yield "torch.load"
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in MODULES)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in MODULES:
            yield str(node.module)


def test_one_exec_and_nothing_else() -> None:
    assert len(SOURCES) > 80
    found = {path.relative_to(ROOT).as_posix(): sorted(findings(path.read_text("utf-8"))) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == {
        "fusedops/_contract/constraint.py": ["compile", "exec"],
        "fusedops/integrations/diffusers/_source.py": ["compile"],
    }


ONE_EACH = (
    "eval('1')", "run = eval", "builtins.exec('1')", "import pickle", "from subprocess import run",
    "import os; os.system('ls')", "torch.load('x')",
)  # fmt: skip


@pytest.mark.parametrize("source", ONE_EACH)
def test_each_kind_is_found(source: str) -> None:
    assert len(list(findings(source))) == 1


class Text(str):
    """A text that is no name, and that would be a call if it became source."""


class Whole(int):
    """An integer whose text is source."""

    def __repr__(self) -> str:
        return "INJECTED()"

    __str__ = __repr__


class Real(float):
    """A float whose text is source."""

    def __repr__(self) -> str:
        return "INJECTED()"

    __str__ = __repr__


VALID: dict[str, tuple[Callable[..., Constraint], tuple[Any, ...]]] = {
    "Alignment": (constraints.Alignment, ("x", "y", "z", "upper_left")),
    "Between": (constraints.Between, ("x", None, 0.0)),
    "Broadcasts": (constraints.Broadcasts, ("x", "y")),
    "Bytes": (constraints.Bytes, ("x",)),
    "Capability": (constraints.Capability, ("x", (9, 0))),
    "Classes": (constraints.Classes, ("x",)),
    "Count": (constraints.Count, ("x",)),
    "DType": (constraints.DType, ("x", torch.float32)),
    "Dim": (constraints.Dim, ("x", (-1,), 1, 8, 2)),
    "DimMultiple": (constraints.DimMultiple, ("x", "y", 1, 8)),
    "Divisor": (constraints.Divisor, ("x", "y")),
    "Finite": (constraints.Finite, ("x", 0.0)),
    "Flag": (constraints.Flag, ("x",)),
    "Floating": (constraints.Floating, ("x",)),
    "Integer": (constraints.Integer, ("x",)),
    "LastDims": (constraints.LastDims, ("x", "y", 1)),
    "LeadingDims": (constraints.LeadingDims, ("x", "y")),
    "Mask": (constraints.Mask, ("x",)),
    "NotLarger": (constraints.NotLarger, ("x", "y", 1)),
    "Lengths": (constraints.Lengths, ("x", ("x", 0))),
    "LogSums": (constraints.LogSums, ("x",)),
    "Offsets": (constraints.Offsets, ("x",)),
    "OneElement": (constraints.OneElement, ("x", torch.int64)),
    "OneOf": (constraints.OneOf, ("x", "a", "b")),
    "Packed": (constraints.Packed, ("x", "y")),
    "PackedRows": (constraints.PackedRows, ("x", "y", "z")),
    "Present": (constraints.Present, ("x", True)),
    "Probability": (constraints.Probability, ("x",)),
    "Rank": (constraints.Rank, ("x", 2, 3)),
    "Rank, at least": (lambda name, least: constraints.Rank(name, at_least=least), ("x", 2)),
    "SameDType": (constraints.SameDType, ("x", "y")),
    "SameDevice": (constraints.SameDevice, ("x", "y")),
    "SameDims": (constraints.SameDims, ("x", "y", (0, 3))),
    "SameShape": (constraints.SameShape, ("x", "y")),
    "SameSize": (constraints.SameSize, ("x", -1, "y", 0)),
    "Scalar": (constraints.Scalar, ("x", 1.0, (1, 2.0, "a"))),
    "ScoreMask": (constraints.ScoreMask, ("x", "y", "z")),
    "When": (constraints.When, (constraints.Flag("x"), constraints.Flag("y"))),
    "Window": (constraints.Window, ("x",)),
}


def test_every_constraint_class_is_here() -> None:
    classes = {
        name
        for name in constraints.__all__
        if isinstance(kind := getattr(constraints, name), type) and issubclass(kind, Constraint)
    }
    assert classes - {"Beside", "Constraint", "TensorConstraint", "Value"} == {name.partition(",")[0] for name in VALID}


@pytest.mark.parametrize("name", VALID)
@pytest.mark.parametrize("value", ["INJECTED()", Text("INJECTED()"), Text("x"), Whole(1), Real(1.0)], ids=repr)
def test_no_value_of_a_constraint_becomes_source(name: str, value: Any) -> None:
    make, args = VALID[name]
    for place, valid in enumerate(args):
        for other in (value, (value,)) if isinstance(valid, tuple) else (value,):
            try:
                constraint = make(*args[:place], other, *args[place + 1 :])
            except ValueError:
                continue
            assert "INJECTED" not in constraint.expression({})


def test_generated_source_is_made_of_names_and_integers() -> None:
    for op in fusedops.ops.OPS.values():
        for constraint in op.constraints:
            for node in ast.walk(ast.parse(constraint.expression({}), mode="eval")):
                assert not isinstance(node, ast.Constant) or type(node.value) in (int, bool, type(None))
        compile_check(op.parameters, op.constraints)
