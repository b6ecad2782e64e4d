"""A cache of transformers with which a step of generation is recorded, and made again without its Python.

The forward of the model's decoder is recorded in a step of one token (``fusedops/_dispatch/recording.py``). The next
step is computed twice, from the recording and by the model: the recording is used where both have the same bits. What
it depends on besides the cache is compared before each step: the modules, their weights, hooks and modes, the policy.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection
from functools import cache
from operator import is_, itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules import module as modules_of_torch

from fusedops._dispatch.recording import Recorder, Recording
from fusedops._policy import context
from fusedops._report.user_frame import user_stack_level
from fusedops._torch import TENSOR_TYPES, autocasts, dispatch_modes, is_traced
from fusedops.dtypes import CODES
from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations._replacement import Replacement, own_class, replace, replacement_of
from fusedops.integrations._trial.source import home_of
from fusedops.integrations.transformers._attention.packed_cache import PackedCache, Step, layers_of

_CACHE, _MASK, _POSITIONS = "past_key_values", "attention_mask", "position_ids"
_TENSORS = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_TORCH = {*vars(Module())}  # attributes that every module has
_COMPARED = ("training", "_parameters")  # of these; the others are looked into
_IN_VAIN = 3  # recordings one after another that no step ran from
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_CAPTURING = "transformers.utils.output_capturing"  # its hooks stay, and do nothing unless their outputs are asked for


def recorded_cache(model: Any, dtype: torch.dtype | None = None) -> RecordedCache:
    """Return a cache for ``model.generate(..., past_key_values=cache)`` whose steps run without the model's Python.

    The first step of one token is recorded, the second compared bit for bit, and further ones are the recorded calls
    alone, one after another, by threads that stay awake between them. The tokens are those of the model's own forward.
    A step is computed by the model itself where something else is asked for, such as hidden states or gradients; after
    a change of weights, adapters, attributes of modules or policy, and where the cache has grown, it is recorded again.
    A cache serves one batch of one model; after ``cache.reset()``, which keeps the memory and the recording, another
    one. With a new cache an answer of fewer than some 20 tokens takes longer, by the first two steps.

    ``cache.replayed`` counts the steps that ran from a recording. Where a model cannot be recorded, a
    FusedOpsWarning has the reason, once, and ``cache.reason`` keeps it.

    Args:
        model: of transformers on a CPU, in evaluation, with the attention implementation "fusedops": after
            ``apply(model)``.
        dtype: torch.int8 or torch.float8_e4m3fn: keys and values become codes, see :func:`quantized_cache`. None: they
            stay as they are.

    Raises:
        InvalidInputError: the model is on another device, or as for :func:`quantized_cache`.

    >>> import torch, transformers
    >>> from fusedops.integrations.transformers import apply, recorded_cache
    >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    >>> applied, cache = apply(model), recorded_cache(model)
    >>> tokens = model.generate(torch.tensor([[1, 5]]), past_key_values=cache, max_new_tokens=8, pad_token_id=0)
    >>> cache.get_seq_length(), cache.replayed
    (9, 5)
    """
    if dtype is not None and dtype not in CODES:
        raise InvalidInputError(
            f"recorded_cache: got dtype = {dtype}, expected None, torch.int8 or torch.float8_e4m3fn; to fix: pass one"
        )
    if model.device.type != "cpu":
        raise InvalidInputError(
            f"recorded_cache: got a model on {model.device}, expected one on a CPU; to fix: use the cache that "
            "generate makes, or quantized_cache"
        )
    cache = RecordedCache(*layers_of("recorded_cache", model, dtype))
    decoder: Any = model.get_decoder()
    if replacement_of(decoder) is None:
        replace(decoder, _ByCache())
    elif not isinstance(replacement_of(decoder), _ByCache):
        cache.give_up(decoder, "its forward is replaced by another function")
    return cache


class _ByCache(Replacement):
    """The forward of a decoder whose cache may have a recorded step."""

    op = ""
    runs_own_code = True
    stays = True

    @property
    def ops(self) -> tuple[str, ...]:
        """Return no name: the modules inside call the ops."""
        return ()

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        own = own_class(module).forward
        given = {**dict(zip(_parameters_of(own), args)), **kwargs} if args else kwargs
        cache = given.get(_CACHE)
        if isinstance(cache, RecordedCache) and len(given) == len(args) + len(kwargs):
            return cache.forward(module, given)
        return own(module, *args, **kwargs)


class _Recorded(NamedTuple):
    """A recorded step.

    Attributes:
        key: of the state in which it was recorded.
        inputs: the tensors that the decoder was given, by name; their numbers are set before each step.
        others: its other arguments.
        tokens: where the token is, for each kind of layers.
        recording: the calls.
        kind: the class of the result.
        hidden: the result, (B, 1, H).
        seen: what the step depends on besides.
    """

    key: tuple[Any, ...]
    inputs: dict[str, Tensor]
    others: dict[str, Any]
    tokens: list[_Place]
    recording: Recording
    kind: type[Any]
    hidden: Tensor
    seen: _Seen


class _Place(NamedTuple):
    """Where the token of a step is in the layers of a kind.

    Attributes:
        slots: (B,), of the token of each sequence.
        used: (B,), the keys of each sequence, its own included.
        slot: (B,), of token 0.
        first: (B,), the keys before token 0.
    """

    slots: Tensor
    used: Tensor
    slot: Tensor
    first: Tensor

    def set(self, total: int) -> None:
        """Set the place of the token after ``total`` others."""
        torch.add(self.slot, total, out=self.slots)
        torch.add(self.first, total + 1, out=self.used)


class RecordedCache(PackedCache):
    """The layers of a model, and its recorded step; see :func:`recorded_cache`.

    Attributes:
        replayed: how many steps ran from a recording.
        reason: why the model is not recorded, or an empty text.
    """

    def __init__(self, layers: list[Any], shared: Step) -> None:
        super().__init__(layers, shared)
        self.replayed, self.reason = 0, ""
        self._recorded: _Recorded | None = None
        self._is_compared, self._in_vain = False, 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: the tokens, and no recorded step."""
        return {**self.__dict__, "_recorded": None}

    def reset(self) -> None:
        """Forget all tokens, and keep their memory, and with it the recorded step."""
        for layer in cast("list[Any]", self.layers):
            layer.empty()

    def give_up(self, decoder: Module, reason: str) -> None:
        """Keep why the model is not recorded, and warn."""
        self.reason, self._recorded = reason, None
        warnings.warn(
            f"recorded_cache: got {own_class(decoder).__name__}, expected steps that can be recorded: {reason}; to "
            "fix: use the cache that generate makes, or go on: its own forward computes each step",
            FusedOpsWarning,
            stacklevel=user_stack_level("transformers"),
        )

    def forward(self, decoder: Any, kwargs: dict[str, Any]) -> Any:
        """Compute a step from the recording, or by the decoder's own forward."""
        own = own_class(decoder).forward
        if self.reason or not self._may_record(decoder, kwargs):
            return own(decoder, **kwargs)
        layers: list[Any] = self.layers
        for layer in layers:
            layer.make_room(1)
        if _POSITIONS in _parameters_of(own) and kwargs.get(_POSITIONS) is None:
            positions = torch.full((len(layers[0].padding), 1), layers[0].total)
            kwargs = {**kwargs, _POSITIONS: positions}
        recorded = self._recorded
        # in inference mode torch's dispatcher does not see each call, and tensors have no versions
        with torch.inference_mode(False), torch.no_grad():
            key = self._key()
            again = recorded is None or recorded.key != key or not _fits(recorded, kwargs)
            if recorded is None or again or recorded.seen.has_changed(decoder):
                return self._record(decoder, own, kwargs, key)
            for name, tensor in recorded.inputs.items():
                tensor.copy_(kwargs[name])
            for each in recorded.tokens:
                each.set(layers[0].total)
            recorded.recording.run()
        if not self._is_compared:
            return self._compare(decoder, own, kwargs, recorded)
        self._in_vain = 0
        self.replayed += 1
        for layer in layers:
            layer.total += 1
        return recorded.kind(last_hidden_state=recorded.hidden.clone(), past_key_values=self)

    def _may_record(self, decoder: Any, kwargs: dict[str, Any]) -> bool:
        """Return True for a step of one token for each sequence that asks for nothing but its hidden states."""
        layers: list[Any] = self.layers
        ids, total = kwargs.get("input_ids"), layers[0].total
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        if ids is None or not total or tuple(ids.shape[:2]) != (len(layers[0].padding), 1) or decoder.training:
            return False
        if {layer.total for layer in layers} != {total}:  # an exception between two layers
            return False
        if any(name.startswith("output_") and value for name, value in kwargs.items()):
            return False
        if torch.is_grad_enabled() or is_traced() or dispatch_modes() or context.watching or autocasts("cpu"):
            return False
        mask, is_padded = kwargs.get(_MASK), any(layers[0].padding)
        if mask is None or (is_padded and kwargs.get(_POSITIONS) is None):  # a model may take these from the mask
            return not is_padded
        if mask.dim() != 2 or mask.shape[1] != total + 1:
            return False
        columns = torch.arange(total + 1)
        return torch.equal(mask != 0, (columns >= layers[0].starts[:, None]).expand_as(mask))

    def _key(self) -> tuple[Any, ...]:
        layers: list[Any] = self.layers
        memory = tuple([(layer.moves, layer.dropped) for layer in layers])
        return memory, *layers[0].padding

    def _record(self, decoder: Any, own: Any, kwargs: dict[str, Any], key: tuple[Any, ...]) -> Any:
        """Compute a step, and record it."""
        self._in_vain += 1
        if self._in_vain > _IN_VAIN:
            self.give_up(decoder, "its weights, attributes or arguments are others in each step")
            return own(decoder, **kwargs)
        layers: list[Any] = self.layers
        seen = _Seen(decoder)
        inputs = {name: x.clone() for name, x in kwargs.items() if isinstance(x, Tensor) and name != _MASK}
        others = {name: x for name, x in kwargs.items() if name not in (*inputs, _CACHE, _MASK)}
        kept: dict[Any, Any] = {}
        of_token: list[_Place] = []
        for layer in layers:
            if (layer.dropped, layer.capacity) not in kept:
                of_layer = self.shared.places(layer, 1)
                kept[layer.dropped, layer.capacity] = of_layer
                slot, first = of_layer.slots - layer.total, of_layer.used - layer.total - 1
                of_token.append(_Place(of_layer.slots, of_layer.used, slot, first))
        recorder = Recorder()
        self.shared.kept = kept
        try:
            with recorder:
                results = own(decoder, **others, **inputs, past_key_values=self)
        finally:
            self.shared.kept = None
            self.shared.forget()
        given = {name for name, each in results.items() if each is not None}
        reason = recorder.reason or seen.reason
        if given != {"last_hidden_state", _CACHE}:
            reason = reason or f"it returns {', '.join(sorted(given - {_CACHE}))}"
        if reason:
            self.give_up(decoder, reason)
            return results
        hidden = results.last_hidden_state
        recording = recorder.recording()
        self._recorded = _Recorded(key, inputs, others, of_token, recording, type(results), hidden, seen)
        self._is_compared = False
        return type(results)(last_hidden_state=hidden.clone(), past_key_values=self)

    def _compare(self, decoder: Any, own: Any, kwargs: dict[str, Any], recorded: _Recorded) -> Any:
        """Compute a step by the decoder's own forward too, and give the recording up where it has other bits."""
        results = own(decoder, **kwargs)
        hidden: Tensor = results.last_hidden_state
        if torch.equal(hidden.view(torch.uint8), recorded.hidden.view(torch.uint8)):
            self._is_compared = True
        else:
            self.give_up(decoder, "a step computes from numbers of Python that change with the position")
        return results


def _fits(recorded: _Recorded, kwargs: dict[str, Any]) -> bool:
    """Return True where a step has the arguments of the recorded one, but for the numbers in its tensors."""
    names = {*kwargs} - {_CACHE, _MASK}
    if names != {*recorded.others, *recorded.inputs}:
        return False
    same = all(
        isinstance(x := kwargs[name], Tensor) and (x.shape, x.dtype) == (old.shape, old.dtype) and x.is_cpu
        for name, old in recorded.inputs.items()
    )
    return same and all(kwargs[name] is old or _equals(kwargs[name], old) for name, old in recorded.others.items())


@cache
def _parameters_of(forward: Any) -> tuple[str, ...]:
    """Return the parameters of a forward after the module."""
    return tuple(inspect.signature(forward).parameters)[1:]


def _equals(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b


class _Seen:
    """State that a recorded step depends on besides its inputs and the cache: how the modules were, to be compared.

    Attributes:
        decoder: whose step it is.
        reason: why the modules cannot be recorded, or an empty text.
    """

    def __init__(self, decoder: Any) -> None:
        self.decoder, self.reason = decoder, ""
        self._policy = context.active_policy()
        self._modules: list[Module] = [*decoder.modules()]
        self._states: list[dict[str, Any]] = [each.__dict__ for each in self._modules]
        self._contents: list[Collection[Any]] = [vars(decoder.config)]
        for state in self._states:
            self._contents += [state[name] for name in _TENSORS]
            own = (value for name, value in state.items() if name not in _OF_TORCH)
            self._contents += [value for value in own if isinstance(value, (dict, list, set))]
        self._dicts: list[dict[str, Any]] = [each for each in self._contents if each and isinstance(each, dict)]
        self._lists = [each for each in self._contents if each and not isinstance(each, dict)]
        self._getters = [itemgetter(*_COMPARED, *(state.keys() - _OF_TORCH)) for state in self._states]
        self._values = self._values_now()
        self._items = self._items_now()
        self._weights = [each for each in self._items if isinstance(each, Tensor)]
        if any(type(each) not in TENSOR_TYPES or not each.is_cpu for each in self._weights):
            self.reason = "a weight or buffer is no plain tensor on a CPU"
        self._counted = [each for each in self._weights if not each.is_inference()]  # others have no version
        self._hooks: list[dict[int, Any]] = [getattr(modules_of_torch, name) for name in _GLOBAL_HOOKS]
        self._hooks += [state[name] for state in self._states[1:] for name in _HOOKS]
        if any(home_of(hook) != _CAPTURING for each in self._hooks for hook in each.values()):
            self.reason = self.reason or "it has hooks"
        self._before = None if self.reason else self._now()

    def has_changed(self, decoder: Any) -> bool:
        """Return True where something differs, or for another decoder."""
        if decoder is not self.decoder or context.active_policy() is not self._policy:
            return True
        try:
            values, items = self._values_now(), self._items_now()
        except KeyError:  # an attribute is gone
            return True
        return not (_are_same(values, self._values) and _are_same(items, self._items) and self._now() == self._before)

    def _values_now(self) -> list[Any]:
        """Return the attributes of all modules."""
        return [value for get, state in zip(self._getters, self._states) for value in get(state)]

    def _items_now(self) -> list[Any]:
        """Return the weights, buffers and children of all modules, and what is in dicts and lists of their own."""
        items = [item for each in self._dicts for item in each.values()]
        return items + [item for each in self._lists for item in each]

    def _now(self) -> tuple[list[Any], ...]:
        """Return what is compared by value: memory, form and versions of weights, classes, sizes and hooks."""
        return (
            [each.data_ptr() for each in self._weights],
            [each.stride() for each in self._weights],
            [each._version for each in self._counted],
            [type(each) for each in self._modules],
            [*map(len, self._states), *map(len, self._contents)],
            [id(hook) for each in self._hooks if each for hook in each.values()],
        )


def _are_same(values: list[Any], before: list[Any]) -> bool:
    """Return True where values are the same objects, or equal numbers or texts."""
    if len(values) != len(before):
        return False
    return all(map(is_, values, before)) or all(a is b or _equals(a, b) for a, b in zip(values, before))
