"""Backends made for a test: plain torch behind given constraints, which note that they ran."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import fusedops
from fusedops.constraints import Constraint
from fusedops.testing import OPS


class Fakes:
    """Register backends for scaled_masked_softmax, and note in ``ran`` which of them run."""

    op = OPS["scaled_masked_softmax"]

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __call__(
        self,
        name: str,
        *limits: Constraint,
        backward: Sequence[Constraint] | None = (),
        priority: int = 50,
        devices: tuple[str, ...] = ("cpu",),
        run: Callable[..., Any] | None = None,
        **fields: Any,
    ) -> fusedops.Backend:
        """Register one; ``backward`` are the constraints of its backward kernel, or None for no such kernel."""
        kernels = [fusedops.kernel(self.op.name, *limits)(self._noting(name, run or self.op.reference))]
        if backward is not None:
            noting = self._noting(f"{name} backward", self.op.backward)
            kernels.append(fusedops.kernel(self.op.name, *backward, direction="backward")(noting))
        return fusedops.register(fusedops.Backend(name, devices, priority, tuple(kernels), **fields))

    def _noting(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.ran.append(label)
            return function(*args, **kwargs)

        noting.__signature__ = inspect.signature(  # type: ignore[attr-defined]
            self.op.backward if label.endswith("backward") else self.op.reference
        )
        return noting
