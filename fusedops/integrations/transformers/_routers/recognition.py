"""Routers of experts in models (Mixtral's, Qwen3-MoE's, gpt-oss's, DeepSeek-V3's), recognised by their results.

A router returns logits, the weights of the chosen experts and their indices. Its own forward runs on logits that are
given, in training too, and its choice, its weights and its gradients are compared with those of
:func:`fusedops.top_k_routing`. Numbers among its attributes are tried as a scale, an eps or sizes of groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.source import reason_of_source
from fusedops.integrations._trial.twin import Raised, is_replaced_elsewhere, near, numbers, parameters_of
from fusedops.integrations._trial.whole import TOKENS, seen_whole
from fusedops.integrations.transformers._routers.choices import recognised_routing
from fusedops.integrations.transformers._routers.router import Logits, Router
from fusedops.integrations.transformers._routers.small_router import ARGUMENT, Path, Result, SmallRouter, ordinary_rows

_TOLERANCE = 1e-5
_NARROW = 2.0**-5  # of bfloat16: some routers compute their scores in it
_LOGITS = "its first result is not a linear function of its tokens"
_FORM = "its forward does not return logits, weights and the indices of experts"


def recognised_router(module: Module) -> Replacement | str | None:
    """Return the replacement of a router, the reason why it is left, or None for another module.

    >>> recognised_router(torch.nn.Linear(2, 2))
    """
    small = SmallRouter.of(module)
    outcome = None if small is None else _recognised(module, small)
    if outcome is None and "router" in own_class(module).__name__.lower():
        return _reason_of_form(module)
    return outcome


def _reason_of_form(module: Module) -> str:
    parameters = parameters_of(own_class(module).forward) or []
    if sum(each.default is each.empty for each in parameters) > 1:
        taken = ", ".join(each.name for each in parameters)
        return f"its forward takes {taken}, expected tokens and at most a bias of the choice"
    return _FORM


def _recognised(module: Module, small: SmallRouter) -> Replacement | str | None:
    reason = reason_of_source(module.modules(), outside=True)
    if reason is not None:
        return reason if "router" in own_class(module).__name__.lower() else None
    plain = _plain_results(small)
    if plain is None:
        return None
    if is_replaced_elsewhere(module):
        return "another library has replaced its forward"
    logits = _logits_of(small, plain)
    if logits is None:
        return _LOGITS
    choices = small.choices(logits.bias, logits.factor)
    if choices is None:
        return _FORM
    z = _transformed(replace(logits, factor=1.0), choices.logits)
    if not near(choices.result.logits, z, _TOLERANCE):
        return _LOGITS
    routing = recognised_routing(replace(choices, logits=z), small.settings())
    if isinstance(routing, str):
        return routing
    return reason_of_source(module.modules()) or _confirmed(small, Router(small.names, logits, routing))


def _plain(small: SmallRouter) -> tuple[Tensor, dict[Path, Tensor]]:
    vectors = {path: numbers(seed, small.experts) for seed, path in enumerate(small.vectors, 20)}
    return ordinary_rows(small.experts), vectors


def _plain_results(small: SmallRouter) -> Result | None:
    """Return the results for ordinary logits, and set the rank of the tokens for which there are some."""
    z, vectors = _plain(small)
    for rank in (2, 3):
        small.rank = rank
        result = small.read(small.result_of(z, vectors), len(z))
        if result is not None:
            return result
    return None


def _transformed(logits: Logits, z: Tensor) -> Tensor:
    z = z * logits.factor
    return torch.tanh(z / logits.softcap) * logits.softcap if logits.softcap else z


def _logits_of(small: SmallRouter, plain: Result) -> Logits | None:
    """Return how the logits follow from the product of tokens and weight, or None."""
    z, vectors = _plain(small)
    layer = small.weight[:-1]
    found = Logits(small.weight, layer=layer if layer in small.called_layers else None)
    for path in (None, *vectors):
        if near(plain.logits, z if path is None else z + vectors[path], _TOLERANCE):
            return replace(found, bias=path) if path != ARGUMENT else None
    for setting in small.settings():
        for each in (replace(found, factor=setting), replace(found, softcap=setting)):
            if setting > 0 and near(plain.logits, _transformed(each, z), _TOLERANCE):
                return each
    return None


class _Call:
    """A call with random numbers, by a router's own forward and by a replacement.

    Args:
        small: the router.
        shape: of the tokens, without their width.
        dtype: of the tokens.
        own: the dtype of the router's tensors.
        context: of the call, such as autocast.
    """

    def __init__(
        self,
        small: SmallRouter,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        own: torch.dtype = torch.float32,
        context: Callable[[], Any] = nullcontext,
    ) -> None:
        self._small, self._context = small, context
        self._x = numbers(30, *shape, small.width, dtype=dtype)
        tensors = {path: numbers(at, small.experts, dtype=own) for at, path in enumerate(small.vectors, 31)}
        tensors[small.weight] = small.random_weight.to(own, copy=True)
        self._argument = tensors.get(ARGUMENT)
        self._router = small.twin(tensors)
        self.own = self._run(own_class(small.module).forward)

    def _run(self, forward: Any, context: Callable[[], Any] | None = None) -> Any:
        def inside(*args: Any) -> Any:
            with (context or self._context)():
                return forward(*args)

        return self._small.run(self._router, self._x, self._argument, inside)

    @property
    def is_read(self) -> bool:
        """True where the router's own forward returns what a router does."""
        return self._small.read(self.own, self._x[..., 0].numel()) is not None

    def agrees(self, settings: Router, tolerance: float = _TOLERANCE, weights_dtype: bool = True) -> bool:
        """Return True where the replacement has results of the same shapes and dtypes, and nearly of the same numbers.

        It gets the experts that the router chose: of two that are nearly equal it may take the other.
        """
        forward = partial(_replaced, settings, self.own[2])
        result = self._run(forward)
        if isinstance(result, Raised) or result[0].dtype != self.own[0].dtype:
            return False
        if weights_dtype and result[1].dtype != self.own[1].dtype:
            return False
        return near(result[0], self.own[0], _TOLERANCE) and near(result[1], self.own[1], tolerance)

    def whole(self, settings: Router) -> Replacement | str:
        """Return the replacement, or what the router's own forward does beside it."""
        own = own_class(self._small.module).forward

        def expected(*tensors: Tensor) -> Any:
            return _replaced(settings, own(self._router, *tensors)[2], self._router, *tensors)

        # the same experts for many tokens: more than a capacity
        self._x[..., self._x.shape[-2] // 2 :, :] = self._x[..., :1, :]
        given = [self._x] if self._argument is None else [self._x, self._argument]
        one = [self._x[..., :1, :], *given[1:]]
        return seen_whole(settings, self._router, own, expected, [given, one], _TOLERANCE)


def _reference(z: Tensor, k: int, **options: Any) -> Any:
    return ops.OPS["top_k_routing"].reference(z, k, **options)


def _replaced(settings: Router, index: Tensor, module: Any, x: Tensor, argument: Tensor | None = None) -> Any:
    """Return the results of a replacement with the experts of ``index``."""
    return settings.computed(_reference, module, x, argument, index)


def _confirmed(small: SmallRouter, found: Router) -> Replacement | str:
    """Return a replacement with its ranks and dtypes, or the reason why there is none."""
    ranked = _with_ranks(small, found)
    if ranked is None:
        return "its results are those of the op for some tokens alone"
    typed = _with_dtypes(small, ranked)
    if typed is None:
        return "the dtypes of its results follow another rule"
    return _Call(small, TOKENS[2] if small.rank == 2 else TOKENS[0]).whole(typed)


def _with_ranks(small: SmallRouter, found: Router) -> Router | None:
    """Return the replacement with the ranks of tokens for which its results have the shapes of the router's."""
    calls = {len(shape) + 1: _Call(small, shape) for shape in ((6,), (2, 3))}
    for flat in (True, False):
        each = replace(found, flat=flat)
        ranks = [rank for rank, call in calls.items() if call.is_read and call.agrees(each, weights_dtype=False)]
        if 3 in ranks or not calls[3].is_read or not flat:
            return replace(each, ranks=tuple(ranks)) if ranks else None
    return None


def _with_dtypes(small: SmallRouter, found: Router) -> Router | None:
    """Return the replacement with the rules for the dtypes of its product and its results, or None."""
    wide, narrow = torch.float32, torch.bfloat16
    shape = (6,) if small.rank == 2 else (2, 3)
    calls = [_Call(small, shape, *dtypes) for dtypes in product((wide, narrow), (wide, narrow))]
    calls = [call for call in calls if call.is_read]
    autocast = _Call(small, shape, context=partial(torch.autocast, "cpu", narrow))
    first: Router | None = None
    for each in _dtype_rules(found):
        if all(call.agrees(each, _NARROW) for call in calls):
            if not autocast.is_read or autocast.agrees(each, _NARROW):
                return each
            if first is None and autocast.agrees(each, _NARROW, weights_dtype=False):
                first = each  # sums of autocast are float32, which the weights then are: experts take them as they are
    return first


def _dtype_rules(found: Router) -> Iterator[Router]:
    for dtype, widened, autocast in product(("input", "weight", "float32"), (False, True), (True, False)):
        logits = replace(found.logits, dtype=dtype, widened=widened, autocast=autocast)
        for rule in ("float32", "input", "logits"):
            yield replace(found, logits=logits, weights_dtype=rule)
