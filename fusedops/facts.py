"""What is learnt of a tensor once, however many calls it is given to: one mask serves every layer of a model."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["learnt"]

T = TypeVar("T")

_KEPT = 16  # facts a tensor and its views have at a time; a buffer may be cut to another length at every step
_facts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def learnt(tensor: Tensor, key: Hashable, learn: Callable[[], T]) -> T:
    """What ``learn()`` returns for ``tensor`` as it is now: called once, and kept as long as the tensor lives.

    Kept weakly, by the tensor's identity and version, so an in-place change is noticed. A view is known by its base and
    its place in it: ``mask[:]`` in every layer is one mask. ``mask.data`` and ``mask.detach()`` have no base, and are
    another tensor each time. A tensor made in inference mode has no version, a change of it could not be noticed, and
    ``learn`` is called each time.

    Args:
        tensor: any plain tensor.
        key: what is learnt, and what else it depends on.
        learn: what it returns must not share the tensor's memory, or the tensor would be kept for ever.
    """
    if tensor.is_inference():
        return learn()
    base = tensor._base
    known = cast("dict[Any, tuple[int, T]]", _facts.setdefault(tensor if base is None else base, {}))
    version = tensor._version
    # `mask.data = other` puts another storage below the same tensor, and its version does not tell
    storage = tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
    place = (key, tensor.dtype, storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    fact = known.get(place)
    if fact is not None and fact[0] == version:
        return fact[1]
    with torch.inference_mode(False):  # what is made outlives the mode
        made = learn()
    for other in [old for old, (of, _) in list(known.items()) if of != version] + list(known)[: 1 - _KEPT]:
        known.pop(other, None)
    known[place] = version, made
    return made
