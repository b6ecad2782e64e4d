"""Values that are computed once for a tensor in a block of code: one mask serves every layer of a model.

Without a block nothing is kept, because a change of a tensor cannot always be noticed: torch's version counter misses
collectives of torch.distributed, memory shared with numpy or by DLPack, and ``mask.data[...] = ...``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fusedops._named_tuple import NamedTuple
from fusedops._torch import is_same_storage

__all__ = ["cached_for", "reuse"]

T = TypeVar("T")


class _Entry(NamedTuple):
    """A value, and the tensor's version, storage and address of it when the value was computed."""

    version: int
    storage: torch.UntypedStorage
    address: int
    value: Any

    def is_of(self, version: int, storage: torch.UntypedStorage) -> bool:
        """Return True for the version and the storage of which the value is."""
        same = self.version == version and is_same_storage(self.storage, storage)
        return same and self.address == storage.data_ptr()


_CAPACITY = 16  # values for a tensor and its views at a time; a buffer may be cut to another length at every step
_block: ContextVar[WeakTensorKeyDictionary | None] = ContextVar("fusedops_reuse", default=None)


@contextmanager
def reuse() -> Generator[None]:
    """Compute what backends prepare for a mask once in this block, in this thread or task. Also a decorator.

    Put it around one step of a model: ``with fusedops.tensor_cache.reuse(): loss = model(batch)``. In-place changes by
    torch are noticed, and the mask is prepared again. A change that torch's version counter misses, such as a
    collective into the mask, must not happen between two calls with the mask in one block. What is kept ends with the
    block.

    >>> import torch, fusedops
    >>> mask = torch.tensor([[False, True]])
    >>> with fusedops.tensor_cache.reuse():
    ...     for layer in range(2):
    ...         y = fusedops.scaled_masked_softmax(torch.zeros(2, 2), mask)
    >>> y
    tensor([[1., 0.],
            [1., 0.]])
    """
    token = _block.set(WeakTensorKeyDictionary())
    try:
        yield
    finally:
        _block.reset(token)


def cached_for(tensor: Tensor, key: Hashable, compute: Callable[[], T]) -> T:
    """Return what ``compute()`` returns for ``tensor`` as it is now; in a block of :func:`reuse`, called once.

    Kept weakly, by the tensor's identity and version, so an in-place change by torch is noticed. A view is identified
    by its base and its place in it: ``mask[:]`` in every layer is one mask. ``mask.data`` and ``mask.detach()`` have no
    base, and are another tensor each time. A tensor made in inference mode has no version: ``compute`` runs each time.

    Args:
        tensor: any plain tensor.
        key: what is computed, and what else it depends on.
        compute: its result must not share the tensor's memory, or the tensor would live as long as the block.

    >>> import torch
    >>> from fusedops.tensor_cache import cached_for, reuse
    >>> mask = torch.tensor([True, False])
    >>> with reuse():
    ...     cached_for(mask, "any", lambda: bool(mask.any())), cached_for(mask, "any", lambda: "not called")
    (True, True)
    """
    values = _block.get()
    if values is None or tensor.is_inference():
        return compute()
    base = tensor._base
    cached = cast("dict[Any, _Entry]", values.setdefault(tensor if base is None else base, {}))
    # `mask.data = other` puts another storage below the same tensor without a new version. The entry holds the storage,
    # so that no other one gets its address
    version, storage = tensor._version, tensor.untyped_storage()
    entry_key = (key, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())
    entry = cached.get(entry_key)
    if entry is not None and entry.is_of(version, storage):
        return entry.value
    with torch.inference_mode(False):  # the value outlives the mode
        value = compute()
    outdated = [old for old, each in list(cached.items()) if not each.is_of(version, storage)]
    for old in outdated + list(cached)[: 1 - _CAPACITY]:
        cached.pop(old, None)
    cached[entry_key] = _Entry(version, storage, storage.data_ptr(), value)
    return value
