"""The addresses that Triton's interpreter loads and stores, for tests that count bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder


class Traffic:
    """Addresses that were loaded and stored, one array for each access."""

    def __init__(self) -> None:
        self.loads: list[np.ndarray] = []
        self.stores: list[np.ndarray] = []
        self.sizes: dict[str, int] = {"loads": 0, "stores": 0}

    def of(self, tensor: Tensor, which: str) -> list[np.ndarray]:
        start = tensor.data_ptr()
        # no tensor here has gaps, so this is where it ends
        end = start + tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        return [a for a in getattr(self, which) if a.size and start <= a.flat[0] < end]

    def asked(self, tensor: Tensor, which: str = "loads") -> int:
        return sum(a.size for a in self.of(tensor, which)) * tensor.element_size()

    def distinct(self, tensor: Tensor, which: str = "loads") -> int:
        found = self.of(tensor, which)
        return np.unique(np.concatenate([a.ravel() for a in found])).size * tensor.element_size() if found else 0


def counted(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Return the traffic from here to the end of the test."""
    seen = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def counting_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        where = np.broadcast_to(mask.data, ptrs.data.shape)
        seen.loads.append(ptrs.data[where])
        seen.sizes["loads"] += int(where.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(self, ptrs, mask, *rest)

    def counting_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        where = np.broadcast_to(mask.data, ptrs.data.shape)
        seen.stores.append(ptrs.data[where])
        seen.sizes["stores"] += int(where.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counting_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counting_store)
    return seen


def total(traffic: Traffic) -> int:
    return traffic.sizes["loads"] + traffic.sizes["stores"]
