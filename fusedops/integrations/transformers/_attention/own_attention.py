"""Attention modules that are not transformers': what they and their hooks ask of the implementation that they call."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable
from typing import Any, cast

from torch.nn import Module

from fusedops.integrations.transformers._replacement import own_body
from fusedops.integrations.transformers._trial.source import home_of

_OPTIONS = ("s_aux", "softcap", "position_bias", "indices", "block_indices")  # that change what "fusedops" computes


def keywords_of(module: Module) -> set[str]:
    """Return the names of arguments that a module's forward passes by name."""
    return _words(own_body(module))


def names_in(kind: type[Module]) -> set[str]:
    """Return the names of attributes, and of arguments passed by name, in the functions that a class has of its own."""
    functions = [inspect.unwrap(each) for each in vars(kind).values() if inspect.isfunction(each)]
    return {name for each in functions for name in (*each.__code__.co_names, *_words(each))}


def reads_weights(module: Any) -> bool:
    """Return True where something beside the model may read the probabilities that "eager" returns.

    It is a hook of the module, or a forward of the user's that stores attributes.

    >>> import torch
    >>> reads_weights(torch.nn.Linear(2, 2))
    False
    """
    if any(not home_of(hook).startswith("transformers.") for hook in module._forward_hooks.values()):
        return True
    return _is_own(module) and any(each.opname == "STORE_ATTR" for each in dis.get_instructions(own_body(module)))


def left_out(name: str, function: Any, modules: Iterable[Module], dropouts: Iterable[str]) -> str | None:
    """Return what an implementation leaves out of a call of the user's attention, or None.

    Args:
        name: "eager" or "sdpa".
        function: the implementation.
        modules: those with attention.
        dropouts: names of the dropouts of attention that are above 0.

    >>> left_out("sdpa", None, [], [])
    """
    read = set(inspect.signature(function).parameters) | _words(function) if callable(function) else set[str]()
    for module in filter(_is_own, modules):
        given = keywords_of(module)
        for option in _OPTIONS:
            if option in given and option not in read:
                return f"its implementation {name} leaves out the {option} that {type(module).__name__} passes"
        code: Any = own_body(module).__code__
        if name == "eager" and "dropout" in given and any(dropouts) and "training" not in code.co_names:
            return f"its implementation eager leaves out the dropout of {type(module).__name__} in evaluation"
    return None


def _is_own(module: Module) -> bool:
    return not home_of(own_body(module)).startswith("transformers.")


def _words(function: Any) -> set[str]:
    """Return the words among the constants of a function: names that it passes, and keys that it reads."""
    names: set[str] = set()
    for constant in getattr(getattr(function, "__code__", None), "co_consts", ()):
        each = cast("tuple[Any, ...]", constant if isinstance(constant, tuple) else (constant,))
        names.update(name for name in each if isinstance(name, str))
    return names
