"""The replacement of a module's forward, and its way back.

The class of the module becomes a subclass of its own class, with the same name, as FSDP2 does it: the parameters,
buffers, hooks and names of the module stay, and so do its state dict, copies, pickles and the guards of torch.compile.
An attribute on the instance would not do: a bound forward that is copied with the module's attributes, as by
torch.nn.DataParallel, reads the weights of the original.
"""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakValueDictionary

from torch.nn import Module

SETTINGS = "_fusedops_replacement"
_ORIGINAL = "_fusedops_original"
# a class of a notebook's cell ends with its modules: a cache would keep it
_classes: WeakValueDictionary[tuple[type[Module], type[Any]], type[Any]] = WeakValueDictionary()


class Replacement:
    """The settings of a replaced module: what its forward computes instead.

    ``op`` is the op's name, ``when`` the mode in which it is called: "training", "evaluation", or "" for both.
    """

    op: str
    when: str = ""
    left: tuple[tuple[str, str], ...] = ()  # ops that it does not call, with the reason
    has_activation = False  # True where forward computes the activation that the module has as a child
    runs_own_code = False  # True where forward is the module's own, which calls its children
    stays = False  # True where the module's own forward has not what it needs: remove() of apply leaves it

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the names of the ops that are called."""
        return (self.op,)

    def among(self, chosen: set[str]) -> Replacement | None:
        """Return the replacement with these ops alone, or None where it has none of them."""
        return self if self.op in chosen else None

    @property
    def mixin(self) -> type[Replaced]:
        """Return the class that comes before the module's own."""
        return Replaced

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module's own forward does, with an op."""
        raise NotImplementedError


class Replaced:
    """The part of a replaced module's class that is fusedops': forward, and how the module is copied and pickled."""

    _fusedops_replacement: Replacement | None = None
    _fusedops_original: type[Module]
    _fusedops_mixin: type[Replaced]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement; after its removal the module's own forward."""
        settings: Replacement | None = getattr(self, SETTINGS, None)
        if settings is None:
            # a wrapper made its class of this one, as FSDP2 does, before the removal; or a library kept the bound
            # forward, as accelerate's hooks do, and the instance's own `forward` may lead back to here
            return own_class(cast("Any", self)).forward(self, *args, **kwargs)
        return settings.forward(self, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        getstate = getattr(self, "__getstate__", None)  # of every object since Python 3.11
        state = self.__dict__ if getstate is None else getstate()
        return _rebuilt, (self._fusedops_original, self._fusedops_mixin), state


class _ReplacedABC(ABC, Replaced):
    """The part for a class whose first base is ABC: Python changes the class of an object only to one with the same."""

    forward = Replaced.forward  # which comes after the module's own, as ABC does
    __reduce_ex__ = Replaced.__reduce_ex__


def _rebuilt(original: type[Module], mixin: type[Replaced]) -> Any:
    """Return an empty module of a replaced class, for a copy or an unpickled module."""
    return object.__new__(remade(original, mixin))


def remade(original: type[Module], mixin: type[Replaced]) -> type[Any]:
    """Return the one class of a module's own class and a mixin: it is kept while a module of it lives."""
    known = _classes.get((original, mixin))
    if known is not None:
        return known
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    made = type(original.__name__, (mixin, original), {**names, _ORIGINAL: original, "_fusedops_mixin": mixin})
    return _classes.setdefault((original, mixin), made)


def replace(module: Module, replacement: Replacement) -> None:
    """Replace the forward of a module."""
    setattr(module, SETTINGS, replacement)
    if not isinstance(module, Replaced):
        mixin = replacement.mixin
        if mixin is Replaced and ABC in _first_bases(type(module)):
            mixin = _ReplacedABC
        module.__class__ = remade(type(module), mixin)


def _first_bases(cls: type[Any] | None) -> Iterator[type[Any]]:
    """Yield a class and its bases that have its layout in memory."""
    while cls is not None:
        yield cls
        cls = cls.__base__


def replacement_of(module: Module) -> Replacement | None:
    """Return the replacement of a module, or None."""
    return cast("Any", module)._fusedops_replacement if isinstance(module, Replaced) else None


def restore(module: Module) -> None:
    """Give a module its own forward again."""
    module.__dict__.pop(SETTINGS, None)
    original = type(module).__dict__.get(_ORIGINAL)
    if original is not None:
        module.__class__ = original


def own_class(module: Module) -> type[Any]:
    """Return the class of a module below fusedops' part, also where a wrapper made its class of a replaced one."""
    return getattr(type(module), _ORIGINAL, type(module))


def own_body(module: Module) -> Any:
    """Return the function of a module's own forward below its decorators, whose code has the names that it calls.

    None for a module of torch.jit.script, whose class has none.
    """
    return inspect.unwrap(getattr(own_class(module), "forward", None))  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class InEvaluation(Replacement):
    """A replacement in evaluation alone: in training the module's own forward runs, for the reason in ``left``."""

    own: Replacement
    op: str
    left: tuple[tuple[str, str], ...]
    has_activation: bool
    when: str = "evaluation"

    @classmethod
    def of(cls, own: Replacement, reason: str) -> InEvaluation:
        """Return the replacement in evaluation alone."""
        return cls(own, own.op, (*own.left, (own.op, reason)), own.has_activation)

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute by the op in evaluation, by the module's own forward in training."""
        if module.training:
            return own_class(module).forward(module, *args, **kwargs)
        return self.own.forward(module, *args, **kwargs)
