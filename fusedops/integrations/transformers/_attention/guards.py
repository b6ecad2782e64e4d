"""Checks of transformers that refuse an implementation of attention which is not in their own list.

transformers has no way to declare that a registered implementation returns probabilities, or serves continuous
batching. So its checks are replaced while a model has fusedops' attention by ``apply``, and are transformers' own again
after the last ``remove()``, or when the last such model is gone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch.nn import Module
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager


class Guards:
    """The checks of transformers, while models need others.

    Args:
        names: the implementations that return probabilities, as "eager" does.
        paged: the one that serves continuous batching.
        config: the class of the configs.
        manager: the class that runs continuous batching. A release without the check decides by itself.
    """

    def __init__(
        self,
        names: Collection[str],
        paged: str,
        config: Any = PreTrainedConfig,
        manager: Any = ContinuousBatchingManager,
    ) -> None:
        self._members: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (config, "output_attentions", lambda own: _output_attentions(own, names)),
            (config, "validate_output_attentions", lambda own: _validate(own, names)),
            (manager, "switch_to_cb_friendly_attn", lambda own: _switch(own, paged)),
        ]
        self._lock = threading.RLock()  # a model may be collected while it is held
        self._models: dict[int, weakref.ref[Module]] = {}
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def hold(self, model: Module) -> None:
        """Replace the checks until :meth:`release` of each held model."""
        key = id(model)
        with self._lock:
            self._models[key] = weakref.ref(model, lambda _: self._release(key))
            if self._replaced:
                return
            for owner, name, made in self._members:
                if name in owner.__dict__:
                    own = owner.__dict__[name]
                    ours = made(own)
                    setattr(owner, name, ours)
                    self._replaced.append((owner, name, own, ours))

    def release(self, model: Module) -> None:
        """Forget a model. After the last one, the checks are transformers' own again."""
        self._release(id(model))

    def _release(self, key: int) -> None:
        with self._lock:
            self._models.pop(key, None)
            while self._replaced and not self._models:
                owner, name, own, ours = self._replaced.pop()
                if owner.__dict__.get(name) is ours:  # else somebody replaced it after us, and may call ours
                    setattr(owner, name, own)


def _output_attentions(own: Any, names: Collection[str]) -> Any:
    def set_output_attentions(config: Any, value: bool) -> None:
        if config._attn_implementation in names:
            config._output_attentions = value
        else:
            own.fset(config, value)

    return own.setter(set_output_attentions)


def _validate(own: Callable[[Any], None], names: Collection[str]) -> Callable[[Any], None]:
    @functools.wraps(own)
    def validate_output_attentions(config: Any) -> None:
        if config._attn_implementation not in names:
            own(config)

    return validate_output_attentions


def _switch(own: Callable[..., None], paged: str) -> Callable[..., None]:
    @functools.wraps(own)
    def switch_to_cb_friendly_attn(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != paged:
            own(self, model, *args, **kwargs)

    return switch_to_cb_friendly_attn
