"""Statements that belong together, put into one: a value that only the next statement uses is written there.

``n = self.norm(x)`` and ``n = n * (1 + scale) + shift`` become ``n = self.norm(x) * (1 + scale) + shift``. A value is
moved only where nothing else reads it: no later statement, and no other turn of a loop.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.GeneratorExp)
_BLOCKS = ("body", "orelse", "finalbody")
_CHOICES = (ast.IfExp, ast.BoolOp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
# methods that make a view or another dtype of a tensor: to call them earlier or later changes nothing
_VIEWS = {"unsqueeze", "squeeze", "float", "to", "type_as", "view", "reshape", "expand", "chunk", "tanh", "transpose"}


def is_view(name: str) -> bool:
    """Return True for the name of a method without effects, whose result has the same numbers or is their tanh."""
    return name in _VIEWS


def is_simple(tree: ast.expr) -> bool:
    """Return True for a variable, an attribute, a part or a view of one.

    >>> is_simple(ast.parse("gate[:, None].tanh()", mode="eval").body)
    True
    """
    if isinstance(tree, ast.Call):
        if not isinstance(tree.func, ast.Attribute) or not is_view(tree.func.attr) or tree.keywords:
            return False
        return is_simple(tree.func.value) and all(map(is_simple, tree.args))
    if isinstance(tree, (ast.Attribute, ast.Subscript)):
        return is_simple(tree.value)
    return isinstance(tree, (ast.Name, ast.Constant))


def join(function: ast.FunctionDef, is_moved: Callable[[ast.expr], bool]) -> None:
    r"""Move the values for which ``is_moved`` returns True into the statements behind them, in a function's tree.

    >>> tree = ast.parse("def f(x):\n n = g(x)\n n = n * 2\n return n").body[0]
    >>> join(tree, lambda value: isinstance(value, ast.Call))
    >>> print(ast.unparse(tree))
    def f(x):
        n = g(x) * 2
        return n
    """
    held = {name for each in ast.walk(function) if isinstance(each, (ast.Nonlocal, ast.Global)) for name in each.names}
    held |= {
        name.id
        for scope in ast.walk(function)
        if isinstance(scope, _SCOPES) and scope is not function
        for name in ast.walk(scope)
        if isinstance(name, ast.Name)
    }
    _join(function.body, [], held, is_moved)


def _join(
    block: list[ast.stmt], after: list[Iterable[ast.stmt] | None], held: set[str], is_moved: Callable[[ast.expr], bool]
) -> None:
    """Join the statements of a block. ``after`` has the statements behind it, by level; None: a loop begins again."""
    at = 0
    while at < len(block):
        statement = block[at]
        for name in _BLOCKS:
            inner: list[ast.stmt] = getattr(statement, name, [])
            if inner and not isinstance(statement, (*_SCOPES, ast.Try)):  # a handler may read what is assigned before
                turns: list[Iterable[ast.stmt] | None] = [None] if isinstance(statement, _LOOPS) else []
                _join(inner, [*after, block[at + 1 :], *turns], held, is_moved)
        following = block[at + 1] if at + 1 < len(block) else None
        name = _moved_name(statement, following, is_moved)
        if name and name not in held and following is not None and isinstance(statement, ast.Assign):
            rest = [*after, block[at + 2 :]]
            if name in _stored(following) or _is_dead(name, rest):
                _Put(name, statement.value).visit(following)
                del block[at]
                at = max(at - 2, -1)  # the statement before may belong to it too
        at += 1


def _moved_name(statement: ast.stmt, following: ast.stmt | None, is_moved: Callable[[ast.expr], bool]) -> str:
    """Return the variable of a statement whose value can be written in the next one, or an empty string."""
    if not isinstance(statement, ast.Assign) or not isinstance(following, ast.Assign):
        return ""
    (target, *others) = statement.targets
    if others or not isinstance(target, ast.Name) or not is_moved(statement.value):
        return ""
    if not all(isinstance(each, ast.Name) for each in following.targets):
        return ""
    if _loads(target.id, following) != 1 or any(isinstance(each, _CHOICES) for each in ast.walk(following)):
        return ""
    # what is called between the two statements is called in the same order
    calls = (each for each in ast.walk(following) if isinstance(each, ast.Call))
    return target.id if all(is_simple(each) or _loads(target.id, each) for each in calls) else ""


def _loads(name: str, *trees: ast.AST) -> int:
    return sum(
        isinstance(each, ast.Name) and each.id == name and not isinstance(each.ctx, ast.Store)
        for tree in trees
        for each in ast.walk(tree)
    )


def _stored(statement: ast.stmt) -> set[str]:
    """Return the variables that a statement assigns in any case."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    return {name for target in targets for name in _names(target)}


def _names(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for each in target.elts:
            yield from _names(each)


def _is_dead(name: str, after: list[Iterable[ast.stmt] | None]) -> bool:
    """Return True where no statement reads a variable before it is assigned again. The innermost level comes last."""
    for block in reversed(after):
        if block is None:
            return False
        for statement in block:
            if _loads(name, statement):
                return False
            if name in _stored(statement):
                return True
    return True


class _Put(ast.NodeTransformer):
    """Writes a value in the place of a variable."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self._name, self._value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the value for the variable where it is read."""
        return self._value if node.id == self._name and isinstance(node.ctx, ast.Load) else node
