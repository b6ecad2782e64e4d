"""The measurement of one call: every provider in turns, forward and backward."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from benchmarks.calls import arguments
from benchmarks.idle import exp2_ns
from benchmarks.memory import peak_bytes
from benchmarks.providers import providers
from fusedops import Case, Op
from fusedops.testing import interleaved
from fusedops.testing._timing import backward_of, copy_of, floating, with_grad

MODES = ("inference", "forward", "backward")
Work = dict[str, Callable[[], Any]]

#: Providers that compile nothing, and the attempts of one call where the device's memory is full.
_NOT_COMPILED = ("torch", "torch sdpa", "torch._masked_softmax", "megatron's torch path", "fusedops.eager")
_ATTEMPTS = 5


class Measurement:
    """One call on one device, and what failed.

    Args:
        device: a torch device.
        modes: some of ``MODES``.
        seconds: the measuring time of a provider and mode, about.
        without: names of providers to leave out.
        idle: count only calls between two short calculations of at most so many ns; see idle.py.
    """

    def __init__(
        self, device: str, modes: Sequence[str], seconds: float, without: Sequence[str] = (), idle: float | None = None
    ) -> None:
        self.device, self.modes, self.seconds, self.without = device, modes, seconds, without
        self.idle = None if idle is None else lambda: exp2_ns() <= idle
        self.failures: list[str] = []
        self._reported: set[str] = set()

    def compile_ahead(self, op: Op, case: Case, dtype: torch.dtype) -> None:
        """Call each provider that compiles once, so that its kernels are in the caches of the disk.

        Other processes do the same at the same time: where the device's memory is full, it tries again.
        """
        label = f"{op.name} {case.name}"
        for attempt in range(_ATTEMPTS):
            try:
                args, functions = self._providers(op, case, dtype)
                leaves, inputs = with_grad(op, args)
                for name, function in functions.items():
                    if name not in _NOT_COMPILED:
                        self._compile(f"{name} {label}", function, leaves, inputs)
                return
            except torch.OutOfMemoryError:
                leaves = inputs = args = functions = None
                release(self.device)
                time.sleep(1 + attempt)
            except Exception as error:  # the measurement reports it
                _note(f"not compiled: {label}: {_text(error)}")
                return
        _note(f"not compiled: {label}: the memory of the device was full {_ATTEMPTS} times")

    def _compile(self, label: str, function: Callable[..., Any], leaves: list[Any], inputs: list[Any]) -> None:
        try:
            y = function(*leaves)
            if "backward" in self.modes and inputs:
                backward_of(y, inputs, [torch.randn_like(each) for each in floating(y)])()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the measurement reports it
            _note(f"not compiled: {label}: {_text(error)}")

    def _providers(self, op: Op, case: Case, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call and the providers that take it."""
        args = arguments(op, case, dtype, self.device)
        functions, skipped = providers(op, args, self.device, self.without)
        for name, reason in skipped.items():
            self._leave_out(name, op, reason)
        return args, functions

    def _prepared(
        self, op: Op, case: Case, dtype: torch.dtype
    ) -> tuple[tuple[Any, ...], dict[str, Work], dict[str, Any]]:
        """Call each provider once in each mode; return the arguments, the calls that work by mode, and the outputs."""
        args, functions = self._providers(op, case, dtype)
        leaves, inputs = with_grad(op, args)
        label = f"{op.name} {case.name} {str(dtype).removeprefix('torch.')}"
        forward = {name: (lambda f=f: f(*leaves)) for name, f in functions.items()}
        results = self._working(label, forward)
        work = {"forward": {name: forward[name] for name in results}}
        if "inference" in self.modes:
            inference = {name: (lambda f=functions[name]: _without_grad(f, args)) for name in results}
            work["inference"] = {name: inference[name] for name in self._working(label, inference)}
        if "backward" in self.modes and op.has_gradient:
            like = next(iter(results.values()), None)
            grads = [torch.randn_like(y) for y in floating(like)] if results else []
            backward = {name: backward_of(y, inputs, grads) for name, y in results.items()}
            work["backward"] = {name: backward[name] for name in self._working(label, backward)}
        return args, work, results

    def measured(self, op: Op, case: Case, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
        """Yield what ``rows`` yields. An error is a failure, after which the next call can be measured."""
        try:
            yield from self.rows(op, case, dtype)
        except Exception as error:  # such as a full memory
            self.failures.append(f"{op.name} {case.name} {str(dtype).removeprefix('torch.')}: {_text(error)}")
            _note(f"left out: {self.failures[-1]}")

    def rows(self, op: Op, case: Case, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
        """Yield one record for each provider and mode."""
        args, work, results = self._prepared(op, case, dtype)
        errors = {name: _error(op, args, y) for name, y in results.items()}
        results.clear()
        like = torch.empty(args[0].shape, dtype=dtype, device=self.device)
        min_bytes = op.evidence.min_bytes(*args)
        for mode in (mode for mode in MODES if mode in work):
            # popped, to free the memory: each backward holds the values that its forward saved
            mode_work = work.pop(mode)
            try:
                times = interleaved({**mode_work, "copy": copy_of(like)}, self.device, self.seconds, self.idle)
            except TimeoutError as error:
                _note(f"left out: {op.name} {case.name} {mode}: {error}")
                continue
            moved = min_bytes["backward" if mode == "backward" else "forward"]
            copy_gbs = 2 * like.nbytes / times["copy"].p50 / 1e6
            for name, function in mode_work.items():
                time = times[name]
                gbs = moved / time.p50 / 1e6
                yield {
                    "op": op.name,
                    "mode": mode,
                    "case": case.name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "shape": list(args[0].shape),
                    "provider": name,
                    "ms_p50": round(time.p50, 5),
                    "ms_p20": round(time.p20, 5),
                    "ms_p80": round(time.p80, 5),
                    "min_bytes": moved,
                    "gb_per_s": round(gbs, 2),
                    "copy_gb_per_s": round(copy_gbs, 2),
                    "pct_of_copy": round(100 * gbs / copy_gbs, 1),
                    "copies": round(time.p50 / times["copy"].p50, 3),
                    "speedup_over_torch": round(times["torch"].p50 / time.p50, 3) if "torch" in times else None,
                    "peak_bytes": peak_bytes(function, self.device),
                    "max_error": errors[name],
                }

    def _working(self, label: str, work: Work) -> dict[str, Any]:
        """Return the results of the functions that do not raise. A backend of fusedops that raises is a failure."""
        results: dict[str, Any] = {}
        for name, function in work.items():
            try:
                results[name] = function()
                torch.get_device_module(self.device).synchronize()
            except Exception as error:  # such as a constraint of a peer, which its first call shows
                text = _text(error)
                if name.startswith("fusedops."):
                    self.failures.append(f"{name}: {label}: {text}")
                _note(f"left out: {name} for {label}: {text}")
        return results

    def _leave_out(self, name: str, op: Op, reason: str) -> None:
        note = f"left out: {name} for {op.name}: {reason}"
        if note not in self._reported:
            self._reported.add(note)
            _note(note)


def _note(text: str) -> None:
    print(text, flush=True)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def device_works(device: str) -> bool:
    """Return False where each further call of this process fails: after an illegal access on a GPU."""
    try:
        torch.get_device_module(device).synchronize()
    except Exception as error:
        _note(f"the device cannot be used any longer: {_text(error)}")
        return False
    return True


def release(device: str) -> None:
    """Free what a call has left."""
    if "torch._dynamo" in sys.modules:  # else nothing was compiled
        torch.compiler.reset()
    gc.collect()
    if device != "cpu":
        torch.get_device_module(device).empty_cache()


def _error(op: Op, args: tuple[Any, ...], y: Any) -> float | str | None:
    """Return the largest difference from the op's reference, of the largest result where that is above 1.

    None for dropout, where torch drops other elements, and without a floating result.
    """
    if "training" in op.parameters and args[op.parameters.index("training")]:
        return None
    with torch.no_grad():
        pairs = [(got.float(), expected.float()) for got, expected in zip(floating(y), floating(op.reference(*args)))]
        errors = [float((got - expected).abs().max() / expected.abs().max().clamp(min=1.0)) for got, expected in pairs]
    error = max(errors, default=None)
    return error if error == error else "nan"  # JSON has no NaN


def _without_grad(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with torch.no_grad():
        return function(*args)
