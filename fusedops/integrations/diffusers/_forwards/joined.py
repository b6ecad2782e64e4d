"""Statements that belong together, put into one: a value that only the next statement uses is written there.

``n = self.norm(x)`` and ``n = n * (1 + scale) + shift`` become ``n = self.norm(x) * (1 + scale) + shift``. A value is
moved only where nothing else reads it: no later statement, and no other turn of a loop. Where only some branches of an
``if`` compute the first value, or use it, the other statement is written in each of its branches before.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy

_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.ListComp, ast.GeneratorExp)
_BLOCKS = ("body", "orelse", "finalbody")
_ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_MOST_BRANCHES = 8
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
    _spread(function.body, is_moved)
    _join(function.body, [], held, is_moved)


def _spread(block: list[ast.stmt], is_moved: Callable[[ast.expr], bool]) -> None:
    r"""Write a statement beside an ``if`` in its branches, where a value of the one belongs into the other.

    >>> tree = ast.parse("n = f(x)\nif a:\n n = n * 2\ny = h(n)\nif b:\n y = gate * y\nx = y + x")
    >>> _spread(tree.body, lambda value: True)
    >>> print(ast.unparse(tree))
    if a:
        n = f(x)
        n = n * 2
    else:
        n = f(x)
    if b:
        y = h(n)
        y = gate * y
        x = y + x
    else:
        y = h(n)
        x = y + x
    """
    at = 0
    while at < len(block):
        statement, following = block[at], block[at + 1] if at + 1 < len(block) else None
        if isinstance(statement, ast.If) and following is not None and _belongs(statement, following, is_moved):
            for branch in _branches(statement):
                if not branch or not isinstance(branch[-1], _ENDS):
                    branch.append(deepcopy(following))
            del block[at + 1]
        elif isinstance(following, ast.If) and _is_for(following, _assigned(statement, is_moved)):
            for branch in (following.body, following.orelse):
                branch.insert(0, deepcopy(statement))
            del block[at]
            at = max(at - 1, 0)  # the statement before may belong to it too
        else:
            for name in _BLOCKS:
                if not isinstance(statement, (*_SCOPES, ast.Try)):
                    _spread(getattr(statement, name, []), is_moved)
            at += 1


def _branches(statement: ast.If) -> list[list[ast.stmt]]:
    """Return the statements of each way through an ``if`` and those at its ends; of no ``else``, an empty list."""
    found: list[list[ast.stmt]] = []
    for block in (statement.body, statement.orelse):
        match block:
            case [*_, ast.If() as last]:
                found += _branches(last)
            case _:
                found.append(block)
    return found


def _assigned(statement: ast.stmt, is_moved: Callable[[ast.expr], bool]) -> str:
    """Return the variable that a statement gives a value that may be moved, or an empty string."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_moved(value):
            return name
        case _:
            return ""


def _belongs(choice: ast.If, following: ast.stmt, is_moved: Callable[[ast.expr], bool]) -> bool:
    """Return True where a branch ends with a value that the statement behind it takes into a sum or a product."""
    branches = _branches(choice)
    names = {_assigned(branch[-1], is_moved) for branch in branches if branch} - {""}
    return len(branches) <= _MOST_BRANCHES and any(
        _takes(following, name) or _is_for(following, name) for name in names
    )


def _is_for(choice: ast.stmt, name: str) -> bool:
    """Return True for an ``if`` that takes a variable in its first branch, and asks for numbers and words alone."""
    if not isinstance(choice, ast.If) or not name or not _takes(choice.body[0], name):
        return False
    return not any(
        isinstance(each, (ast.Call, *_CHOICES)) or (isinstance(each, ast.Name) and each.id == name)
        for each in ast.walk(choice.test)
    )


def _takes(statement: ast.stmt, name: str) -> bool:
    """Return True for a statement that assigns a sum or a product with a variable in it, once."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=ast.BinOp(op=ast.Add() | ast.Mult())):
            return _loads(name, statement) == 1
        case _:
            return False


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
        is_read = _is_read(name, block)
        if is_read is not None:
            return not is_read
    return True


def _is_read(name: str, block: Iterable[ast.stmt]) -> bool | None:
    """Return True where a statement may read a variable, False where each way assigns it before, else None."""
    for statement in block:
        if isinstance(statement, ast.If) and not _loads(name, statement.test):
            found = {_is_read(name, statement.body), _is_read(name, statement.orelse)}
            if True in found or found == {False}:
                return True in found
        elif _loads(name, statement):
            return True
        elif name in _stored(statement):
            return False
    return None


class _Put(ast.NodeTransformer):
    """Writes a value in the place of a variable."""

    def __init__(self, name: str, value: ast.expr) -> None:
        self._name, self._value = name, value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the value for the variable where it is read."""
        return self._value if node.id == self._name and isinstance(node.ctx, ast.Load) else node
