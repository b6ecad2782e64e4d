"""The decorator of kernels that are launched: ``triton.jit`` with what a profiler shows, a name and the bytes."""

# pyright: reportCallIssue=false, reportUnknownLambdaType=false, reportUnknownVariableType=false
# Triton is not typed.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton
from torch import Tensor


def profiled(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return ``triton.jit`` with a symbol of the kernel's file, as ``fusedops_cross_entropy_forward``, and metadata.

    Profilers show a kernel by its symbol. Proton, Triton's own, divides the bytes of a launch by its time.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        symbol = _symbol(function.__module__.rpartition(".")[2], function.__name__)
        return triton.jit(
            function, do_not_specialize=list(do_not_specialize), repr=lambda _: symbol, launch_metadata=_metadata
        )

    return decorate


def _symbol(module: str, function: str) -> str:
    """Return the symbol of a kernel: its name, after that of its module where it does not begin with that."""
    name, family = function.strip("_"), module.strip("_")
    return f"fusedops_{name}" if name.startswith(family.partition("_")[0]) else f"fusedops_{family}_{name}"


def _metadata(grid: Any, metadata: Any, args: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of the tensors of a launch, each once: what it moves where it reads or writes all of them."""
    tensors = {arg.data_ptr(): arg.nbytes for arg in args.values() if isinstance(arg, Tensor)}
    return {"bytes": sum(tensors.values())}
