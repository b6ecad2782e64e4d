"""Triton's interpreter, with less time between operations: the same operations on the same numbers.

The interpreter replaces the builtins of Triton's language before a launch, and again at each call of a jit function
inside it, ``tl.sum`` included. Each time it lists and sorts all members of the language's modules: half of the time
of a kernel with many calls. Here the list is made once, and a launch replaces the builtins once for each module that
its functions are in. Types are made once a launch: see quick_types.py.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import quick_types
from triton.runtime import interpreter

_plain = (interpreter._patch_builtin, interpreter._patch_lang, interpreter.GridExecutor.__call__)
_patched: set[int] | None = None  # the globals of the functions that the launch in progress has called


@cache
def _builtin_names(package: Any) -> tuple[str, ...]:
    """Return the members that the interpreter replaces. It must be called where none is replaced yet."""
    return tuple(name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member))


def _patch_builtin(package: Any, *rest: Any) -> None:
    for name in _builtin_names(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, *rest)


def _patch_lang(fn: Any) -> Any:
    if _patched is None:
        return _plain[1](fn)
    if id(fn.__globals__) in _patched:  # of a call inside a launch, which uses no result
        return None
    scope = _plain[1](fn)
    _patched.add(id(fn.__globals__))
    return scope


def _launch(self: Any, *args: Any, **kwargs: Any) -> None:
    global _patched
    _patched = set()
    try:
        _plain[2](self, *args, **kwargs)
    finally:
        _patched = None
        quick_types.forget()


def install() -> None:
    """Shorten the interpreter's work in this process."""
    core = interpreter.tl.core
    for package in (interpreter.tl, core, core.tensor, interpreter.tl.math, core.tensor_descriptor_base):
        _builtin_names(package)
    interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang
    interpreter.GridExecutor.__call__ = _launch
    quick_types.install()


def uninstall() -> None:
    """Return to the interpreter as it is."""
    interpreter._patch_builtin, interpreter._patch_lang, interpreter.GridExecutor.__call__ = _plain
    quick_types.uninstall()
