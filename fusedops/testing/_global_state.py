"""The state of the process that a kernel must leave as it is: modes, defaults, threads, random numbers."""

from __future__ import annotations

import ctypes
import gc
import operator
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedops.testing._failures import RuleError


class _Setting(NamedTuple):
    """One setting of the state: reads it, sets it back, and compares two values of it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    equal: Callable[[Any, Any], bool] = operator.eq


def _denormals_kept() -> bool:
    """Return True where a number below the smallest normal one is not flushed to 0: Python's, as torch's, in SSE."""
    return sys.float_info.min / 2 != 0


def _set_denormals_kept(kept: bool) -> None:
    torch.set_flush_denormal(not kept)


def _set_garbage_collected(on: bool) -> None:
    if on:
        gc.enable()
    else:
        gc.disable()


def _rounding_functions() -> tuple[Callable[[], int], Callable[[int], object]]:
    """Return C's functions that read and set how numbers are rounded; without them two that know one rounding."""
    try:
        library: Any = ctypes.CDLL(None)
        return library.fegetround, library.fesetround
    except (OSError, TypeError, AttributeError):  # TypeError: Windows has no library of the process
        return (lambda: 0), (lambda rounding: None)


def _autocast(device_type: str) -> tuple[Any, ...]:
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return enabled, dtype, torch.is_autocast_cache_enabled()


def _set_autocast(device_type: str, state: tuple[Any, ...]) -> None:
    torch.set_autocast_enabled(device_type, state[0])
    torch.set_autocast_dtype(device_type, state[1])
    torch.set_autocast_cache_enabled(state[2])


def _numpy_state() -> dict[str, Any] | None:
    """Return the state of numpy's generator, where numpy is imported: torch needs none."""
    numpy: Any = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state(legacy=False)


def _set_numpy_state(state: dict[str, Any] | None) -> None:
    if state is not None:
        sys.modules["numpy"].random.set_state(state)


def _same_numpy_state(one: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    if one is None or other is None:  # imported by the call
        return True
    return one["state"]["pos"] == other["state"]["pos"] and bool((one["state"]["key"] == other["state"]["key"]).all())


#: What torch's compiler sets when it is imported or compiles first, in any call that is compiled.
_OF_COMPILERS = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG", "KMP_DUPLICATE_LIB_OK", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR",
        "TRITON_LIBDEVICE_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_PTXAS_PATH",
        "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    }
)  # fmt: skip


def _environment() -> dict[Any, Any]:
    """Return the variables as the process has them: to decode them takes 0.1 ms."""
    return dict(getattr(os.environ, "_data", os.environ))


def _same_environment(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return one == other or _decoded(one) == _decoded(other)


def _decoded(variables: dict[Any, Any]) -> dict[str, str]:
    """Return the variables without those of compilers."""
    if variables and isinstance(next(iter(variables)), bytes):
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}
    return {name: value for name, value in variables.items() if name not in _OF_COMPILERS}


def _set_environment(variables: dict[Any, Any]) -> None:
    before = _decoded(variables)
    for name in _decoded(_environment()).keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _generator(read: Callable[[], Tensor], write: Callable[[Tensor], object]) -> _Setting:
    """Return the state of a generator of torch, a tensor of bytes, as a setting."""
    return _Setting(read, write, torch.equal)


_SETTINGS: dict[str, _Setting] = {
    "grad mode": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "default device": _Setting(torch.get_default_device, torch.set_default_device),
    "number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "float32 matmul precision": _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "flush of denormals": _Setting(_denormals_kept, _set_denormals_kept),
    "rounding mode": _Setting(*_rounding_functions()),
    "collection of garbage": _Setting(gc.isenabled, _set_garbage_collected),
    "autocast": _Setting(partial(_autocast, "cpu"), partial(_set_autocast, "cpu")),
    "state of torch's generator": _generator(torch.get_rng_state, torch.set_rng_state),
    "state of Python's generator": _Setting(random.getstate, random.setstate),
    "environment": _Setting(_environment, _set_environment, _same_environment),
}

#: Which take longer to read than a small call.
_SLOW_SETTINGS = {"state of numpy's generator": _Setting(_numpy_state, _set_numpy_state, _same_numpy_state)}


def _settings(device: torch.device) -> dict[str, _Setting]:
    """Return the settings, with the generator of the device where that is another one."""
    if device.type == "cpu":
        return _SETTINGS
    settings = dict(_SETTINGS)
    if torch.amp.is_autocast_available(device.type):
        of_device = partial(_autocast, device.type), partial(_set_autocast, device.type)
        settings[f"autocast of {device.type}"] = _Setting(*of_device)
    module: Any = torch.get_device_module(device)
    if hasattr(module, "current_device") and hasattr(module, "set_device"):
        settings["current device"] = _Setting(module.current_device, module.set_device)
    if not hasattr(module, "get_rng_state"):
        return settings

    def write(value: Tensor) -> None:
        module.set_rng_state(value, device)

    return {**settings, f"state of {device.type}'s generator": _generator(partial(module.get_rng_state, device), write)}


def global_state(device: torch.device, *, slow: bool = False) -> dict[str, Any]:
    """Return the state, by the name of its settings; with ``slow`` also what takes longer to read than a small call."""
    settings = {**_settings(device), **_SLOW_SETTINGS} if slow else _settings(device)
    return {name: setting.read() for name, setting in settings.items()}


def check_global_state(before: dict[str, Any], device: torch.device) -> None:
    """Raise RuleError where the state is another one than ``before``, after setting it back."""
    changed: list[str] = []
    settings = {**_settings(device), **_SLOW_SETTINGS}
    for name, value in before.items():
        setting = settings[name]
        if not setting.equal(setting.read(), value):
            setting.write(value)
            changed.append(name)
    if changed:
        raise RuleError(
            f"got another {' and another '.join(changed)} after the call than before it, expected no change of the "
            f"process",
            "modes, defaults, threads and random numbers of the process stay as they are",
        )
