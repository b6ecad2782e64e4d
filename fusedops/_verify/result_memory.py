"""The memory of a call: inputs that a kernel writes, and results in memory that is not their own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fusedops._torch import storage_of


class Inputs:
    """A copy of the tensors of a call, to find those that a kernel writes."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.tensors = {name: arg for name, arg in args.items() if isinstance(arg, Tensor)}
        self._before = {name: (_version(arg), _bits(arg)) for name, arg in self.tensors.items()}

    def written(self) -> list[str]:
        """Return the names of those whose contents, or whose count of changes, are not as before."""
        return [name for name, before in self._before.items() if self._changed(name, *before)]

    def _changed(self, name: str, version: int, bits: Tensor | None) -> bool:
        tensor = self.tensors[name]
        return _version(tensor) != version or (bits is not None and not torch.equal(_bits(tensor), bits))  # type: ignore[arg-type]


class _Range(NamedTuple):
    """The bytes from a tensor's first element to its last."""

    device: torch.device
    start: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Range | None:
        """Return the range, or None for a tensor without memory."""
        if tensor.is_meta or not tensor.numel():
            return None
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        return cls(tensor.device, tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize)

    def overlaps(self, other: _Range | None) -> bool:
        """Return True where a byte is in both."""
        return other is not None and self.device == other.device and self.start < other.end and other.start < self.end


class _Earlier(NamedTuple):
    name: str
    range: _Range
    storage: StorageWeakRef

    def is_alive(self) -> bool:
        """Return True where the memory is still held by a tensor of that call."""
        weak: Any = self.storage
        storage = storage_of(weak.cdata)
        if storage is None:
            return False
        start: int = storage.data_ptr()
        return start <= self.range.start and self.range.end <= start + storage.nbytes()  # not freed by resize_(0)


class Results:
    """The results of the calls so far that are still alive, to find one whose memory is used again."""

    def __init__(self) -> None:
        self._earlier: list[_Earlier] = []
        self._lock = threading.Lock()  # CUDA's backward runs on a thread of its own

    def shared(self, op: str, results: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> list[tuple[str, str]]:
        """Return the name of each result in the memory of an input, another result or a result of an earlier call.

        Args:
            op: the op's name.
            results: by name.
            inputs: by name.
        """
        shared: list[tuple[str, str]] = []
        with self._lock:
            self._earlier = [each for each in self._earlier if each.is_alive()]
            others = [(f"the input {name}", _Range.of(tensor)) for name, tensor in inputs.items()]
            others += [(f"the {each.name} of an earlier call, which is in use", each.range) for each in self._earlier]
            for name, result in results.items():
                own = _Range.of(result)
                if own is None:
                    continue
                owner = next((other for other, memory in others if own.overlaps(memory)), None)
                if owner is not None:
                    shared.append((name, f"in the memory of {owner}, expected memory of its own"))
                others.append((f"the {name}", own))
                weak = StorageWeakRef(result.untyped_storage())
                self._earlier.append(_Earlier(f"{name} of {op}", own, weak))
        return shared


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _bits(tensor: Tensor) -> Tensor | None:
    """Return a copy of the elements as bytes: NaN equals NaN, and -0 differs from 0."""
    if tensor.is_meta:
        return None
    copied = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copied.reshape(-1).view(torch.uint8)
