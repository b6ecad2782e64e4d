"""A module whose forward, or an attention processor whose call, is a changed copy of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from types import CodeType, FunctionType
from typing import Any, NamedTuple, cast

from torch.nn import Module

from fusedops._torch import is_traced
from fusedops.integrations._replacement import Replaced, Replacement, remade
from fusedops.integrations._trial.copied import decorated
from fusedops.integrations.diffusers._forwards.patterns import Site, changed
from fusedops.integrations.diffusers._served import attention as _attention
from fusedops.integrations.diffusers._served import modulated as _modulated
from fusedops.integrations.diffusers._served.rotary import RotaryCalls, recognised_calls
from fusedops.integrations.diffusers._source import function_of, tree_of, values_of
from fusedops.tensor_cache import reuse


class Served:
    """The functions that a changed function calls in place of its own expressions."""

    attention = staticmethod(_attention.attention)
    sdpa = staticmethod(_attention.sdpa)
    modulated = staticmethod(_modulated.modulated)
    gated = staticmethod(_modulated.gated)
    gated_modulated = staticmethod(_modulated.gated_modulated)
    chained = staticmethod(_modulated.chained)

    def __init__(self) -> None:
        self.rotations: dict[tuple[Any, Any], RotaryCalls] = {}  # by the function, or the code of one in a forward

    def rotary(self, own: Any, *args: Any, **options: Any) -> Any:
        """Compute a call of a rotary function by the op, where it was recognised."""
        key = tuple(sorted(options.items()))
        found = self.rotations.get((own, key)) or self.rotations.get((getattr(own, "__code__", None), key))
        return own(*args, **options) if found is None else found(own, *args, **options)


class Changed(NamedTuple):
    """A changed function.

    Attributes:
        function: with the decorators of the original.
        sites: what is replaced in it.
        left: the ops that a part of it could be, with the reason why it is left.
    """

    function: Callable[..., Any]
    sites: tuple[Site, ...]
    left: tuple[tuple[str, str], ...]


def changed_function(original: Any, ops: frozenset[str]) -> Changed | str | None:
    """Return a changed function, the reason why it is left, or None where nothing in it is replaced."""
    body = inspect.unwrap(original)
    if not isinstance(body, FunctionType) or body.__module__.startswith("torch."):
        return None
    tree = tree_of(body)
    if isinstance(tree, str):
        return tree
    sites = changed(tree, ops)
    if not sites:
        return None
    served, left, kept = Served(), dict[tuple[str, str], None](), list[Site]()
    for site in sites:
        reason = _rotation_found(served, site, body) if site.op == "rotary_embedding" else None
        if reason is None:
            kept.append(site)
        else:
            left[site.op, reason] = None
    function = decorated(original, body, function_of(tree, body, served))
    if function is None:
        return "a decorator of its forward keeps it where it cannot be replaced"
    return Changed(function, tuple(kept), tuple(left))


def _rotation_found(served: Served, site: Site, body: FunctionType) -> str | None:
    """Recognise the rotary function of a site; return the reason why it is left, or None."""
    (name,) = site.path
    inner = [each for each in body.__code__.co_consts if isinstance(each, CodeType) and each.co_name == name]
    own = values_of(body).get(name)
    if inner:
        if len(inner) > 1 or inner[0].co_freevars:
            return f"{name} reads variables of the forward"
        own = FunctionType(inner[0], body.__globals__, name)
    if not isinstance(own, FunctionType):
        return f"{name} is no function of a file"
    if site.options is None:
        return f"{name} is called with options that are no constants"
    found = recognised_calls(own, name, site.options)
    if isinstance(found, str):
        return found
    served.rotations[inner[0] if inner else own, tuple(sorted(site.options))] = found
    return None


@dataclass(frozen=True, kw_only=True)
class Rewritten(Replacement):
    """The settings of a module that runs a changed copy of its forward."""

    original: type[Module]
    chosen: frozenset[str]
    called: tuple[str, ...]  # the ops
    left: tuple[tuple[str, str], ...]
    is_root: bool  # what is prepared for a mask, or read from one, is kept for its call
    function: Callable[..., Any] = field(repr=False, compare=False)
    runs_own_code = True

    def __reduce__(self) -> Any:
        return _rewritten, (self.original, self.chosen, self.called, self.left, self.is_root)

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the names of the ops."""
        return self.called

    def among(self, chosen: set[str]) -> Rewritten:
        """Return the replacement, whose ops were chosen before."""
        return self

    @property
    def mixin(self) -> type[Replaced]:
        """Return a class whose forward has the signature of the module's own, for code that asks for it."""
        return _mixin(self.original)

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the changed copy."""
        if not self.is_root or is_traced():
            return self.function(module, *args, **kwargs)
        with reuse():
            return self.function(module, *args, **kwargs)


def _rewritten(original: Any, chosen: Any, called: Any, left: Any, is_root: Any) -> Rewritten:
    made = changed_function(original.forward, chosen)
    function = made.function if isinstance(made, Changed) else original.forward
    options = {"chosen": chosen, "called": called, "left": left, "is_root": is_root}
    return Rewritten(original=original, function=function, **options)


def _mixin(original: type[Module]) -> type[Replaced]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Replaced.forward(self, *args, **kwargs)

    def reduced(self: Any, protocol: Any) -> Any:
        getstate = getattr(self, "__getstate__", None)
        return _rebuilt, (original,), self.__dict__ if getstate is None else getstate()

    members = {"forward": wraps(original.forward)(forward), "__reduce_ex__": reduced, "__module__": __name__}
    return cast("type[Replaced]", type("RewrittenModule", (Replaced,), members))


def _rebuilt(original: type[Module]) -> Any:
    return object.__new__(remade(original, _mixin(original)))


_own_class: Any = object.__dict__["__class__"]  # Python's, below a property of the name


class Processor:
    """The part of a replaced processor's class that is fusedops'.

    ``__class__`` is the class before it: ``set_default_attn_processor`` of diffusers compares it with a list.
    """

    fusedops_original: type[Any]
    fusedops_settings: tuple[frozenset[str], tuple[str, ...], tuple[tuple[str, str], ...]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        getstate = getattr(self, "__getstate__", None)
        return (
            _processor,
            (self.fusedops_original, *self.fusedops_settings),
            self.__dict__ if getstate is None else getstate(),
        )


def original_class(processor: Any) -> type[Any]:
    """Return the class of a processor below fusedops' part."""
    cls: Any = cast("Any", type(processor))
    return cls.fusedops_original if isinstance(processor, Processor) else cls


def replace_processor(processor: Any, cls: type[Any]) -> None:
    """Give a processor another class."""
    _own_class.__set__(processor, cls)


def processor_class(original: type[Any], chosen: frozenset[str], made: Changed, ops: tuple[str, ...]) -> type[Any]:
    """Return a class of a processor with a changed call. Attention modules read the names of its parameters."""
    names: dict[str, Any] = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    names |= {"__doc__": original.__doc__, "__class__": property(lambda self: original)}
    members = {
        "__call__": made.function,
        "fusedops_original": original,
        "fusedops_settings": (chosen, ops, made.left),
    }
    return type(original.__name__, (Processor, original), {**names, **members})


def _processor(original: type[Any], chosen: Any, ops: Any, left: Any) -> Any:
    made = changed_function(original.__dict__.get("__call__", original.__call__), chosen)
    cls = processor_class(original, chosen, made, ops) if isinstance(made, Changed) else original
    return object.__new__(cls)


def restore_processor(processor: Any) -> None:
    """Give a processor its own class again."""
    if isinstance(processor, Processor):
        _own_class.__set__(processor, processor.fusedops_original)
