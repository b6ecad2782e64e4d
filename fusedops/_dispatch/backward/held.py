"""Saved values that nothing but autograd holds, which backward may change in index."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fusedops._torch import raw_saved_tensors, storage_users

_OWN = 4  # references to a saved tensor: autograd's, the sequence of them, the local below, and getrefcount's parameter


def is_held(ctx: Any, tensors: Sequence[Tensor | None], indices: Sequence[int]) -> bool:
    """Return True where something else may hold one of the saved tensors at ``indices``, or its memory.

    A hook of one saved tensor may keep what it is given, and ``grad_fn.saved_tensors`` is public. A wrong True costs a
    copy, a wrong False changes a tensor that somebody reads: what is not as expected counts as held.

    Args:
        ctx: the context of an autograd Function, in its backward.
        tensors: its saved tensors.
        indices: those that are asked about.
    """
    raw = raw_saved_tensors(ctx)
    for index in indices:
        tensor = tensors[index]
        if tensor is None:
            continue
        if raw[index].unpack_hook is not None or sys.getrefcount(tensor) > _OWN:
            return True
        base, storage = tensor._base, tensor.untyped_storage()
        # of its memory: the tensor, the storage that was just asked for, and the tensor that it is a view of
        users = 2 if base is None else 3
        if storage_users(storage) > users:
            return True
        if sys.getrefcount(storage) > 3 or (base is not None and sys.getrefcount(base) > 3):
            return True
    return False
