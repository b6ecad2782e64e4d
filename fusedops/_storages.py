"""Tensors whose storage was freed, as FSDP and offloading do: they have elements and no memory to read.

A kernel that reads by addresses gets a null pointer for one, which it could take for an absent tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fusedops.errors import InvalidInputError


def is_freed(tensor: Tensor) -> bool:
    """Return True for a tensor that has elements and whose storage has no memory. False on the meta device."""
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # of a kind that has no storage
        return False
    return not address and tensor.numel() > 0 and not tensor.is_meta


def freed_error(what: str, name: str) -> InvalidInputError:
    """Return the exception for the tensor ``name`` of the call ``what``."""
    return InvalidInputError(
        f"{what}: got {name} without memory: its storage was freed, expected a tensor with memory; to fix: call before "
        f"{name} is freed, or load it again, as in {name}.untyped_storage().resize_(...)"
    )


def check_storages(what: str, names: Sequence[str], args: Sequence[Any]) -> None:
    """Raise InvalidInputError for the first argument that is a tensor whose storage was freed."""
    for name, arg in zip(names, args):
        if isinstance(arg, Tensor) and is_freed(arg):
            raise freed_error(what, name)


def with_check(function: Callable[..., Any], what: str, types: Mapping[str, str]) -> Callable[..., Any]:
    """Return ``function`` with a check of the storages of its tensors before each call: 0.1 us for each tensor.

    Args:
        function: takes the parameters by position.
        what: the call, for messages.
        types: the annotation of each parameter.
    """
    indices = tuple(at for at, text in enumerate(types.values()) if text.startswith("Tensor"))
    return partial(_checked, function, indices, partial(check_storages, what, tuple(types)))


def _checked(function: Callable[..., Any], indices: Sequence[int], check: Callable[..., None], *args: Any) -> Any:
    for index in indices:
        tensor = args[index]
        try:
            if tensor is not None and not tensor.data_ptr():  # not is_freed: its call costs 0.1 us
                check(args)
                break
        except RuntimeError:  # of a kind that has no storage
            pass
    return function(*args)
