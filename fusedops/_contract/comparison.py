"""The comparison of a call's arguments with an earlier call's.

Compared are the type of each tensor, what torch's own guards of compiled models compare (dtype, device, layout, shape,
strides, whether a gradient is wanted, and the modes and transforms in effect), and the type and value of every other
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import copysign
from typing import Any

import torch
from torch import Tensor

from fusedops._contract.constraint import compiled
from fusedops._contract.plain_argument import TENSOR_TYPES
from fusedops._torch import tensor_guard, unwrap_if_dead

_VALUES = frozenset((type(None), bool, int, float, str, torch.dtype))  # immutable types

# kinds of arguments
TENSOR, VALUE, NONE = "a tensor", "a value", "None"


def comparison_with(names: tuple[str, ...], args: Sequence[Any]) -> Callable[..., bool] | None:
    """Return a function that is True for arguments like ``args``, or None where ``args`` cannot be compared."""
    if not all(map(_is_comparable, args)):
        return None
    tensors = {id(arg): arg for arg in args if isinstance(arg, Tensor)}
    guard = tensor_guard([*tensors.values()])
    if guard is None:
        return None
    first = {id(arg): name for name, arg in zip(reversed(names), reversed(args))}
    kinds: list[str] = []
    for name, arg in zip(names, args):
        twin = first[id(arg)] if isinstance(arg, Tensor) else name
        kind = TENSOR if isinstance(arg, Tensor) else NONE if arg is None else VALUE
        kinds.append(kind if twin == name else twin)
    kept = [arg for arg, kind in zip(args, kinds) if kind == VALUE]
    return _comparison(names, tuple(kinds))(guard, *kept)


def _is_comparable(arg: object) -> bool:
    if type(arg) is tuple:
        return all(type(item) in _VALUES for item in arg)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(arg, Tensor):  # not a tensor of a functorch transform that has ended
        return type(arg) in TENSOR_TYPES and unwrap_if_dead(arg) is arg
    return type(arg) in _VALUES


def is_same(value: object, kept: Any) -> bool:
    """Return True for two equal values of the same type, and of tuples the same for each item.

    >>> is_same(2.5, 2.5), is_same(1, True), is_same((1, 0), (True, False)), is_same(0.0, -0.0)
    (True, False, False, False)
    """
    if type(value) is not type(kept):
        return False
    if type(kept) is tuple:
        return len(value) == len(kept) and all(map(is_same, value, kept))  # pyright: ignore
    return value == kept and (type(kept) is not float or copysign(1.0, kept) == copysign(1.0, value))  # pyright: ignore


@cache
def _comparison(names: tuple[str, ...], kinds: tuple[str, ...]) -> Callable[..., Callable[..., bool]]:
    """Compile ``keep``, which takes the guard and the values of a call and returns ``is_like``.

    Nested tensors are excluded first: torch's guard ends the process for one. Equal numbers are often the same object.

    Args:
        names: the names of the arguments.
        kinds: for each argument TENSOR, VALUE, NONE, or the name of an earlier argument that is the same tensor.
    """
    tests: list[str] = []
    tensors: list[str] = []
    values: list[str] = []
    for name, kind in zip(names, kinds):
        if kind == TENSOR:
            tensors.append(name)
        elif kind == VALUE:
            values.append(name)
            kept = f"kept_{name}"  # is_same alone takes 0.2 us
            is_same_float = f"type({name}) is float and {name} == {kept} and {kept}"
            tests.append(f"({name} is {kept} or {is_same_float} or is_same({name}, {kept}))")
        else:
            tests.append(f"{name} is {'None' if kind == NONE else kind}")
    tests += [f"not {name}.is_nested" for name in tensors]
    source = (
        f"def keep({', '.join(['guard', *(f'kept_{name}' for name in values)])}):\n"
        f"    def is_like({', '.join(names)}):\n"
        f"        return {' and '.join(tests)} and guard({', '.join(tensors)})\n"
        f"    return is_like\n"
    )
    return compiled(source, "a comparison", {"is_same": is_same})["keep"]
