"""Layers that mix positions by a short convolution and a recurrence, in hybrid models (Qwen3-Next, Bamba, LFM2).

Their forward calls functions of its file by name. Each function that computes what an op computes is replaced in a copy
of the forward. A function is recognised by its signature and its results: its own code, in plain torch, runs on random
numbers on the CPU.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch.nn import Module

from fusedops import ops
from fusedops._report.user_frame import user_stack_level
from fusedops.errors import FusedOpsWarning
from fusedops.integrations._replacement import Replacement, own_body, own_class
from fusedops.integrations._trial.copied import contents_of, copied, reason_not_to_copy
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import cached_weakly, called, is_changed, is_replaced_elsewhere
from fusedops.integrations.transformers._mixers.functions import FORMS, computed
from fusedops.integrations.transformers._mixers.trials import has_results_of, reason_of_calls_of

_WHOLE_LAYER = {"outproj_weight", "out_proj_weight"}  # parameters of a function for a whole layer; in torch, of none


@dataclass(frozen=True)
class MixerFunction:
    """A function of a model's file in a form that calls an op, with the names of its parameters."""

    form: str
    names: tuple[str, ...]

    @property
    def op(self) -> str:
        """Return the name of the op."""
        return FORMS[self.form].op


@dataclass(frozen=True)
class Mixer(Replacement):
    """The settings of a replaced layer: the functions in place of those that its forward names.

    ``left`` has the ops for which functions are left, with the reason.
    """

    original: type[Module]
    functions: tuple[tuple[str, MixerFunction], ...]
    left: tuple[tuple[str, str], ...] = ()
    copied: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        forward = self.original.forward
        names = cast("FunctionType", inspect.unwrap(forward)).__globals__
        functions = {name: _op_or_own(function, name, names[name]) for name, function in self.functions}
        whole = {name: _none for name, function in _functions(forward) if _is_of_a_whole_layer(function)}
        object.__setattr__(self, "copied", copied(forward, {**functions, **whole}))

    def __reduce__(self) -> Any:
        return Mixer, (self.original, self.functions, self.left)

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the names of the ops."""
        return tuple(dict.fromkeys(function.op for _, function in self.functions))

    def among(self, chosen: set[str]) -> Mixer | None:
        """Return the replacement with these ops alone, or None where it has none of them."""
        functions = tuple(each for each in self.functions if each[1].op in chosen)
        others = tuple((op, f"ops has no {op}") for op in self.ops if op not in chosen)
        return replace(self, functions=functions, left=(*self.left, *others)) if functions else None

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the copy of the module's forward."""
        return self.copied(module, *args, **kwargs)


def _op_or_own(function: MixerFunction, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the op, or, with a warning, the model's own for a call that the op does not take."""
    form, op, names = FORMS[function.form], getattr(ops, function.op), [each.lower() for each in function.names]

    def mixed(*args: Any, **kwargs: Any) -> Any:
        result = computed(form, op, {**dict(zip(names, args)), **{key.lower(): each for key, each in kwargs.items()}})
        if result is not None:
            return result
        warnings.warn(
            f"{name}: got a call that {form.op} does not take, expected a width, a state and packed sequences (in one "
            f"row) as it has them; the model's own function computes the call; to fix: leave {form.op} out of ops",
            FusedOpsWarning,
            stacklevel=2 if torch.compiler.is_compiling() else user_stack_level("transformers"),
        )
        return own(*args, **kwargs)

    return mixed


def _none(*_: Any, **__: Any) -> None:
    """Return None, as transformers' function for a whole layer does without its package: the forward goes on."""


def recognised_mixer(module: Module) -> Mixer | str | None:
    """Return the replacement of a layer, the reason why one is left, or None for another module.

    >>> import torch
    >>> recognised_mixer(torch.nn.Linear(2, 2))
    """
    cls = own_class(module)
    if not isinstance(own_body(module), FunctionType):
        return None
    # what another library replaces later is asked each time: only what a function computes is kept
    recognised = {name: _recognised(function, is_changed(function), name) for name, function in _functions(cls.forward)}
    recognised = {name: each for name, each in recognised.items() if each is not None}
    if not recognised:
        return None
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward"
    reason = reason_not_to_copy(cls.forward)
    if reason is not None:
        return reason
    functions: list[tuple[str, MixerFunction]] = []
    left: dict[str, list[str]] = {}
    others: list[tuple[str, str]] = []
    for name, each in recognised.items():
        if isinstance(each, MixerFunction):
            functions.append((name, each))
        elif each[1]:
            others.append(each)
        else:
            left.setdefault(each[0], []).append(name)
    others += (
        (op, f"the results of {' and '.join(sorted(names))} are not those of {op}") for op, names in left.items()
    )
    return Mixer(cls, tuple(functions), tuple(others)) if functions else "; ".join(reason for _, reason in others)


def _functions(forward: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of its file that a forward names."""
    body = cast("FunctionType", inspect.unwrap(forward))
    for name in body.__code__.co_names:
        function = body.__globals__.get(name)
        if isinstance(function, (FunctionType, Module)):
            yield name, function


@cached_weakly
def _recognised(function: Any, replaced: bool, name: str) -> MixerFunction | tuple[str, str] | None:
    """Return the function in the form of an op, the op that it is not, with a reason or "", or None for another.

    ``replaced``: another library has replaced it, or it has hooks, so that its results are not known.
    """
    names = tuple(_parameters(function))
    forms = {key: form for key, form in FORMS.items() if {*form.parameters} <= {*names[: len(form.parameters) + 1]}}
    forms = {key: form for key, form in forms.items() if form.parameters[0] == names[0]}
    if not forms:
        return None
    if not replaced:
        plain, first = _plain(function), next(iter(forms.values())).op
        reason = reason_of_source((), plain, subject=name, outside=True)
        if reason is not None:
            return first, reason
        for key, form in forms.items():
            if has_results_of(plain, key, form):
                reason = reason_of_source((), plain, subject=name) or reason_of_calls_of(plain, key, form, name)
                return (form.op, reason) if reason is not None else MixerFunction(key, names)
    return next(iter(forms.values())).op, ""


def _parameters(function: Any) -> list[str]:
    """Return the names of a function's parameters, or none where it has no signature."""
    try:
        names = list(inspect.signature(type(function).forward if isinstance(function, Module) else function).parameters)
    except (TypeError, ValueError):
        return []
    return names[1:] if isinstance(function, Module) else names


def _plain(function: Any) -> Callable[..., Any]:
    """Return a function in plain torch, below transformers' decorators, of which kernels' makes a module."""
    if not isinstance(function, Module):
        return inspect.unwrap(function)
    forward = type(function).forward
    below = [each for each in contents_of(forward) if isinstance(each, FunctionType)]
    return inspect.unwrap(below[0]) if len(below) == 1 else partial(forward, function)


def _is_of_a_whole_layer(function: Any) -> bool:
    """Return True for a function that a package may have for a whole layer, and that is None in plain torch."""
    names = _parameters(function)
    if _WHOLE_LAYER.isdisjoint(names):
        return False
    plain = _plain(function)
    parameters = inspect.signature(plain).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return called(plain, *(None for _ in needed)) is None
