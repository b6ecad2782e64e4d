"""The overload ``numbers`` of a registered op: its floats as tensors, for a graph that serves every value of them.

torch.compile has a float that varies as a tensor of its graph. It takes back the tensor from aten's arithmetic alone:
a float that reaches any other op is a constant of the graph, which is compiled anew for each value (torch 2.13,
torch/fx/passes/_tensorify_python_scalars.py). So a symbolic float is added to 0, which makes it a tensor again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedops._dispatch.registered_kernels import BackwardKernels, ForwardKernels


def has_symbolic_numbers(args: Sequence[Any], places: Collection[int]) -> bool:
    """Return True where a float is symbolic: the call is traced, for every value."""
    for place in places:
        if place < len(args) and isinstance(args[place], torch.SymFloat):
            return True
    return False


def as_tensors(args: Sequence[Any], places: Collection[int]) -> list[Any]:
    """Return the arguments with the floats as tensors."""
    zero = torch.zeros((), dtype=torch.float64)
    return [zero + arg if place in places and arg is not None else arg for place, arg in enumerate(args)]


class NumberTensors:
    """The computations of an overload ``numbers``, by those of the op.

    Args:
        kernels: the op's.
        places: the places of the floats.
    """

    def __init__(self, kernels: ForwardKernels | BackwardKernels, places: Collection[int]) -> None:
        self._kernels, self._places = kernels, places

    def run(self, *args: Any, backend: str | None = None) -> Any:
        """Serve a call."""
        return self._kernels.run(*self._as_floats(args), backend=backend)

    def fake(self, *args: Any, backend: str | None = None) -> Any:
        """Return empty results. No shape depends on a float: 1.0 stands for each."""
        floats = [1.0 if place in self._places and arg is not None else arg for place, arg in enumerate(args)]
        return self._kernels.fake(*floats)

    def reference(self, *args: Any, backend: str | None = None) -> Any:
        """Compute the op in plain torch."""
        return self._kernels.reference(*self._as_floats(args))

    def _as_floats(self, args: Sequence[Any]) -> list[Any]:
        return [
            arg.item() if place in self._places and isinstance(arg, Tensor) else arg for place, arg in enumerate(args)
        ]
