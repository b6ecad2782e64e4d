"""Code of a model that is not transformers': what it and hooks ask of the implementation of attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType
from typing import Any, cast

from torch.nn import Module

from fusedops.integrations._replacement import own_body, own_class
from fusedops.integrations._trial.source import home_of

_OPTIONS = ("s_aux", "softcap", "position_bias", "indices", "block_indices")  # that change what "fusedops" computes


def keywords_of(module: Module) -> set[str]:
    """Return the names of arguments that a module's forward passes by name."""
    return _words(own_body(module))


def names_in(kind: type[Module]) -> set[str]:
    """Return the names of attributes, and of arguments passed by name, in the functions that a class has of its own."""
    functions = [inspect.unwrap(each) for each in vars(kind).values() if inspect.isfunction(each)]
    return {name for each in functions for name in (*each.__code__.co_names, *_words(each))}


def is_own(value: Any) -> bool:
    """Return True for a function or a class of the user's: of neither transformers nor torch.

    >>> is_own(Module.forward), is_own(lambda: 0)
    (False, True)
    """
    return home_of(value).partition(".")[0] not in ("transformers", "torch")


def own_names(modules: Iterable[Module]) -> set[str]:
    """Return the names and words in the user's code of modules: methods, and functions that these call.

    >>> own_names([Module()])
    set()
    """
    kinds = {kind for module in modules for kind in own_class(module).__mro__ if is_own(kind)}
    members = [each for kind in kinds for name, each in vars(kind).items() if name != "__init__"]
    waiting: list[Any] = [each.fget if isinstance(each, property) else each for each in members]
    found, read = set[str](), set[Any]()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if isinstance(function, FunctionType) and function not in read and is_own(function):
            read.add(function)
            found.update(function.__code__.co_names, _words(function))
            called = [function.__globals__.get(name) for name in function.__code__.co_names]
            waiting += [each for each in called if isinstance(each, FunctionType)]
    return found


def has_hooks(module: Any) -> bool:
    """Return True where a hook may read the probabilities that "eager" returns.

    >>> has_hooks(Module())
    False
    """
    return any(not home_of(hook).startswith("transformers.") for hook in module._forward_hooks.values())


def left_out(module: Module) -> str | None:
    """Return what "sdpa" leaves out of a call of the user's attention, or None.

    >>> left_out(Module())
    """
    if not is_own(own_body(module)):
        return None
    function = own_body(module).__globals__["ALL_ATTENTION_FUNCTIONS"]["sdpa"]
    read, given = set(inspect.signature(function).parameters) | _words(function), keywords_of(module)
    option = next((option for option in _OPTIONS if option in given and option not in read), None)
    return option and f"its implementation sdpa leaves out the {option} that {type(module).__name__} passes"


def _words(function: Any) -> set[str]:
    """Return the words among the constants of a function: names that it passes, and keys that it reads."""
    names: set[str] = set()
    for constant in getattr(getattr(function, "__code__", None), "co_consts", ()):
        each = cast("tuple[Any, ...]", constant if isinstance(constant, (tuple, frozenset)) else (constant,))
        names.update(name for name in each if isinstance(name, str))
    return names
