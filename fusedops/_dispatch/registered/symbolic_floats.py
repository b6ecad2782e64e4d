"""The overload ``symbolic`` of a registered op: its floats as tensors, for a graph that serves every value of them.

torch.compile has a float that varies as a tensor of its graph. It takes back the tensor from aten's arithmetic alone:
a float that reaches any other op is a constant of the graph, which is compiled anew for each value (torch 2.13,
torch/fx/passes/_tensorify_python_scalars.py). So a symbolic float is added to 0, which makes it a tensor again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from sys import modules
from typing import Any

import torch
from torch import Tensor

from fusedops._dispatch.registered.implementations import BackwardImpl, ForwardImpl


def has_symbolic_floats(args: Sequence[Any], indices: Collection[int]) -> bool:
    """Return True where a float is symbolic: the call is traced, for every value. Not with DTensors, whose rules are
    those of the default overload.
    """
    for index in indices:
        if index < len(args) and isinstance(args[index], torch.SymFloat):
            distributed = modules.get("torch.distributed.tensor")
            return distributed is None or not any(isinstance(arg, distributed.DTensor) for arg in args)
    return False


def as_tensors(args: Sequence[Any], indices: Collection[int]) -> list[Any]:
    """Return the arguments with the floats as tensors."""
    zero = torch.zeros((), dtype=torch.float64)
    return [zero + arg if index in indices and arg is not None else arg for index, arg in enumerate(args)]


class SymbolicFloats:
    """The implementations of an overload ``symbolic``, by those of the op.

    Args:
        impl: the op's.
        indices: where the floats are among the arguments.
    """

    def __init__(self, impl: ForwardImpl | BackwardImpl, indices: Collection[int]) -> None:
        self._impl, self._indices = impl, indices

    def run(self, *args: Any, **options: Any) -> Any:
        """Serve a call."""
        return self._impl.run(*self.as_floats(args), **options)

    def fake(self, *args: Any, **options: Any) -> Any:
        """Return empty results. No shape depends on a float: 1.0 stands for each."""
        floats = [1.0 if index in self._indices and arg is not None else arg for index, arg in enumerate(args)]
        return self._impl.fake(*floats, **options)

    def reference(self, *args: Any, **options: Any) -> Any:
        """Compute the op in plain torch."""
        return self._impl.reference(*self.as_floats(args), **options)

    def as_floats(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments with the floats as numbers."""
        return [
            arg.item() if index in self._indices and isinstance(arg, Tensor) else arg for index, arg in enumerate(args)
        ]
