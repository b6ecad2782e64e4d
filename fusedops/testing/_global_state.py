"""The state of the process that a kernel must leave as it is: modes, defaults, threads, random numbers."""

from __future__ import annotations

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


class _Part(NamedTuple):
    """One part of the state: reads it, sets it back, and compares two values of it."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    equal: Callable[[Any, Any], bool] = operator.eq


def _denormals_kept() -> bool:
    """Return True where a number below the smallest normal one is not flushed to 0: Python's, as torch's, in SSE."""
    return sys.float_info.min / 2 != 0


def _set_denormals_kept(kept: bool) -> None:
    torch.set_flush_denormal(not kept)


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


def _generator(read: Callable[[], Tensor], write: Callable[[Tensor], object]) -> _Part:
    """Return the state of a generator of torch, a tensor of bytes, as a part."""
    return _Part(read, write, torch.equal)


_PARTS: dict[str, _Part] = {
    "grad mode": _Part(torch.is_grad_enabled, torch.set_grad_enabled),
    "default dtype": _Part(torch.get_default_dtype, torch.set_default_dtype),
    "default device": _Part(torch.get_default_device, torch.set_default_device),
    "number of threads": _Part(torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": _Part(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "float32 matmul precision": _Part(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "flush of denormals": _Part(_denormals_kept, _set_denormals_kept),
    "state of torch's generator": _generator(torch.get_rng_state, torch.set_rng_state),
    "state of Python's generator": _Part(random.getstate, random.setstate),
    "environment": _Part(_environment, _set_environment, _same_environment),
}


def _parts(device: torch.device) -> dict[str, _Part]:
    """Return the parts, with the generator of the device where that is another one."""
    if device.type == "cpu":
        return _PARTS
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "get_rng_state"):
        return _PARTS

    def write(value: Tensor) -> None:
        module.set_rng_state(value, device)

    return {**_PARTS, f"state of {device.type}'s generator": _generator(partial(module.get_rng_state, device), write)}


def global_state(device: torch.device) -> dict[str, Any]:
    """Return the state, by the name of its parts."""
    return {name: part.read() for name, part in _parts(device).items()}


def check_global_state(before: dict[str, Any], device: torch.device) -> None:
    """Raise RuleError where the state is another one than ``before``, after setting it back."""
    changed: list[str] = []
    for name, part in _parts(device).items():
        if not part.equal(part.read(), before[name]):
            part.write(before[name])
            changed.append(name)
    if changed:
        raise RuleError(
            f"got another {' and another '.join(changed)} after the call than before it, expected no change of the "
            f"process",
            "modes, defaults, threads and random numbers of the process stay as they are",
        )
