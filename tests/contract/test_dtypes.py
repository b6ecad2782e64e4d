"""The dtypes of the arithmetic: what the four functions return, and that no other file declares their rules again."""

from __future__ import annotations

import ast

import pytest
import torch
from repository import ROOT, last_name, nodes

from fusedops.dtypes import compute_dtype, no_autocast, promoted, upcast

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DECLARED = ROOT / "fusedops" / "dtypes.py"
SOURCES = sorted(path for folder in ("fusedops", "backends") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_arithmetic_is_float32_or_float64(dtype: torch.dtype) -> None:
    wanted = torch.float64 if dtype is torch.float64 else torch.float32
    x = torch.ones(3, dtype=dtype)
    assert compute_dtype(dtype) is wanted
    assert upcast(x).dtype is wanted
    assert (upcast(x) is x) is (dtype is wanted)
    assert promoted(x, None) is dtype
    assert all(promoted(x, (other := torch.ones(3, dtype=each))) is (x + other).dtype for each in DTYPES)


def test_products_are_not_rounded_under_autocast() -> None:
    x = torch.tensor([[1.0 + 2.0**-20]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with no_autocast("cpu"):
            assert torch.equal(x @ x, x * x)
        assert (x @ x).dtype is torch.bfloat16
    for kind in ("cpu", "meta"):
        with no_autocast(kind):
            pass


def mentions(node: ast.AST, *names: str) -> bool:
    found = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return bool(found & {*names}) or any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def widens(node: ast.expr) -> bool:
    """Return True for the dtype float32, a tensor converted to it, or a tuple of such tensors."""
    if isinstance(node, ast.Tuple):
        return any(widens(each) for each in node.elts)
    function = node.func if isinstance(node, ast.Call) else node
    return isinstance(function, ast.Attribute) and function.attr in ("float32", "float")


def declarations(source: str) -> list[int]:
    """Return the lines that compute a dtype of the arithmetic, promote two dtypes of which one may lack, or turn
    autocast off."""
    lines: list[int] = []
    for node in nodes(source):
        if isinstance(node, ast.Call):
            name = last_name(node.func)
            of_float32 = any(isinstance(arg, ast.Attribute) and arg.attr == "float32" for arg in node.args)
            off = any(
                each.arg == "enabled" and isinstance(each.value, ast.Constant) and each.value.value is False
                for each in node.keywords
            )
            if (name == "promote_types" and of_float32) or (name == "autocast" and off):
                lines.append(node.lineno)
        if isinstance(node, ast.IfExp):
            asks = mentions(node.test, "float64", "float32", "itemsize")
            answers = widens(node.body) != widens(node.orelse)
            promotes = mentions(node.orelse, "promote_types") and mentions(node.body, "dtype")
            if (asks and answers) or promotes:
                lines.append(node.lineno)
    return lines


def test_the_rules_are_declared_once() -> None:
    found = {path: lines for path in SOURCES if (lines := declarations(path.read_text("utf-8")))}
    assert len(found.pop(DECLARED)) == 3
    assert found == {}, "this is a rule of fusedops/dtypes.py; to fix: call its function"


@pytest.mark.parametrize(
    "source",
    [
        "torch.promote_types(x.dtype, torch.float32)",
        "torch.promote_types(torch.float32, torch.promote_types(x.dtype, y.dtype))",
        "torch.float64 if x.dtype == torch.float64 else torch.float32",
        "x if x.dtype is torch.float64 else x.float()",
        "tl.float64 if dtype == torch.float64 else tl.float32",
        "x.float() if x.dtype.itemsize < 4 else x",
        "(x, y) if y.dtype == torch.float64 else (x.float(), y.float())",
        "x.dtype if bias is None else torch.promote_types(x.dtype, bias.dtype)",
        "torch.autocast('cpu', enabled=False)",
        "with torch.autocast(kind, enabled=False) if casts else nullcontext():\n    pass",
    ],
)
def test_another_declaration_is_found(source: str) -> None:
    assert declarations(source) == [1]


@pytest.mark.parametrize(
    "source",
    [
        "compute_dtype(x.dtype)",
        "torch.promote_types(x.dtype, cos.dtype)",
        "1e-3 if x.dtype == torch.float64 else 1e-6",
        "torch.float32 if x.dtype is torch.float16 else None",
        "w.contiguous() if w.dtype in (dtype, torch.float32) else w.float() + offset",
        "torch.autocast('cpu', dtype=torch.bfloat16)",
    ],
)
def test_other_expressions_are_not(source: str) -> None:
    assert declarations(source) == []
