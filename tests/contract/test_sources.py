"""The sources of the core: readable tracebacks, short files, and no op known by name."""

from __future__ import annotations

import ast
import linecache
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from repository import docstrings, nodes

import fusedops
from fusedops.constraints import Constraint, Reason
from fusedops.testing import OPS

CORE = pathlib.Path(fusedops.__file__).parent
FILES = sorted(CORE.rglob("*.py"))
X = torch.ones(2, 4)
OWN_OPS = tuple(fusedops.ops.__all__)


def relative(path: pathlib.Path) -> str:
    return str(path.relative_to(CORE))


# --------------------------------------------------------------------------------------------------- generated source


class Raises(Constraint):
    """A constraint whose compiled expression divides by zero."""

    def expression(self, constants: dict[str, object]) -> str:
        return f"{self.name}.dim() // 0"

    def reasons(self, args: Any) -> list[Reason]:
        return []

    def describe(self) -> str:
        return f"{self.name}: impossible"


def failing(x: Any, bias: Any, approximate: str) -> Any:
    raise LookupError("the kernel failed")


def failing_backward(grad: Any, x: Any, bias: Any, approximate: str, needs: Any) -> Any:
    raise LookupError("the backward kernel failed")


def working(x: Any, bias: Any, approximate: str) -> Any:
    return x.clone()


def register(forward: Any, *constraints: Constraint, backward: Any = None) -> None:
    kernels = [fusedops.kernel("bias_gelu", *constraints)(forward)]
    if backward is not None:
        kernels.append(fusedops.kernel("bias_gelu", direction="backward")(backward))
    fusedops.register(fusedops.Backend("mine", ("cpu",), -5, tuple(kernels)))


def backward() -> None:
    x = X.clone().requires_grad_()
    fusedops.bias_gelu(x).sum().backward()


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], Callable[[], Any]]] = {
    "a kernel": (lambda: register(failing), LookupError, lambda: fusedops.bias_gelu(X)),
    "a kernel under autograd": (lambda: register(failing), LookupError, backward),
    "a backward kernel": (lambda: register(working, backward=failing_backward), LookupError, backward),
    "the registered op": (lambda: register(failing), LookupError, lambda: torch.ops.fusedops.bias_gelu(X)),
    "bind": (lambda: register(failing), LookupError, lambda: fusedops.bind("bias_gelu", X)(X)),
    "a compiled check": (lambda: register(working, Raises("x")), ZeroDivisionError, lambda: fusedops.bias_gelu(X)),
}


@pytest.mark.parametrize(("prepare", "kind", "call"), CALLS.values(), ids=CALLS.keys())
def test_every_frame_of_a_traceback_shows_its_line(
    prepare: Callable[[], Any], kind: type[Exception], call: Callable[[], Any]
) -> None:
    prepare()
    with fusedops.use("mine", fallback="silent"), pytest.raises(kind) as raised:
        call()
    linecache.checkcache()  # as printing any traceback does
    frames = traceback.extract_tb(raised.tb)
    without = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames if not frame.line]
    assert not without
    if kind is ZeroDivisionError:
        assert frames[-1].filename.startswith("<fusedops: constraints of mine's bias_gelu forward")
        assert "x.dim() // 0" in (frames[-1].line or "")


# ---------------------------------------------------------------------------------------------------------- op families

#: What a file of a family holds: constraints and the preparation of arguments; what its ops compute; how far a right
#: result may be off; the rule for DTensors; cases, tolerances, bytes and unfused forms.
ROLES = ("__init__", "arguments", "formulas", "error_bounds", "sharding", "evidence")


def test_the_files_of_a_family_are_its_ops_and_five_roles() -> None:
    folders = [path for path in (CORE / "ops").iterdir() if (path / "__init__.py").exists()]
    names = {f"{path.parent.name}/{path.stem}" for folder in folders for path in folder.glob("*.py")}
    assert {name for name in names if name.partition("/")[2] not in (*ROLES, *OWN_OPS)} == set()
    assert {name.partition("/")[2] for name in names} >= {*ROLES, *OWN_OPS}
    for folder in folders:
        assert (folder / "evidence.py").exists(), f"{folder.name} has no evidence.py"


# ----------------------------------------------------------------------------------------------------------- op names


def op_names(source: str) -> list[tuple[int, str]]:
    """Return where a source names an op outside a docstring: a text with the name in it, an attribute, or a name."""
    documented = docstrings(source)
    result: list[tuple[int, str]] = []
    for node in nodes(source):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documented:
            text = node.value
        elif isinstance(node, ast.Attribute):
            text = node.attr
        elif isinstance(node, ast.Name):
            text = node.id
        elif isinstance(node, ast.alias):
            text = node.name.rpartition(".")[2].lstrip("_")
        result += [(node.lineno, name) for name in OWN_OPS if text.removesuffix("_backward") == name]
    return result


GENERIC = [path for path in FILES if not {"ops", "compat", "integrations", "nn"} & set(path.relative_to(CORE).parts)]
# a plan counts torch's own calls of it; Evidence has a sample of calls
OF_TORCH = {"shape_tensor.py": "attention", "report.py": "attention", "evidence.py": "sample"}


def test_generic_code_names_no_op() -> None:
    found = {path: {name for _, name in op_names(path.read_text("utf-8"))} for path in GENERIC}
    assert {path: names for path in GENERIC if (names := found[path] - {OF_TORCH.get(path.name)})} == {}


def test_the_search_finds_every_kind_of_name() -> None:
    assert set(OWN_OPS) <= set(OPS)
    assert op_names('"""bias_gelu"""\nOPS["bias_gelu"]') == [(2, "bias_gelu")]
    assert op_names("torch.ops.fusedops.bias_gelu_backward") == [(1, "bias_gelu")]
    assert op_names("from fusedops.ops.bias.bias_gelu import OP") == []
    assert op_names("from fusedops.ops import bias_gelu") == [(1, "bias_gelu")]


# ---------------------------------------------------------------------------------------------------- one sense a word

#: Words that had another sense beside the one in docs/design.md, and the names of that sense.
GLOSSARY = {
    "error()": "an exception is an error: call a bound of rounding errors error_bound",
    "gradient_error()": "an exception is an error: call a bound of rounding errors gradient_error_bound",
    "place": "call a number in a sequence index, and a position in a tensor element",
    "places": "call numbers in a sequence indices",
    "complete": "call what fills in a call's arguments prepare_args",
}


def names_declared(source: str) -> list[tuple[int, str]]:
    """Return the parameters, variables and attributes that a source declares, and its functions with brackets."""
    result: list[tuple[int, str]] = []
    for node in nodes(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            result.append((node.lineno, f"{node.name}()"))
        elif isinstance(node, ast.arg):
            result.append((node.lineno, node.arg))
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            result.append((node.lineno, node.id if isinstance(node, ast.Name) else node.attr))
    return result


OF_GLOSSARY = [path for path in FILES if path.relative_to(CORE).parts[0] != "_cli"]  # argparse calls error()


def test_a_word_has_one_sense() -> None:
    wrong = [
        f"{relative(path)}:{line}: {name}; to fix: {GLOSSARY[name]}"
        for path in OF_GLOSSARY
        for line, name in names_declared(path.read_text("utf-8"))
        if name in GLOSSARY
    ]
    assert wrong == []


def test_declared_names_are_found() -> None:
    source = "def error(place, *, complete):\n    places = x.place = 1\n    for at, place in y: pass"
    assert [name for _, name in names_declared(source)].count("place") == 3
    assert {name for _, name in names_declared(source)} >= {"error()", "complete", "places"}
