"""Triton's interpreter, with less time between operations: the same operations on the same numbers.

The interpreter replaces the builtins of Triton's language before a launch, and again at each call of a jit function
inside it, ``tl.sum`` included. Each time it lists and sorts all members of the language's modules: half of the time
of a kernel with many calls. Here the list is made once, and a launch replaces the builtins once for each module that
its functions are in. What replaces a builtin calls its function at once, without the check that a kernel calls it,
and is made once.
Types are made once a launch: see quick_types.py.

Launches of several threads take turns: the interpreter changes modules that all of them read.

A float32 is rounded to bfloat16, to the nearest, as hardware does: the interpreter cuts it off.
"""

from __future__ import annotations

import inspect
import os
import threading
from functools import cache
from typing import Any

import numpy as np
import quick_types
from triton.runtime import interpreter

_plain = (
    interpreter._patch_builtin,
    interpreter._patch_lang,
    interpreter.GridExecutor.__call__,
    interpreter._patch_attr,
)
_plain_convert = interpreter._convert_float
_turn = threading.Lock()
_patched: set[int] | None = None  # of the launch in progress: the globals of functions it has called, and packages


@cache
def _builtin_names(package: Any) -> tuple[str, ...]:
    """Return the members that the interpreter replaces. It must be called where none is replaced yet."""
    return tuple(name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member))


def _patch_builtin(package: Any, *rest: Any) -> None:
    if _patched is not None:
        if id(package) in _patched:  # for another module of the launch
            return
        _patched.add(id(package))
    for name in _builtin_names(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, _direct(member), *rest)


def _direct(member: Any) -> Any:
    """Return the function of a builtin."""
    return getattr(member, "__wrapped__", member)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    scope.set_attr(obj, name, _called_at_once(member))


@cache
def _called_at_once(member: Any) -> Any:
    """Return the function that replaces a builtin: it takes no semantic but the interpreter's."""
    semantic = interpreter.interpreter_semantic

    def new_member(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return member(*args, _semantic=semantic, **kwargs)

    return new_member


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
    with _turn:
        _patched = set()
        try:
            _plain[2](self, *args, **kwargs)
        finally:
            _patched = None
            quick_types.forget()


def _convert_float(values: Any, before: Any, after: Any, rounding_mode: Any) -> Any:
    """Convert between floating dtypes. A bfloat16 is the upper half of a float32."""
    if before == interpreter.tl.bfloat16 and after == interpreter.tl.float32:
        return values.view(np.uint16).astype(np.uint32) << np.uint32(16)
    if before != interpreter.tl.float32 or after != interpreter.tl.bfloat16:
        return _plain_convert(values, before, after, rounding_mode)
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # half to even
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return (np.where(is_nan, bits | np.uint32(0x400000), nearest) >> np.uint32(16)).astype(np.uint16)


def _begin_child() -> None:
    """Free the turn that a thread of the parent process may have had at a fork."""
    global _turn
    _turn = threading.Lock()


os.register_at_fork(after_in_child=_begin_child)


def install() -> None:
    """Shorten the interpreter's work in this process."""
    core = interpreter.tl.core
    for package in (interpreter.tl, core, core.tensor, interpreter.tl.math, core.tensor_descriptor_base):
        _builtin_names(package)
    interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang
    interpreter.GridExecutor.__call__ = _launch
    if "scope" in inspect.signature(_plain[3]).parameters:  # not in Triton 3.4
        interpreter._patch_attr = _patch_attr
    interpreter._convert_float = _convert_float
    quick_types.install()


def uninstall() -> None:
    """Return to the interpreter as it is."""
    interpreter._patch_builtin, interpreter._patch_lang, interpreter.GridExecutor.__call__ = _plain[:3]
    interpreter._patch_attr = _plain[3]
    interpreter._convert_float = _plain_convert
    quick_types.uninstall()
