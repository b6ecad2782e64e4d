"""Kernel launches on the right device, with less host time for repeated calls.

At each call, ``kernel[grid](...)`` binds the arguments, computes a key from all of them and looks up the compiled
kernel. Here most of this is done once. The values that follow from the layout of a call (grid, sizes, constexprs,
warps) are stored in a ``Launch``, which is cached by that layout. What remains is how Triton specialises on the tensors
and scalars; Triton's own function computes it. For a specialisation that a ``Launch`` has cached, it calls the compiled
kernel as ``JITFunction.run`` does. For a new one it calls Triton, which compiles.

This uses private parts of Triton. So the fast path is enabled only on a GPU, with the versions whose source was read.
With other versions, and in the interpreter, each call goes through Triton. The path is selected once and reported in
the log "fusedops.triton" (level DEBUG).
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportArgumentType=false
# Triton is not typed.

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusedops import FusedOpsError
from fusedops_triton.launch import settings

#: Versions of Triton whose JITFunction.run was read. They do not differ in the parts that are used here.
READ_VERSIONS = ("3.6", "3.7", "3.8", "3.9")

#: Knobs that Triton turns into compilation options at each call. If a program has set one, calls go through Triton.
_COMPILATION_KNOBS = frozenset(("instrumentation_mode", "fpsan_homomorphic_casts"))

_log = logging.getLogger("fusedops.triton")


class _FastPath(NamedTuple):
    """The parts of Triton that a launch on the fast path uses."""

    driver: Any  # triton.runtime.driver: its .active returns the current device and stream
    specialize: Callable[..., tuple[object, ...]]  # (backend, argument, is_const, specialize, align)
    backend: Any  # the compiler's backend: AMD's specialises on more properties
    compiled: type[Any]  # the type that a launch through Triton returns
    knobs: Any  # launch hooks and compilation settings


@cache
def fast_path(kernel_type: type[Any]) -> _FastPath | None:
    """Return the parts of Triton that replace ``JITFunction.run``, or None if each launch must go through Triton."""
    try:
        return _find_fast_path(kernel_type)
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        _log.debug("each launch goes through Triton %s: %s: %s", triton.__version__, type(error).__name__, error)
        return None


def _find_fast_path(kernel_type: type[Any]) -> _FastPath:
    from triton import knobs
    from triton._C.libtriton import native_specialize_impl
    from triton.compiler import CompiledKernel, make_backend
    from triton.runtime import driver

    if kernel_type is not JITFunction:
        raise TypeError(f"got {kernel_type.__name__}, as under TRITON_INTERPRET=1, expected JITFunction")
    if ".".join(triton.__version__.split(".")[:2]) not in READ_VERSIONS:
        raise ValueError(f"expected one of {', '.join(READ_VERSIONS)}, the versions whose source was read")
    active: Any = driver.active
    backend = make_backend(active.get_current_target())
    if native_specialize_impl(backend, 2**40, False, False, True)[0] != "i64":
        raise ValueError("native_specialize_impl does not return i64 for 2**40")
    # each launch reads these; raise AttributeError now if one is missing
    _ = CompiledKernel.run, active.get_current_device, active.get_current_stream, knobs.runtime.debug, knobs.compilation
    _ = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, knobs.runtime.add_stages_inspection_hook
    _log.debug("repeated launches bypass JITFunction.run of Triton %s", triton.__version__)
    return _FastPath(driver, native_specialize_impl, backend, CompiledKernel, knobs)


class Launch:
    """A kernel with all launch arguments except tensors and scalars. Calling it launches the kernel.

    Args:
        kernel: a jit function. Its parameters are tensors and scalars, then sizes, then constexprs.
        grid: number of programs along each axis.
        sizes: the integer arguments.
        constants: the constexprs by name, in any order.
        warps: number of warps per program.
        registers: the most registers of a thread on an NVIDIA GPU; None for no limit but the hardware's.
        fuses: True where a * b + c is one instruction with one rounding: Triton's default up to 3.9, which warns that
            3.10 changes it. False for two roundings, as on every other device.
    """

    __slots__ = ("_compiled", "_grid", "constants", "fuses", "grid", "kernel", "registers", "sizes", "warps")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        sizes: Sequence[int],
        constants: dict[str, Any],
        warps: int,
        registers: int | None = None,
        fuses: bool = True,
    ) -> None:
        self.kernel = kernel
        self.fuses = fuses
        self.grid = grid
        self.sizes = tuple(sizes)
        self.constants = constants
        self.warps = warps
        self.registers = registers
        self._grid = grid + (1,) * (3 - len(grid))
        # compiled kernels by device and by Triton's specialisation of each tensor and scalar
        self._compiled: dict[tuple[object, ...], tuple[Any, ...]] = {}

    def __call__(self, device_tensor: Tensor, *args: Any) -> Any:
        """Launch on the device of ``device_tensor``, on the current stream.

        Args:
            device_tensor: one of the tensors. Triton launches on the current device, even if its arguments are on
                another one.
            *args: the kernel's first arguments: tensors, None, numbers.

        Returns:
            The compiled kernel; None in the interpreter.
        """
        path = fast_path(type(self.kernel))
        if path is not None:
            device = path.driver.active.get_current_device()
        else:
            device = torch.cuda.current_device() if device_tensor.is_cuda else -1
        if device_tensor.is_cuda and device_tensor.get_device() != device:
            with torch.cuda.device(device_tensor.device):
                return self(device_tensor, *args)
        if path is None or self._must_use_triton(path.knobs):
            return self._launch_with_triton(args)
        backend, specialize = path.backend, path.specialize
        # Triton has each float as an fp32; a call for one, or for None, costs as much as one for a tensor
        key = (
            device,
            *[
                None if arg is None else "fp32" if type(arg) is float else specialize(backend, arg, False, True, True)
                for arg in args
            ],
        )
        cached = self._compiled.get(key)
        if cached is None:
            compiled = self._launch_with_triton(args)
            if isinstance(compiled, path.compiled):
                names = self.kernel.arg_names[len(args) + len(self.sizes) :]
                last_args = self.sizes + tuple([self.constants[name] for name in names])
                self._compiled[key] = (compiled, compiled.run, compiled.function, compiled.packed_metadata, last_args)
            return compiled
        compiled, run, function, metadata, last_args = cached
        # not cached: CUDA graphs capture on a stream of their own
        stream = path.driver.active.get_current_stream(device)
        run(*self._grid, stream, function, metadata, None, None, None, *args, *last_args)
        return compiled

    def _must_use_triton(self, knobs: Any) -> bool:
        """Return True if a launch hook is set, or a setting that changes how kernels are compiled."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # Triton's chain of hooks exists even when it is empty
        return bool(
            (enter is not None and getattr(enter, "calls", True))
            or (leave is not None and getattr(leave, "calls", True))
            or self.kernel.pre_run_hooks
            or runtime.debug
            or runtime.add_stages_inspection_hook is not None
            or not _COMPILATION_KNOBS.isdisjoint(knobs.compilation.__dict__)
        )

    def _launch_with_triton(self, args: tuple[Any, ...]) -> Any:
        options = {**self.constants, "num_warps": self.warps, "enable_fp_fusion": self.fuses}
        chip = settings.chip
        # a program of the most threads has this limit anyway; of narrow accesses there are more addresses than it holds
        fits = self.warps * chip.lanes < chip.threads and _are_aligned(args)
        if self.registers is not None and chip.nvidia and fits:
            options["maxnreg"] = self.registers
        if type(self.kernel) is JITFunction and _is_capturing():
            # A driver loads nothing during a capture, and after a failed load Triton 3.6 to 3.9 launch a null function.
            # This compiles the kernel, or finds it, without loading it.
            compiled = self.kernel.run(*args, *self.sizes, grid=self.grid, warmup=True, **options)
            if getattr(compiled, "module", None) is None:
                tensors = [
                    f"{name.removesuffix('_ptr')} {str(arg.dtype).removeprefix('torch.')}{list(arg.shape)} "
                    f"of strides {arg.stride()}"
                    for name, arg in zip(self.kernel.arg_names, args)
                    if isinstance(arg, Tensor)
                ]
                raise FusedOpsError(
                    f"got a first launch of {self.kernel.__module__}.{self.kernel.__name__} while a CUDA graph is "
                    f"captured, on {', '.join(tensors)}, expected a kernel that is loaded; to fix: before the capture "
                    f"call fusedops.warm_up(op, *args) with the call's op and arguments, or make the call itself once, "
                    f"with its backward if that is captured: kernels depend on dtypes, shapes, strides and alignment"
                )
        return self.kernel[self.grid](*args, *self.sizes, **options)


def _are_aligned(args: tuple[Any, ...]) -> bool:
    """Return True where every tensor begins at a multiple of 16 bytes, as Triton specialises kernels."""
    return all(arg.data_ptr() % 16 == 0 for arg in args if isinstance(arg, Tensor))


def compiles_ptx(kernel: Any) -> bool:
    """Return True if ``kernel`` is compiled for NVIDIA GPUs: False for AMD GPUs and in the interpreter."""
    return settings.chip.nvidia and isinstance(kernel, JITFunction)


def _is_capturing() -> bool:
    """Return True while a CUDA graph is captured. A torch without CUDA has no function for it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# ------------------------------------------------------------------------------------------------------------- layouts

F = TypeVar("F", bound=Callable[..., Any])
_cache_clears: list[Callable[[], None]] = []


def cached_by_layout(function: F) -> F:
    """Cache the results of ``function`` by its arguments: shapes, strides, dtypes and flags. 1024 entries, LRU."""
    cached: Any = lru_cache(maxsize=1024)(function)
    _cache_clears.append(cached.cache_clear)
    return cached


def clear_layout_caches() -> None:
    """Clear the caches of ``cached_by_layout``. For tests that change settings."""
    for clear in _cache_clears:
        clear()
