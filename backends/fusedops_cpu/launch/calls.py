"""Kernels that are one call of a function of the library: what a launcher returns, and how that call is made.

A launcher that is decorated with :func:`library_kernel` returns a :class:`LibraryCall` instead of calling the library
itself. Such a call is remembered (``src/launch.cpp``): the next one with arguments of the same types, dtypes, devices,
shapes, strides and values allocates its results, puts the addresses of its tensors into the struct, and calls the
function, without the launcher.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import fusedops
from fusedops.constraints import Constraint
from fusedops_cpu.launch.native import remembering
from fusedops_cpu.launch.replay import record
from fusedops_cpu.launch.struct_call import LibraryCall

Op = str | Callable[..., Any]


def library_kernel(
    op: Op, *constraints: Constraint, source: str, **options: Any
) -> Callable[[Callable[..., Any]], fusedops.Kernel]:
    """Return a decorator that makes a launcher a kernel. The arguments are those of :func:`fusedops.kernel`."""
    return fusedops.kernel(op, *constraints, source=source, prepare=prepared, record=record, **options)


def prepared(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the launcher's arguments that runs the call it returns, and returns the results."""
    return remembering(launcher) or partial(_launch, launcher)


def results_of(returned: Any) -> Any:
    """Return the results of a launcher that returned them, or a call, which is run."""
    return returned.function.run(returned) if type(returned) is LibraryCall else returned


def _launch(launcher: Callable[..., Any], *args: Any) -> Any:
    return results_of(launcher(*args))
