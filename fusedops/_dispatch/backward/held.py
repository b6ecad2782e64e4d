"""Saved values that nothing but autograd holds, which backward may change in index."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedops._torch import raw_saved_tensors, storage_users


def _references(sequence: Sequence[Any], index: int) -> int:
    """Return the references to an item of a sequence, with those that this question takes."""
    item = sequence[index]
    return sys.getrefcount(item)


def _own_references() -> int | None:
    """Return :func:`_references` of an item that the sequence alone holds, or None where holders are not counted.

    Up to Python 3.13 there are 3: the sequence, the variable and the parameter. Python 3.14 borrows the parameter's,
    and another version may borrow more. Without the global interpreter lock, another thread may hold a tensor from one
    line to the next.
    """
    alone = (object(),)
    count = _references(alone, 0)
    holder = alone[0]
    counted = _references(alone, 0) == count + 1 and holder is not None
    return min(count, 3) if counted and "free-threading" not in sys.version else None


_OWN = _own_references()


def is_held(ctx: Any, tensors: Sequence[Tensor | None], indices: Sequence[int]) -> bool:
    """Return True where something else may hold one of the saved tensors at ``indices``, or its memory.

    A hook of one saved tensor may keep what it is given, and ``grad_fn.saved_tensors`` is public. A wrong True costs a
    copy, a wrong False overwrites data that is still read: where unsure, the answer is True.

    Args:
        ctx: the context of an autograd Function, in its backward.
        tensors: its saved tensors.
        indices: those that are asked about.
    """
    if _OWN is None:
        return True
    raw = raw_saved_tensors(ctx)
    for index in indices:
        tensor = tensors[index]
        if tensor is None:
            continue
        # beside the sequence: autograd, and the variable above
        if raw[index].unpack_hook is not None or _references(tensors, index) > _OWN + 2:
            return True
        base, storage = tensor._base, tensor.untyped_storage()
        # of its memory: the tensor, the storage that was just asked for, and the tensor that it is a view of
        users = 2 if base is None else 3
        if storage_users(storage) > users:
            return True
        # torch, and the variable above
        most = _OWN + 2
        if _references((storage,), 0) > most or (base is not None and _references((base,), 0) > most):
            return True
    return False
