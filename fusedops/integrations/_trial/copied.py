"""A copy of a module's forward in which names of its file are other functions.

transformers' modules call functions of their file by name. A replaced module runs a copy of its forward in which such a
name is an op; the file, and with it every other model, stays as it is.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, cast

from fusedops.integrations._trial.twin import cached_weakly


def copied(forward: Any, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return a copy of a forward, decorators included, in which these names are these functions.

    >>> def scale():
    ...     return 1
    >>> def forward(x):
    ...     return x * scale()
    >>> forward.__globals__["scale"] = scale
    >>> copied(forward, {"scale": lambda: 3})(2), forward(2)
    (6, 2)
    """
    own = cast("FunctionType", inspect.unwrap(forward))
    names = {**own.__globals__, **functions}
    # torch.compile would look names up in the module of this name, and find the function that is replaced
    del names["__name__"]
    # torch.compile keeps compiled frames by code object, and their functions in the globals of the frame: functions
    # that share a code object must share their globals, so the copy has a code object of its own
    copy = FunctionType(own.__code__.replace(), names, own.__name__, own.__defaults__, own.__closure__)
    copy.__kwdefaults__ = own.__kwdefaults__
    return decorated(forward, own, copy)


def reason_not_to_copy(forward: Any) -> str | None:
    """Return why a copy of a forward would not do what the forward does, or None.

    A copy has the names of the file as they are now.
    """
    body = inspect.unwrap(forward)
    if decorated(forward, body, body) is None:
        return "a decorator of its forward keeps it where it cannot be replaced"
    for kind, name in instructions_of(body.__code__):
        if kind in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            return "its forward stores a name of its file"
        if kind == "LOAD_GLOBAL" and name in body.__globals__ and may_change(name, body.__globals__[name]):
            return f"its forward reads the global {name}"
    return None


@cached_weakly
def instructions_of(code: CodeType) -> list[tuple[str, Any]]:
    """Return the names of the instructions of a code, each with its argument.

    >>> instructions_of(compile("x", "", "eval"))[-1]
    ('RETURN_VALUE', None)
    """
    return [(each.opname, each.argval) for each in dis.get_instructions(code)]


def may_change(name: str, value: Any) -> bool:
    """Return True for a global that is a flag, a counter or a setting, and no constant.

    >>> may_change("step", 3), may_change("STEPS", 3), may_change("DEBUG", False)
    (True, False, True)
    """
    return isinstance(value, bool) or (isinstance(value, (int, float, str, type(None))) and not name.isupper())


def contents_of(function: Any) -> list[Any]:
    """Return what the closure of a function holds; None for what is not assigned yet."""
    return [_contents(cell) for cell in getattr(function, "__closure__", None) or ()]


def decorated(function: Any, body: Any, changed: Any) -> Any:
    """Return a function with another body below its decorators, or None where one of them holds it out of reach.

    A decorator made with functools.wraps holds what it decorates in its closure.
    """
    if function is body:
        return changed
    inner = function.__wrapped__
    below = decorated(inner, body, changed)
    cells = [each is inner for each in contents_of(function)]
    if below is None or True not in cells or not isinstance(function, FunctionType):
        return None
    closure = tuple(CellType(below) if held else cell for held, cell in zip(cells, function.__closure__ or ()))
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update({**vars(function), "__wrapped__": below})
    return copy


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
