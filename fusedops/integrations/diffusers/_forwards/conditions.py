"""See from the attributes of a module whether it reaches a place of its forward."""

from __future__ import annotations

import ast
from typing import Any

from fusedops.integrations.diffusers._source import path_of

_UNKNOWN: Any = object()


def is_reached(module: Any, conditions: tuple[tuple[ast.expr, bool], ...]) -> bool:
    """Return False where an attribute of a module shows that one of the conditions does not hold.

    >>> from torch.nn import LayerNorm
    >>> test = ast.parse("self.eps == 1.0", mode="eval").body
    >>> is_reached(LayerNorm(2), ((test, True),)), is_reached(LayerNorm(2), ((test, False),))
    (False, True)
    """
    for test, wanted in conditions:
        value = _value(module, test)
        if value is not _UNKNOWN and bool(value) is not wanted:
            return False
    return True


def _value(module: Any, tree: ast.expr) -> Any:
    """Return the value of a constant, of an attribute that is a number, a word or None, and of what compares them."""
    if isinstance(tree, ast.Constant):
        return tree.value
    if isinstance(tree, (ast.List, ast.Tuple)):
        values = [_value(module, each) for each in tree.elts]
        return _UNKNOWN if _UNKNOWN in values else values
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
        value = _value(module, tree.operand)
        return value if value is _UNKNOWN else not value
    if isinstance(tree, ast.BoolOp):
        values = [_value(module, each) for each in tree.values]
        decides = isinstance(tree.op, ast.Or)
        if any(value is not _UNKNOWN and bool(value) is decides for value in values):
            return decides
        return _UNKNOWN if any(value is _UNKNOWN for value in values) else not decides
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
        return _compared(tree.ops[0], _value(module, tree.left), _value(module, tree.comparators[0]))
    path = path_of(tree).split(".")
    if len(path) < 2 or path[0] != "self":
        return _UNKNOWN
    value = module
    for name in path[1:]:
        value = getattr(value, name, _UNKNOWN)
    return value if isinstance(value, (bool, int, float, str, type(None))) else _UNKNOWN


def _compared(how: ast.cmpop, left: Any, right: Any) -> Any:
    if left is _UNKNOWN or right is _UNKNOWN:
        return _UNKNOWN
    if isinstance(how, (ast.Eq, ast.Is)):
        return left == right
    if isinstance(how, (ast.NotEq, ast.IsNot)):
        return left != right
    return left in right if isinstance(how, ast.In) and isinstance(right, (list, str)) else _UNKNOWN
