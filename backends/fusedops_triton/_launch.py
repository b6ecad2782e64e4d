"""Launching: on the right device, and for little host time where a call looks like one before it.

``kernel[grid](...)`` binds the arguments, makes a key of them all and looks the compiled kernel up, at each call. Here
most of that is done once: what the layout of a call decides (grid, sizes, constexprs, warps) is kept in a ``Launch``,
which an op looks up by that layout. So what is left to tell one compiled kernel from another is how Triton specialises
on the tensors and scalars, and Triton's own function is asked for it. A ``Launch`` that has seen the answer before
calls the compiled kernel as ``JITFunction.run`` would; whatever is new goes through Triton, which compiles.

This uses what Triton does not promise to keep. So the short way is for the versions that were read, on a GPU; in
others, and in the interpreter, each call goes through Triton. Which it is, is decided once and said in the log
"fusedops.triton" (level DEBUG).
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportArgumentType=false
# Triton is not typed.

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

#: Versions of Triton whose JITFunction.run was read: they differ in nothing that matters here.
READ_VERSIONS = ("3.6", "3.7", "3.8", "3.9")

#: Launch options of every kernel. a * b + c in one instruction, with one rounding, is the default of Triton up to 3.9,
#: which warns that 3.10 will have another. Said here, results stay what they are and users see no warning.
OPTIONS = {"enable_fp_fusion": True}

#: Knobs that Triton makes options of the compilation at each call. Where a program has set one, Triton sees to it.
_COMPILED_IN = frozenset(("instrumentation_mode", "fpsan_homomorphic_casts"))

_log = logging.getLogger("fusedops.triton")


class _ShortWay(NamedTuple):
    """What of Triton a short launch uses."""

    driver: Any  # triton.runtime.driver: its .active knows the current device and stream
    specialize: Callable[..., tuple[object, ...]]  # (backend, argument, is_const, specialize, align)
    backend: Any  # of the compiler: AMD's specialises on more
    compiled: type[Any]  # what a launch through Triton returns
    knobs: Any  # hooks, and what changes how kernels are compiled; older versions have none


@cache
def short_way(kernel_type: type[Any]) -> _ShortWay | None:
    """How to launch past ``JITFunction.run``, or None where each launch has to go through Triton."""
    try:
        return _short_way(kernel_type)
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
        _log.debug("each launch goes through Triton %s: %s: %s", triton.__version__, type(error).__name__, error)
        return None


def _short_way(kernel_type: type[Any]) -> _ShortWay:
    from triton import knobs
    from triton._C.libtriton import native_specialize_impl
    from triton.compiler import CompiledKernel, make_backend
    from triton.runtime import driver

    if kernel_type is not JITFunction:
        raise TypeError(f"kernels are {kernel_type.__name__}, as under TRITON_INTERPRET=1; needs JITFunction")
    if ".".join(triton.__version__.split(".")[:2]) not in READ_VERSIONS:
        raise ValueError(f"needs one of {', '.join(READ_VERSIONS)}, whose launching is known")
    active: Any = driver.active
    backend = make_backend(active.get_current_target())
    if native_specialize_impl(backend, 2**40, False, False, True)[0] != "i64":
        raise ValueError("native_specialize_impl does not say i64 of 2**40")
    # read at each launch
    _ = CompiledKernel.run, active.get_current_device, active.get_current_stream, knobs.runtime.debug, knobs.compilation
    _ = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, knobs.runtime.add_stages_inspection_hook
    _log.debug("launches seen before go past JITFunction.run of Triton %s", triton.__version__)
    return _ShortWay(driver, native_specialize_impl, backend, CompiledKernel, knobs)


class Launch:
    """A kernel with what the layout of a call decides: everything but tensors and scalars. Calling it launches.

    Args:
        kernel: its parameters are tensors and scalars, then sizes, then constexprs.
        grid: programs along each axis.
        sizes: the integer arguments.
        constants: the constexprs by name, in any order.
        warps: of a program.
    """

    __slots__ = ("_grid", "_ready", "constants", "grid", "kernel", "sizes", "warps")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], sizes: Sequence[int], constants: dict[str, Any], warps: int
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.sizes = tuple(sizes)
        self.constants = constants
        self.warps = warps
        self._grid = grid + (1,) * (3 - len(grid))
        # compiled kernels: by device, and what Triton specialises on of each tensor and scalar
        self._ready: dict[tuple[object, ...], tuple[Any, ...]] = {}

    def __call__(self, home: Tensor, *args: Any) -> Any:
        """Launches on the device of ``home``, on its current stream. Returns the compiled kernel (interpreted: None).

        Args:
            home: one of the tensors; Triton launches on the current device, wherever its arguments are.
            *args: the kernel's first arguments: tensors, None, numbers.
        """
        way = short_way(type(self.kernel))
        if way is None:
            device = torch.cuda.current_device() if home.is_cuda else -1
        else:
            device = way.driver.active.get_current_device()
        if home.is_cuda and home.get_device() != device:
            with torch.cuda.device(home.device):
                return self._launch(way, home.get_device(), args)
        return self._launch(way, device, args)

    def _launch(self, way: _ShortWay | None, device: int, args: tuple[Any, ...]) -> Any:
        if way is None or self._watched(way.knobs):
            return self._through_triton(args)
        backend, specialize = way.backend, way.specialize
        key = (device, *[specialize(backend, arg, False, True, True) for arg in args])
        ready = self._ready.get(key)
        if ready is None:
            compiled = self._through_triton(args)
            if isinstance(compiled, way.compiled):
                names = self.kernel.arg_names[len(args) + len(self.sizes) :]
                tail = self.sizes + tuple([self.constants[name] for name in names])
                self._ready[key] = (compiled, compiled.run, compiled.function, compiled.packed_metadata, tail)
            return compiled
        compiled, run, function, metadata, tail = ready
        x, y, z = self._grid
        # the current stream is asked for each time: a graph captures on one of its own
        stream = way.driver.active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *args, *tail)
        return compiled

    def _watched(self, knobs: Any) -> bool:
        """Does somebody look at launches, or change how kernels are compiled? Then Triton has to see to it."""
        runtime = knobs.runtime
        return bool(
            _called(runtime.launch_enter_hook)
            or _called(runtime.launch_exit_hook)
            or self.kernel.pre_run_hooks
            or runtime.debug
            or runtime.add_stages_inspection_hook is not None
            or not _COMPILED_IN.isdisjoint(knobs.compilation.__dict__)
        )

    def _through_triton(self, args: tuple[Any, ...]) -> Any:
        return self.kernel[self.grid](*args, *self.sizes, **self.constants, num_warps=self.warps, **OPTIONS)


def _called(hook: Any) -> bool:
    """Is there anything in this launch hook? Triton's chain of hooks is there also when it is empty."""
    return hook is not None and bool(getattr(hook, "calls", True))


# ------------------------------------------------------------------------------------------------------------- layouts

F = TypeVar("F", bound=Callable[..., Any])
_forgetting: list[Callable[[], None]] = []


def by_layout(function: F) -> F:
    """Keeps what ``function`` makes of shapes, strides, dtypes and flags: the 1024 that were used last."""
    kept: Any = lru_cache(maxsize=1024)(function)
    _forgetting.append(kept.cache_clear)
    return kept


def forget_layouts() -> None:
    """For tests that change settings: every launch is planned anew."""
    for forget in _forgetting:
        forget()


def scalar_for(value: float, dtype: torch.dtype) -> float | int:
    """``value`` as a kernel argument that does not lose precision.

    Triton makes a Python float a float32 argument. That is what the float16, bfloat16 and float32 kernels want; the
    float64 kernels take the 64 bits of the double as an integer instead, and cast them back. The
    other ways are worse: an argument annotated as float64 puts float64 instructions in every kernel, a constexpr
    compiles anew for each value, a one-element tensor is a copy to the device.
    """
    return struct.unpack("<q", struct.pack("<d", value))[0] if dtype == torch.float64 else float(value)
