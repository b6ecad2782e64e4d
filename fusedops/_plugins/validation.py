"""Checks of what a plugin provides. Each error names the plugin, what it has, what is expected and the fix."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

import torch

from fusedops._contract.backend import API_VERSION, Backend
from fusedops._contract.constraint import Constraint, shown
from fusedops._contract.kernel import Adaptation, Deviation, Kernel, NamedFunction, NamedKernels
from fusedops._contract.op import Op
from fusedops._contract.signature import signature_text
from fusedops._report.direction import Direction
from fusedops._report.suggestion import DEVICE_TYPES, TORCH_DEVICE_TYPES
from fusedops.errors import PluginError


def is_backend_name(name: object) -> bool:
    """Return True for a name that a policy can have."""
    return isinstance(name, str) and name.isidentifier() and name == name.lower() and name != "auto"


def check_backend(backend: Backend, ops: Mapping[str, Op], named_too: bool = True) -> None:
    """Raise PluginError where a backend does not fit the ops.

    Args:
        backend: the backend.
        ops: the ops of this process.
        named_too: check kernels whose modules are named as text too, which imports them.
    """
    where = f"backend {backend.name!r}"
    if not is_backend_name(backend.name):
        raise PluginError(
            f"{where}: got name {backend.name!r}, expected a lower-case identifier other than 'auto', as policies "
            f"use it; to fix: rename it"
        )
    if backend.fusedops_api not in (0, API_VERSION):
        raise PluginError(
            f"{where}: got fusedops_api {backend.fusedops_api!r}, expected {API_VERSION}, this fusedops's version; "
            f"to fix: install a release of the backend for API version {API_VERSION}, or a fusedops with API version "
            f"{backend.fusedops_api!r}"
        )
    if type(backend.priority) is not int or abs(backend.priority) > 10**9:
        raise PluginError(
            f"{where}: got priority {shown(backend.priority)}, expected an integer within 10**9 of 0; to fix: use "
            f"100 for one device type, 0 for a fallback"
        )
    device_types: Any = backend.device_types
    if not isinstance(device_types, tuple) or not device_types or not all(map(_is_device_type, backend.device_types)):
        raise PluginError(
            f"{where}: got device_types {device_types!r}, expected a tuple of device types; to fix: write ('cuda',), "
            f"or ('*',) for all"
        )
    for kind in backend.device_types:
        if right := _meant_device_type(kind):
            raise PluginError(
                f"{where}: got device type {kind!r}, which torch does not have, expected {right!r}; to fix: write it so"
            )
    variables: Any = backend.variables
    if not isinstance(variables, tuple) or not all(_is_pair(item) for item in cast("tuple[Any, ...]", variables)):
        raise PluginError(
            f"{where}: got variables {variables!r}, expected pairs of a name and a sentence; to fix: write "
            f"(('FUSEDOPS_MINE', 'What it sets.'),)"
        )
    if not isinstance(backend.needs, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PluginError(
            f"{where}: got needs {shown(backend.needs)}, expected a text; to fix: write what it runs on, such as "
            f"'triton and an NVIDIA or AMD GPU'"
        )
    for field in ("packages", "tools"):
        names: Any = getattr(backend, field)
        if not _are_texts(names):
            raise PluginError(
                f"{where}: got {field} {shown(names)}, expected a tuple of names; to fix: write them as ('name',)"
            )
    kernels: Any = backend.kernels
    if not isinstance(kernels, (tuple, list, NamedKernels)):
        raise PluginError(
            f"{where}: got kernels of type {type(kernels).__name__}, expected a tuple of kernels; to fix: write "
            f"(forward, backward)"
        )
    for op, module in kernels.modules if isinstance(kernels, NamedKernels) else ():
        if op:
            _check_op(where, op, module, ops)
    if named_too or not isinstance(kernels, NamedKernels):
        check_kernels(backend, backend.kernels, ops)


def check_kernels(backend: Backend, kernels: Sequence[Kernel], ops: Mapping[str, Op]) -> None:
    """Raise PluginError where kernels do not fit their backend and the ops: all of an op, or of several."""
    where = f"backend {backend.name!r}"
    seen: dict[tuple[str, Direction, str], Kernel] = {}
    for item in kernels:
        if not isinstance(item, Kernel):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PluginError(
                f"{where}: got {item!r} among its kernels, expected a kernel; to fix: decorate it with "
                f"@fusedops.kernel(op, constraints...)"
            )
        _check_op(where, item.op, item.location, ops)
        if not set(item.device_types) <= set(backend.device_types):
            raise PluginError(
                f"{where}: got a kernel for {item.op} at {item.location} with device_types {item.device_types!r}, "
                f"expected some of the backend's {backend.device_types!r}; to fix: list them there too"
            )
        for device_type in item.device_types or backend.device_types:
            twin = seen.setdefault((item.op, item.direction, device_type), item)
            if twin is not item:
                raise PluginError(
                    f"{where}: got two {item.direction} kernels for {item.op}, at {twin.location} and {item.location}, "
                    f"expected one; to fix: remove the other"
                )
        _check_kernel(where, item, ops[item.op])
    for name, direction, device_type in seen:
        if direction == "backward" and (name, "forward", device_type) not in seen:
            raise PluginError(
                f"{where}: got a backward kernel for {name} and no forward kernel, expected both; to fix: add the "
                f"forward one"
            )


def _check_op(where: str, op: str, location: str, ops: Mapping[str, Op]) -> None:
    if op not in ops:
        raise PluginError(
            f"{where}: got a kernel for {op!r} at {location}, expected one of the ops "
            f"{', '.join(sorted(ops))}; to fix: name one of these, or return the op from fusedops_op"
        )


def _are_texts(values: object) -> bool:
    """Return True for a tuple of texts."""
    return isinstance(values, tuple) and all(isinstance(item, str) for item in cast("tuple[Any, ...]", values))


def _is_pair(value: object) -> bool:
    """Return True for a pair of texts."""
    return _are_texts(value) and len(cast("tuple[str, ...]", value)) == 2


def _is_device_type(value: object) -> bool:
    return value == "*" or (type(value) is str and value.isidentifier())


def _meant_device_type(kind: str) -> str | None:
    """Return the device type of torch that a misspelt one is like; of others, a vendor's library may add them later."""
    try:
        torch.device(kind)
    except RuntimeError:
        known = {**{each: each for each in TORCH_DEVICE_TYPES}, **DEVICE_TYPES}
        near = get_close_matches(kind.lower(), known, 1, 0.7)
        return known[near[0]] if near else None
    return None


def _check_rows(at: str, item: Kernel) -> None:
    value: Any = item.rows_independent
    single: dict[Any, Any] = {"*": True if value is None else value}
    values = dict(cast("Mapping[Any, Any]", value)) if isinstance(value, Mapping) else single
    for device_type, promise in values.items():
        if not _is_device_type(device_type) or not (promise is True or (isinstance(promise, str) and promise)):
            raise PluginError(
                f"{at}: got rows_independent {shown(values)}, expected True or the reason why not, as a text; to fix: "
                f"write one of these, or a mapping of device types to them"
            )


def _check_parameters(at: str, expected: list[str], function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise PluginError(
            f"{at}: got a function without a signature, expected ({', '.join(expected)}); to fix: wrap it in a Python "
            f"function"
        ) from None
    parameters = signature.parameters
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if list(parameters) != expected or any(p.kind not in positional for p in parameters.values()):
        raise PluginError(
            f"{at}: got parameters {signature_text(signature)}, expected ({', '.join(expected)}), all passed by "
            f"position; to fix: use these parameters"
        )


def _check_kernel(where: str, item: Kernel, op: Op) -> None:
    at = f"{where}: {item.direction} kernel for {op.name} at {item.location}"
    expected = list(op.parameters_of(item.direction))
    if item.direction == "forward" and op.saved:
        expected.append("save")
    if item.direction not in ("forward", "backward"):
        raise PluginError(
            f"{at}: got direction {item.direction!r}, expected 'forward' or 'backward'; to fix: write one of these"
        )
    for field, kind in (("deviations", Deviation), ("adaptations", Adaptation)):
        values: Any = getattr(item, field)
        if not all(isinstance(value, kind) for value in values):
            raise PluginError(
                f"{at}: got {field} {values!r}, expected fusedops.{kind.__name__} objects; to fix: make them so"
            )
    _check_rows(at, item)
    for function in filter(None, (item.function, item.for_rows)):
        if isinstance(function, NamedFunction):
            function.check = partial(_check_parameters, at, expected)
        else:
            _check_parameters(at, expected, function)
    for constraint in item.constraints:
        if not isinstance(constraint, Constraint):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PluginError(
                f"{at}: got {constraint!r} as a constraint, expected one of fusedops.constraints; to fix: write one, "
                f"such as Rank('x', 4)"
            )
        saved = [value.name for value in op.saved]
        for name in constraint.names:
            if name in saved:
                raise PluginError(
                    f"{at}: got constraint {constraint.describe()!r} on {name!r}, a saved value, expected one on what "
                    f"is known before forward has run; to fix: handle every {name} in the kernel"
                )
            if name not in expected:
                raise PluginError(
                    f"{at}: got constraint {constraint.describe()!r} on {name!r}, expected one of its parameters, "
                    f"{', '.join(expected)}; to fix: name one of these"
                )
