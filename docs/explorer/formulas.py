"""Formulas: the small Python functions of an op's and a kernel's data, as JSON that a page can evaluate.

The bytes of an adaptation, an op's minimum bytes, the sizes of a padded call are functions of specs. A table of them
for every size would be endless, so each one is read as a syntax tree and written as nested lists: ``["binary", "*", a,
b]``. Only what such functions need is supported; anything else is an error that names the file and line, so a page is
never built with a formula that it would evaluate in another way.

Every tensor is a TensorSpec here. What a function does with real tensors, after a test for a spec that returns, is
written as ``["unreachable", where]``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from explorer.encoding import UnsupportedError
from explorer.expressions import BINARY, Expressions, Node
from fusedops.errors import InvalidInputError


class Formulas:
    """The functions written so far. :meth:`add` returns the name under which the page finds one."""

    def __init__(self) -> None:
        self.functions: dict[str, dict[str, Any]] = {}
        self._names: dict[Any, str] = {}

    def add(self, function: Callable[..., Any]) -> str:
        """Write a function and those that it calls; return its name.

        Raises:
            UnsupportedError: it has Python that formulas do not have.
        """
        function = inspect.unwrap(function)
        if isinstance(function, functools.partial) or not isinstance(function, types.FunctionType):
            raise UnsupportedError(f"formula: got {function!r}, expected a Python function; to fix: write it with def")
        if function in self._names:
            return self._names[function]
        name = f"{function.__module__}.{function.__qualname__}"
        while name in self.functions:  # lambdas, and functions of one maker with other closures
            name += "'"
        self._names[function] = name
        self.functions[name] = {}  # a placeholder: a function may call itself
        try:
            self.functions[name] = _Writer(self, function).write()
        except UnsupportedError:
            del self.functions[name], self._names[function]
            raise
        return name


class _Writer(Expressions):
    """Writes the statements of one function."""

    def __init__(self, formulas: Formulas, function: types.FunctionType) -> None:
        file = Path(inspect.getfile(function))
        self.node = _definition(file, function)
        arguments = self.node.args
        self.parameters = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        self.rest = arguments.vararg.arg if arguments.vararg else None
        local = {*self.parameters, *([self.rest] if self.rest else [])}
        local |= {n.id for n in ast.walk(self.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        super().__init__(function, file, local, formulas.add)

    def write(self) -> dict[str, Any]:
        node = self.node
        body = [["return", self.value(node.body)]] if isinstance(node, ast.Lambda) else self.block(node.body)
        return {"parameters": self.parameters, "rest": self.rest, "body": body}

    def block(self, statements: Sequence[ast.stmt]) -> list[Node]:
        lines: list[Node] = []
        only_specs = False  # True after a test for a spec that returns
        for at, each in enumerate(statements):
            try:
                if isinstance(each, ast.If):
                    test = self.value(each.test)
                    if test[0] == "const":
                        lines += self.block(each.body if test[1] else each.orelse)
                    else:
                        lines.append(["when", test, self.block(each.body), self.block(each.orelse)])
                    only_specs = only_specs or "TensorSpec" in ast.unparse(each.test)
                else:
                    lines += self.statement(each)
            except UnsupportedError:
                if not only_specs:
                    raise
                return [*lines, ["unreachable", f"{self.file.name}:{statements[at].lineno}"]]
            if lines and lines[-1][0] in ("return", "raise"):
                break
        return lines

    def statement(self, node: ast.stmt) -> list[Node]:
        if isinstance(node, ast.Return):
            return [["return", ["const", None] if node.value is None else self.value(node.value)]]
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            return [["let", self.target(node.targets[0]), self.value(node.value)]]
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            return [["let", self.target(node.target), self.value(node.value)]]
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            operator = BINARY.get(type(node.op))
            if operator is not None:
                value = ["binary", operator, ["var", node.target.id], self.value(node.value)]
                return [["let", node.target.id, value]]
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            error = self.constant(node.exc.func)
            if error is InvalidInputError:
                return [["raise", self.value(node.exc.args[0])]]
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            return []
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # for what it raises
            return [["let", "_", self.value(node.value)]]
        raise self.unsupported(node)


@functools.cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _definition(file: Path, function: types.FunctionType) -> ast.FunctionDef | ast.Lambda:
    """Return the syntax tree of a function, found by its line and its parameters."""
    code = function.__code__
    names = list(code.co_varnames[: code.co_argcount])
    for node in ast.walk(_tree(file)):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            continue
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
        if first == code.co_firstlineno and parameters == names:
            return node
    raise UnsupportedError(f"formula: got {function!r}, whose source is not in {file.name}; to fix: write it in a file")
