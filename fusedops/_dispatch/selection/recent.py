"""Recent calls of a plan: a call like one that its first kernel took is not checked again.

Compared are the type of each tensor, what torch's own guards of compiled models compare (dtype, device, layout, shape,
strides, whether a gradient is wanted, and the modes and transforms in effect), and the type and value of every other
argument. That is all that constraints read, so a call like a recent one passes the same checks. Nothing else follows
from the comparison: the kernel gets the arguments of its own call.

A call is kept when one of its shapes comes the second time: keeping one takes 10 us, which calls of ever other shapes
(sequences of any length, growing keys) would pay each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import copysign
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusedops._contract.constraint import compiled
from fusedops._contract.plain_argument import TENSOR_TYPES
from fusedops._torch import tensor_guard

if TYPE_CHECKING:
    from fusedops._plugins.record import PreparedKernel

MOST = 4  # of a plan; each takes a call that is not like it 0.1 to 0.3 us
_VALUES = frozenset((type(None), bool, int, float, str, torch.dtype))  # types of values that cannot change


# kinds of arguments
TENSOR, VALUE, NONE = "a tensor", "a value", "None"


class Recent(NamedTuple):
    """A recent call.

    Attributes:
        is_like: True for arguments like those of the call.
        kernel: the plan's first, which took it.
        wants_gradient: a tensor of the call requires a gradient.
        backward: the kernel of the gradient; None where each call selects it.
    """

    is_like: Callable[..., bool]
    kernel: PreparedKernel
    wants_gradient: bool
    backward: PreparedKernel | None


def with_call(
    recent: tuple[Recent, ...],
    parameters: tuple[str, ...],
    kernel: PreparedKernel,
    backward: PreparedKernel | None,
    args: tuple[Any, ...],
    wants_gradient: bool,
) -> tuple[Recent, ...]:
    """Return the recent calls with one that passed the checks of the op and of the kernel, in place of the oldest."""
    if not all(map(_is_comparable, args)):
        return recent
    tensors = {id(arg): arg for arg in args if isinstance(arg, Tensor)}
    guard = tensor_guard([*tensors.values()])
    if guard is None:
        return recent
    first = {id(arg): name for name, arg in zip(reversed(parameters), reversed(args))}
    kinds: list[str] = []
    for name, arg in zip(parameters, args):
        twin = first[id(arg)] if isinstance(arg, Tensor) else name
        kind = TENSOR if isinstance(arg, Tensor) else NONE if arg is None else VALUE
        kinds.append(kind if twin == name else twin)
    kept = [arg for arg, kind in zip(args, kinds) if kind == VALUE]
    is_like = _comparison(parameters, tuple(kinds))(guard, *kept)
    return (Recent(is_like, kernel, wants_gradient, backward), *recent)[:MOST]


def _is_comparable(arg: object) -> bool:
    if type(arg) is tuple:
        return all(type(item) in _VALUES for item in arg)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return type(arg) in _VALUES or type(arg) in TENSOR_TYPES


def is_same(value: object, kept: Any) -> bool:
    """Return True for two values of one type that are equal, where items of tuples have one type too.

    >>> is_same(2.5, 2.5), is_same(1, True), is_same((1, 0), (True, False)), is_same(0.0, -0.0)
    (True, False, False, False)
    """
    if type(value) is not type(kept):
        return False
    if type(kept) is tuple:
        return len(value) == len(kept) and all(map(is_same, value, kept))  # pyright: ignore
    return value == kept and (type(kept) is not float or copysign(1.0, kept) == copysign(1.0, value))  # pyright: ignore


@cache
def _comparison(parameters: tuple[str, ...], kinds: tuple[str, ...]) -> Callable[..., Callable[..., bool]]:
    """Compile a function of what is kept of a call, which returns ``is_like``.

    A nested tensor is found first: torch's guard ends the process for one. Equal numbers are often the same object.

    Args:
        parameters: of the op.
        kinds: of each argument: TENSOR, VALUE, NONE, or the parameter that has the same tensor.
    """
    tests: list[str] = []
    tensors: list[str] = []
    values: list[str] = []
    for name, kind in zip(parameters, kinds):
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
        f"    def is_like({', '.join(parameters)}):\n"
        f"        return {' and '.join(tests)} and guard({', '.join(tensors)})\n"
        f"    return is_like\n"
    )
    return compiled(source, "a recent call", {"is_same": is_same})["keep"]
