"""Expressions of Python as nested lists: arithmetic on sizes and dtypes, tuples, comparisons, calls."""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from explorer.encoding import UnsupportedError, encoded
from fusedops import TensorSpec
from fusedops._contract.constraint import is_tensor, shown
from fusedops._torch import TENSOR_TYPES, is_traced, is_transformed
from fusedops.constraints.values import SYMBOLIC

Node = list[Any]

#: Functions that the page has its own form of.
INTRINSICS: Mapping[Any, str] = {
    math.prod: "prod",
    torch.promote_types: "promote_types",
    is_tensor: "is_tensor",
    shown: "shown",
    TensorSpec: "spec",
    **{function: function.__name__ for function in (abs, bool, float, int, len, max, min, range, sum, tuple)},
}
#: Questions whose answer is no: a page traces nothing, and has no number that is symbolic.
NEVER = (hasattr, is_traced, is_transformed)
_NO_TYPES = {*TENSOR_TYPES, *SYMBOLIC}
_TYPES: Mapping[type, Sequence[str]] = {
    int: ("int", "bool"),
    float: ("float",),
    bool: ("bool",),
    str: ("str",),
    tuple: ("tuple",),
    TensorSpec: ("spec",),
}
BINARY: Mapping[type[ast.operator], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.Div: "/",
}  # fmt: skip
_COMPARE: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip


class Expressions:
    """Writes the expressions of one function, of a file. ``local`` are the names that it assigns, its parameters among
    them; ``add`` writes another function and returns its name.
    """

    def __init__(
        self, function: types.FunctionType, file: Path, local: set[str], add: Callable[[Callable[..., Any]], str]
    ) -> None:
        self.function, self.file, self.local, self.add = function, file, local, add

    def unsupported(self, node: ast.AST) -> UnsupportedError:
        where = f"{self.file.name}:{getattr(node, 'lineno', 0)}"
        return UnsupportedError(
            f"formula at {where}: got `{ast.unparse(node)[:80]}`, expected arithmetic on sizes and dtypes; to fix: "
            f"write it so, or add this form to docs/explorer/expressions.py and formulas.js"
        )

    def value(self, node: ast.expr) -> Node:
        write = getattr(self, f"_{type(node).__name__.lower()}", None)
        if write is None:
            raise self.unsupported(node)
        return write(node)

    def target(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Tuple):
            return [self.target(each) for each in node.elts]
        if isinstance(node, ast.Starred):
            return {"star": self.target(node.value)}
        raise self.unsupported(node)

    def constant(self, node: ast.expr) -> Any:
        """Return the object that a name outside of the function, or an attribute of one, stands for; else _Missing."""
        if isinstance(node, ast.Name) and node.id not in self.local:
            free = inspect.getclosurevars(self.function)
            for names in (free.nonlocals, self.function.__globals__, vars(builtins)):
                if node.id in names:
                    return names[node.id]
        if isinstance(node, ast.Attribute):
            owner = self.constant(node.value)
            if isinstance(owner, (types.ModuleType, type(torch.ops))) or type(owner).__name__ == "float_info":
                return getattr(owner, node.attr, _Missing)
        return _Missing

    def _constant(self, node: ast.Constant) -> Node:
        return ["const", encoded(node.value)]

    def _name(self, node: ast.Name) -> Node:
        if node.id in self.local:
            return ["var", node.id]
        value = self.constant(node)
        try:
            return ["const", encoded(value)]
        except UnsupportedError:
            raise self.unsupported(node) from None

    def _attribute(self, node: ast.Attribute) -> Node:
        value = self.constant(node)
        if value is not _Missing:
            return ["const", encoded(value)]
        if node.attr == "is_nested":
            return ["const", False]
        return ["attribute", self.value(node.value), node.attr]

    def _subscript(self, node: ast.Subscript) -> Node:
        if isinstance(node.slice, ast.Slice):
            ends = [["const", None] if end is None else self.value(end) for end in (node.slice.lower, node.slice.upper)]
            if node.slice.step is not None:
                raise self.unsupported(node)
            return ["slice", self.value(node.value), *ends]
        return ["item", self.value(node.value), self.value(node.slice)]

    def _tuple(self, node: ast.Tuple | ast.List) -> Node:
        return ["tuple", *map(self.value, node.elts)]

    _list = _tuple

    def _starred(self, node: ast.Starred) -> Node:
        return ["star", self.value(node.value)]

    def _dict(self, node: ast.Dict) -> Node:
        return [
            "dict",
            *([ast.literal_eval(cast("ast.expr", key)), self.value(item)] for key, item in zip(node.keys, node.values)),
        ]

    def _ifexp(self, node: ast.IfExp) -> Node:
        test = self.value(node.test)
        if test[0] == "const":
            return self.value(node.body if test[1] else node.orelse)
        return ["if", test, self.value(node.body), self.value(node.orelse)]

    def _boolop(self, node: ast.BoolOp) -> Node:
        is_and = isinstance(node.op, ast.And)
        parts: list[Node] = []
        for each in node.values:
            part = self.value(each)
            if part[0] == "const" and bool(part[1]) == is_and:
                continue
            parts.append(part)
            if part[0] == "const":
                break
        if not parts:
            return ["const", is_and]
        return parts[0] if len(parts) == 1 else ["and" if is_and else "or", *parts]

    def _unaryop(self, node: ast.UnaryOp) -> Node:
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return ["const", not value[1]] if value[0] == "const" else ["not", value]
        if isinstance(node.op, ast.USub):
            return ["binary", "-", ["const", 0], value]
        raise self.unsupported(node)

    def _binop(self, node: ast.BinOp) -> Node:
        operator = BINARY.get(type(node.op))
        if operator is None:
            raise self.unsupported(node)
        return ["binary", operator, self.value(node.left), self.value(node.right)]

    def _compare(self, node: ast.Compare) -> Node:
        if isinstance(node.left, ast.Call) and self.constant(node.left.func) is type:
            return self._type_is(node)
        pairs = [[_COMPARE[type(operator)], self.value(each)] for operator, each in zip(node.ops, node.comparators)]
        return ["compare", self.value(node.left), *pairs]

    def _type_is(self, node: ast.Compare) -> Node:
        """Write ``type(x) is int`` and ``type(x) in (int, float)``, and their opposites."""
        kinds = node.comparators[0].elts if isinstance(node.comparators[0], ast.Tuple) else node.comparators
        names = [self.constant(kind) for kind in kinds]
        if len(node.ops) != 1 or any(name not in _TYPES and name not in _NO_TYPES for name in names):
            raise self.unsupported(node)
        known = [_TYPES[name][0] for name in names if name in _TYPES]
        test: Node = ["is", self.value(cast("ast.Call", node.left).args[0]), known] if known else ["const", False]
        if isinstance(node.ops[0], (ast.IsNot, ast.NotIn)):
            return ["const", True] if not known else ["not", test]
        return test

    def _call(self, node: ast.Call) -> Node:
        function = self.constant(node.func)
        if function is isinstance:
            return self._isinstance(node)
        if any(function is each for each in NEVER):
            return ["const", False]
        if function is cast:
            return self.value(node.args[1])
        named = [[each.arg, self.value(each.value)] for each in node.keywords]
        if function is _Missing and isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            return ["method", owner, node.func.attr, [self.value(each) for each in node.args], named]
        if named or function is _Missing:
            raise self.unsupported(node)
        args = [self.value(each) for each in node.args]
        for known, name in INTRINSICS.items():
            if function is known:
                return ["intrinsic", name, *args]
        if not isinstance(inspect.unwrap(function), types.FunctionType) or function.__module__.startswith("torch"):
            raise self.unsupported(node)
        return ["call", self.add(function), *args]

    def _isinstance(self, node: ast.Call) -> Node:
        kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
        names: list[Any] = []
        for kind in kinds:
            value = self.constant(kind)
            names += value if isinstance(value, tuple) else [value]
        if any(name not in _TYPES and name not in _NO_TYPES for name in names):
            raise self.unsupported(node)
        known = [text for name in names if name in _TYPES for text in _TYPES[name]]
        return ["is", self.value(node.args[0]), known] if known else ["const", False]

    def _generatorexp(self, node: ast.GeneratorExp | ast.ListComp) -> Node:
        (loop, *others) = node.generators
        if others:
            raise self.unsupported(node)
        tests = [self.value(test) for test in loop.ifs]
        keep = None if not tests else tests[0] if len(tests) == 1 else ["and", *tests]
        return ["each", self.target(loop.target), self.value(loop.iter), keep, self.value(node.elt)]

    _listcomp = _generatorexp

    def _joinedstr(self, node: ast.JoinedStr) -> Node:
        return ["text", *map(self.value, node.values)]

    def _formattedvalue(self, node: ast.FormattedValue) -> Node:
        if node.format_spec is not None or node.conversion != -1:
            raise self.unsupported(node)
        return self.value(node.value)


class _Missing:
    """No object is known for a name."""
