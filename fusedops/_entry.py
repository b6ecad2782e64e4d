"""A kernel as the hot path calls it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.autograd.profiler import record_function

from fusedops._op import OPS

if TYPE_CHECKING:
    from fusedops._backend import Kernel
    from fusedops._constraint import Constraint


class Entry:
    """A kernel made ready for the hot path: its compiled check, its positional function, and a count of its calls."""

    __slots__ = ("backend", "call", "check", "count", "kernel")

    def __init__(self, backend: str, kernel: Kernel) -> None:
        from fusedops._constraint import compile_check  # not at import, where it would cost 5 ms

        op = OPS[kernel.op]
        parameters = op.parameters if kernel.direction == "forward" else op.backward_parameters
        self.backend = backend
        self.kernel = kernel
        self.check: Callable[..., Constraint | None] | None = compile_check(parameters, kernel.limits)
        self.call = op.positional(kernel.function) if kernel.direction == "forward" else kernel.function
        self.count: Iterator[int] = itertools.count()  # a plan's copies have those that stats() reads

    def calling(self, call: Callable[..., Any]) -> Entry:
        """A copy that calls something else."""
        made = copy(self)
        made.call = call
        return made

    def ranged(self) -> Entry:
        """A copy whose calls are ranges of torch.profiler, named ``fusedops::<op>[<backend>]``."""
        what = self.kernel.op if self.kernel.direction == "forward" else f"{self.kernel.op}_backward"
        return self.calling(partial(_in_range, f"fusedops::{what}[{self.backend}]", self.call))


def _in_range(name: str, call: Callable[..., Any], *args: Any) -> Any:
    with record_function(name):
        return call(*args)
