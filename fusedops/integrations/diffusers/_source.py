"""The source of a function as a tree, and a function of a changed tree.

The tree is compiled as it is first, and compared with the code that runs: a file that has changed since its import, or
a function whose source is another's, is noticed. A changed function has the globals of the original, its defaults and
its closure; what it calls in addition is in one more variable of its closure.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import linecache
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import resolve_name
from itertools import chain
from types import CellType, CodeType, FunctionType
from typing import Any

from fusedops.integrations._trial.copied import contents_of
from fusedops.integrations._trial.twin import cached_weakly

SERVED = "_fusedops"  # the name of the variable
_FUTURE = sum({getattr(__future__, name).compiler_flag for name in __future__.all_feature_names})
_CLASS = "__class__"  # the variable of a closure by which super() knows the class


@cached_weakly
def text_of(function: FunctionType) -> tuple[str, int] | None:
    """Return the source of a function and its first line, or None where there is none."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError, IndentationError, SyntaxError):
        return None
    return "".join(lines), first


def tree_of(function: FunctionType) -> ast.FunctionDef | str:
    """Return the tree of a function without its decorators, or the reason why there is none. It is new for each call.

    >>> tree_of(names_in).name
    'names_in'
    """
    source = text_of(function)
    if source is None:
        return "the source of its forward cannot be read"
    text, first = source
    indented = text[:1].isspace()
    try:
        module = ast.parse("if 1:\n" + text if indented else text)
    except SyntaxError:
        return "the source of its forward cannot be read"
    ast.increment_lineno(module, first - 1 - indented)
    (found,) = module.body[0].body if isinstance(module.body[0], ast.If) else module.body
    if not isinstance(found, ast.FunctionDef):
        return "its forward is no function of a file"
    found.decorator_list = []
    code = _code_of(found, function, ())
    return found if code is not None and _alike(code, function.__code__) else "the source of its forward has changed"


def function_of(tree: ast.FunctionDef, original: FunctionType, served: Any) -> FunctionType:
    """Return the function of a changed tree, in which the variable SERVED is ``served``."""
    code = _code_of(ast.fix_missing_locations(tree), original, (SERVED,))
    assert code is not None, "the tree has a function"
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or ()))
    cells[SERVED] = CellType(served)
    made = FunctionType(
        code,
        original.__globals__,
        original.__name__,
        original.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    made.__kwdefaults__ = original.__kwdefaults__
    made.__annotations__ = original.__annotations__
    made.__qualname__, made.__module__, made.__doc__ = original.__qualname__, original.__module__, original.__doc__
    made.__dict__.update(original.__dict__)
    return made


def _code_of(tree: ast.FunctionDef, original: FunctionType, more: tuple[str, ...]) -> CodeType | None:
    """Return the code of a function, compiled within its class and with the variables of its closure."""
    _, _, parent = original.__qualname__.rpartition(".")[0].rpartition(".")
    inner: ast.stmt = tree
    if parent and parent != "<locals>":  # a private name has the class in it
        inner = _parsed(f"class {parent}: pass")
        assert isinstance(inner, ast.ClassDef)
        inner.body = [tree]
    free = [name for name in original.__code__.co_freevars if name != _CLASS]
    outer = _parsed(f"def outer({', '.join((*free, *more))}): pass")
    assert isinstance(outer, ast.FunctionDef)
    outer.body = [inner]
    whole = ast.fix_missing_locations(ast.Module([*_imports_of(original.__code__.co_filename), outer], []))
    flags = original.__code__.co_flags & _FUTURE
    code = compile(whole, original.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    return next((each for each in _inside(code) if each.co_name == tree.name), None)


@lru_cache(128)
def _imports_of(filename: str) -> tuple[ast.stmt, ...]:
    """Return an import of the names that a file imports: Python compiles calls of their attributes apart."""
    try:
        waiting: list[ast.AST] = [ast.parse("".join(linecache.getlines(filename)))]
    except SyntaxError:
        return ()
    names = set[str]()
    while waiting:
        each = waiting.pop()
        if isinstance(each, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in each.names}
        elif not isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            waiting += ast.iter_child_nodes(each)
    return (ast.Import([ast.alias(name) for name in sorted(names - {"*"})]),) if names - {"*"} else ()


def _parsed(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def _inside(code: CodeType) -> list[CodeType]:
    """Return the codes in a code, those of one level before those inside of them."""
    own = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [*own, *chain.from_iterable(map(_inside, own))]


def _alike(one: CodeType, other: CodeType) -> bool:
    """Return True for codes that do the same: with the same instructions, names and constants."""
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(one, name) != getattr(other, name) for name in names):
        return False
    pairs = zip(one.co_consts, other.co_consts)
    return len(one.co_consts) == len(other.co_consts) and all(
        _alike(a, b)
        if isinstance(a, CodeType) and isinstance(b, CodeType)
        else (type(a), repr(a)) == (type(b), repr(b))
        for a, b in pairs
    )


def names_in(*trees: ast.AST) -> set[str]:
    """Return the names of variables in trees.

    >>> sorted(names_in(ast.parse("a.b(c)")))
    ['a', 'c']
    """
    return {each.id for tree in trees for each in ast.walk(tree) if isinstance(each, ast.Name)}


def path_of(tree: ast.AST) -> str:
    """Return an attribute of a variable as it is written, such as ``self.norm1``; empty for anything else.

    >>> path_of(ast.parse("self.attn.norm", mode="eval").body)
    'self.attn.norm'
    """
    if isinstance(tree, ast.Attribute):
        before = path_of(tree.value)
        return f"{before}.{tree.attr}" if before else ""
    return tree.id if isinstance(tree, ast.Name) else ""


def values_of(function: FunctionType) -> Mapping[str, Any]:
    """Return what the variables outside of a function are, and what it imports from files that are imported already."""
    values: dict[str, Any] = {}
    tree = tree_of(function)
    for each in () if isinstance(tree, str) else ast.walk(tree):
        if isinstance(each, ast.ImportFrom):
            home = resolve_name("." * each.level + (each.module or ""), function.__globals__.get("__package__"))
            names = vars(sys.modules[home]) if home in sys.modules else {}
            values |= {alias.asname or alias.name: names.get(alias.name) for alias in each.names}
    return function.__globals__ | dict(zip(function.__code__.co_freevars, contents_of(function))) | values
