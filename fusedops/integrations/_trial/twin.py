"""A module's own code on random numbers: how a module is recognised.

A *twin* shares a module's class and attributes and has parameters of its own: small, random, on the CPU. So the real
weights are neither read nor needed: they may be on a meta device, sharded, quantized or wrapped.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import wraps
from itertools import chain
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Dropout, Module

from fusedops.dtypes import compute_dtype, no_autocast
from fusedops.integrations._replacement import own_class

_OF_MODULES = frozenset(vars(Module()))
_HOOKS = tuple(sorted(name for name in _OF_MODULES if "_hooks" in name))
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


class Raised:
    """The result of a call that raised.

    >>> Raised(ValueError("no")).error
    ValueError('no')
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def cached_weakly(function: Any) -> Any:
    """Return a function that keeps its results for each first argument, such as a class, while that lives.

    >>> cached_weakly(lambda cls: [])(int) is None
    False
    """
    kept: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()

    @wraps(function)
    def cached(first: Any, *rest: Any) -> Any:
        results = kept.setdefault(first, {})
        if rest not in results:
            results[rest] = function(first, *rest)
        return results[rest]

    return cached


def key_of(module: Module) -> Any:
    """Return what the results of a module depend on: its classes, tensors and attributes, but for their values.

    Numbers and words among the attributes, also in lists, are compared by their values, others by their identity, which
    holds while the module lives.
    """
    parts: list[Any] = []
    for name, each in cast("Iterator[tuple[str, Module]]", module.named_modules()):
        parts += (name, own_class(each), *(bool(vars(each)[hooks]) for hooks in _HOOKS))
        for held in ("_parameters", "_buffers"):
            tensors = cast("dict[str, Tensor | None]", vars(each)[held])
            parts += (
                (key, None if value is None else (value.shape, value.dtype, value.device))
                for key, value in tensors.items()
            )
        for attribute, value in vars(each).items():
            if attribute not in _OF_MODULES:
                parts += (attribute, _setting(value))
    return tuple(parts)


def _setting(value: Any) -> Any:
    """Return what an attribute is compared by."""
    if type(value) in (list, tuple) and all(type(each) in _PLAIN for each in value):
        return type(value), *map(_setting, value)
    if type(value) is float:
        return float, value.hex()  # -0.0 is not 0.0
    return type(value), value if type(value) in _PLAIN else id(value)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal random numbers on the CPU. torch's own generators are not touched.

    >>> numbers(0, 2, 3).shape
    torch.Size([2, 3])
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    drawn = compute_dtype(dtype)  # torch draws float32 5 times as fast as float64
    return torch.randn(*shape, generator=generator, dtype=drawn, device="cpu").to(dtype)


def twin(
    module: Module,
    parameters: Mapping[str, Tensor | None],
    children: Mapping[str, Module] | None = None,
    buffers: Mapping[str, Tensor | None] | None = None,
) -> Any:
    """Return a module of the same class and attributes with other parameters, children and buffers, in eval mode.

    It has no hooks, and its own copies of the containers among the attributes: a call leaves the module unchanged.
    """
    copy = object.__new__(own_class(module))
    for name, value in module.__dict__.items():
        if name in _HOOKS:
            copy.__dict__[name] = type(value)()
        else:
            copy.__dict__[name] = _copied(value)
    copy.__dict__["_parameters"] = dict(parameters)
    copy.__dict__["_modules"] = dict(children or {})
    copy.__dict__["_buffers"] = dict(buffers or {})
    copy.__dict__["training"] = False
    return copy


def _copied(value: Any) -> Any:
    """Return a container with copies of those inside, or the value itself."""
    if type(value) is dict:
        return {key: _copied(each) for key, each in cast("dict[Any, Any]", value).items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


def without_hooks(module: Module) -> Module | None:
    """Return a copy of a module without parameters, in the same mode, that shares neither its state nor its hooks.

    None where the module cannot be copied.

    >>> copy = without_hooks(torch.nn.GELU("tanh"))
    >>> copy
    GELU(approximate='tanh')
    """
    if isinstance(module, torch.jit.ScriptModule):  # its class holds its forward
        return None
    children: dict[str, Module] = {}
    for name, child in module.named_children():
        copied = without_hooks(child)
        if copied is None:
            return None
        children[name] = copied
    try:
        alone = twin(module, {}, children)
        alone.__dict__["training"] = module.training
        return deepcopy(alone)
    except Exception:  # any error of a foreign __deepcopy__ or of a state that cannot be copied, such as a lock
        return None


def has_tensors(module: Module) -> bool:
    """Return True for a module with a parameter or a buffer, its own or a child's.

    >>> has_tensors(torch.nn.Linear(1, 1)), has_tensors(torch.nn.GELU())
    (True, False)
    """
    return any(True for _ in chain(module.parameters(), module.buffers()))


def hooked(module: Module) -> str | None:
    """Return the name of a child without parameters that has hooks, or None: an op in its place would not call them."""
    for name, child in module.named_children():
        if any(True for _ in child.parameters()) or isinstance(child, Dropout):
            continue
        if any(map(has_hooks, child.modules())):
            return name
    return None


def called(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a call, or what it raised, without gradients, autocast, a default device and warnings."""
    with torch.no_grad(), no_autocast("cpu"), torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a call that only compares, such as torch's of two dtypes in a norm
        try:
            return function(*args, **kwargs)
        except Exception as error:  # any error of a foreign forward: it is not what is looked for
            return Raised(error)


def near(result: Any, expected: Tensor, tolerance: float) -> bool:
    """Return True for a tensor of the same shape whose elements are near, relative to each and to their mean."""
    if not isinstance(result, Tensor) or result.shape != expected.shape:
        return False
    if result.dtype == expected.dtype and torch.equal(result, expected):  # fast, and most often the case
        return True
    wide = expected.double()
    mean = float(wide.abs().mean())
    if mean != mean:  # of a row of zeros without an eps
        return False
    return torch.allclose(result.double(), wide, rtol=tolerance, atol=tolerance * mean)


def pair_of(result: Any) -> tuple[Tensor, Tensor] | None:
    """Return a result that is a pair of tensors, or None.

    >>> pair_of((torch.ones(1), None))
    """
    if not isinstance(result, tuple):
        return None
    values = cast("tuple[Any, ...]", result)
    return values if len(values) == 2 and all(isinstance(value, Tensor) for value in values) else None


def parameters_of(forward: Any) -> list[inspect.Parameter] | None:
    """Return the parameters of a forward after self, or None where it has no signature.

    >>> [each.name for each in parameters_of(torch.nn.LayerNorm.forward)]
    ['input']
    """
    try:
        return list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return None


def is_replaced_elsewhere(module: Module) -> bool:
    """Return True where another library set forward on the instance, as kernels and accelerate do."""
    return "forward" in module.__dict__


def is_changed(function: Any) -> bool:
    """Return True for a function of a file that is a module, as kernels makes one, with another forward or hooks."""
    return isinstance(function, Module) and (is_replaced_elsewhere(function) or has_hooks(function))


def has_hooks(module: Module) -> bool:
    """Return True for a module that has a hook of its own."""
    return any(vars(module)[hooks] for hooks in _HOOKS)


def is_untouched(module: Module) -> bool:
    """Return True for a module without hooks, whose call is its class's forward."""
    return not (has_hooks(module) or is_replaced_elsewhere(module)) and type(module).__call__ is Module.__call__
