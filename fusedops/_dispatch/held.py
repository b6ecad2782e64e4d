"""Saved values that nothing but autograd holds, which backward may change in place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_OWN = 4  # references to a saved tensor: autograd's, the sequence of them, the local below, and getrefcount's parameter


def is_held(ctx: Any, tensors: Sequence[Tensor | None], places: Sequence[int]) -> bool:
    """Return True where something else may hold one of the saved tensors at ``places``, or its memory.

    A hook of one saved tensor may keep what it is given, and ``grad_fn.saved_tensors`` is public. A wrong True costs a
    copy, a wrong False changes a tensor that somebody reads: what is not as expected counts as held.

    Args:
        ctx: the context of an autograd Function, in its backward.
        tensors: its saved tensors.
        places: those that are asked about.
    """
    raw = ctx._raw_saved_tensors
    for place in places:
        tensor = tensors[place]
        if tensor is None:
            continue
        if raw[place].unpack_hook is not None or sys.getrefcount(tensor) > _OWN:
            return True
        base, storage = tensor._base, tensor.untyped_storage()
        # of its memory: the tensor, the storage that was just asked for, and the tensor that it is a view of
        users = 2 if base is None else 3
        if torch._C._storage_Use_Count(storage._cdata) > users:  # pyright: ignore
            return True
        if sys.getrefcount(storage) > 3 or (base is not None and sys.getrefcount(base) > 3):
            return True
    return False
