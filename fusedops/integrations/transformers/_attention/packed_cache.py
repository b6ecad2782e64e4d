"""A cache of transformers whose keys and values are codes of 8 bits, which attention reads where they lie.

A layer hands the model's attention function its keys as one object, :class:`PackedKeys`: codes, and new keys and values
that are not written yet. The function of "fusedops" writes them by :func:`fusedops.store_kv` and reads all by
:func:`fusedops.paged_attention`; each sequence is a page. A prompt is computed with its own keys, as in transformers'
caches; a longer call after it with the keys unpacked, for its tiles read each key once.

Source: transformers, ``cache_utils.py``.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from fusedops import ops
from fusedops._torch import disabled_torch_function, wrapper_subclass
from fusedops.dtypes import CODES
from fusedops.errors import InvalidInputError
from fusedops.integrations._sinks import packed_with_sinks
from fusedops.integrations.transformers._attention.paged import FEW_QUERIES

_LEAST = 64  # tokens by which the memory of a sequence grows
_WINDOWS = {"sliding_attention"}


def quantized_cache(model: Any, dtype: torch.dtype = torch.int8) -> Cache:
    """Return a cache for ``model.generate(..., past_key_values=cache)`` whose keys and values stay codes of 8 bits.

    A token and key head has a float32 scale: a key of 64 numbers takes 68 bytes. The layers with a sliding window keep
    at most about two windows. Prompts may be padded on the left. A cache serves one batch; after ``cache.reset()``
    another one. ``cache.nbytes`` is the memory that it has.

    Args:
        model: of transformers, with the attention implementation "fusedops": after ``apply(model)``, or
            ``model.set_attn_implementation("fusedops")``.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Raises:
        InvalidInputError: the model has another implementation of attention, or layers that are not attention to all
            keys or to a window of them; later, a call that has more than causal attention, windows and sinks, beam
            search, or offloading.

    >>> import torch, transformers
    >>> from fusedops.integrations.transformers import quantized_cache
    >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    >>> config = transformers.LlamaConfig(**sizes, attn_implementation="fusedops")
    >>> model = transformers.LlamaForCausalLM(config)
    >>> cache = quantized_cache(model)
    >>> tokens = model.generate(torch.tensor([[1, 5]]), past_key_values=cache, max_new_tokens=3, pad_token_id=0)
    >>> cache.get_seq_length(), cache.layers[0].codes[0].dtype
    (4, torch.int8)
    """
    if dtype not in CODES:
        raise InvalidInputError(
            f"quantized_cache: got dtype = {dtype}, expected torch.int8 or torch.float8_e4m3fn; to fix: pass one"
        )
    return PackedCache(*layers_of("quantized_cache", model, dtype))


def layers_of(caller: str, model: Any, dtype: torch.dtype | None) -> tuple[list[PackedLayer], Step]:
    """Return the layers of a cache for a model, and what they share; InvalidInputError where it does not fit."""
    config = model.config.get_text_config(decoder=True)
    given = config._attn_implementation
    if given != "fusedops":
        raise InvalidInputError(
            f"{caller}: got a model with attention implementation {given!r}, expected 'fusedops', which reads the "
            "cache where it lies; to fix: call apply(model), or model.set_attn_implementation('fusedops'); where apply "
            "leaves the attention, use the cache that generate makes"
        )
    layers: Any = cache_utils
    kinds, options = layers.get_layer_types_and_kwargs(config)
    windows: list[int | None] = [each.get("sliding_window") for each in options]
    others = {*kinds} - {"full_attention"} - _WINDOWS
    if getattr(config, "is_encoder_decoder", False):
        others.add("encoder and decoder")
    if getattr(config, "num_kv_shared_layers", None):
        others.add("keys that several layers share")
    if others:
        raise InvalidInputError(
            f"{caller}: got a model with {', '.join(sorted(others))}, expected attention to all keys or to a "
            "sliding window in each layer; to fix: use the cache that generate makes"
        )
    shared = Step()
    return [PackedLayer(dtype, window, shared) for window in windows], shared


class PackedCache(Cache):
    """The layers of a model, see :func:`quantized_cache`."""

    def __init__(self, layers: list[Any], shared: Step) -> None:
        super().__init__(layers=layers)
        self.shared = shared

    @property
    def nbytes(self) -> int:
        """The memory of all keys and values, in bytes."""
        layers: list[Any] = self.layers
        return sum(each.nbytes for layer in layers for each in (*layer.codes, *layer.scales))

    @property
    def max_cache_len(self) -> NoReturn:
        """Refuse: PEFT asks for it before it puts a cache of its own in place of this one."""
        raise _unsupported("prefix tuning of PEFT", "the keys of a prefix come in another cache")


class PackedKeys(Tensor):
    """The keys of a layer for an attention function: (B, Nk, S, D) without memory, of which the last are new."""

    layer: PackedLayer
    added: tuple[Tensor, Tensor]  # new keys and values
    is_written: bool

    @staticmethod
    def __new__(cls: type[PackedKeys], layer: PackedLayer, keys: Tensor, values: Tensor) -> PackedKeys:
        """Make the keys of a layer and new ones."""
        shape = (*keys.shape[:2], layer.get_mask_sizes(keys.shape[2])[0], keys.shape[3])
        made: PackedKeys = wrapper_subclass(cls, keys.dtype, keys.device, shape)
        made.layer, made.added, made.is_written = layer, (keys, values), False
        return made

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse every function of torch: codes are no keys."""
        raise InvalidInputError(
            f"quantized_cache: got keys in codes in {function}, expected them in attention implementation 'fusedops' "
            "alone; to fix: call apply(model) before generate, or use the cache that generate makes, as where a model "
            "computes its keys from what it keeps (DeepSeek-V3)"
        )


class _Places(NamedTuple):
    """Where the tokens of a call are, the same in all layers of a kind.

    Attributes:
        slots: (B * Sq,), of the new tokens.
        bounds: (B + 1,), of the new queries.
        table: (B, 1), the page of each sequence.
        used: (B,), the keys of each sequence, new ones included.
    """

    slots: Tensor
    bounds: Tensor
    table: Tensor
    used: Tensor


class Step:
    """Tensors of a few numbers that all layers of a cache have alike in a step of the model.

    Attributes:
        kept: where the one token of a recorded step is, by what the layers of a kind have alike; None in other steps.
    """

    def __init__(self) -> None:
        self.kept: dict[Any, _Places] | None = None
        self._places: dict[Any, _Places] = {}
        self._checked: dict[Any, weakref.ref[Tensor]] = {}

    def places(self, layer: PackedLayer, queries: int) -> _Places:
        """Return where the tokens of a call are."""
        if self.kept is not None:
            return self.kept[layer.dropped, layer.capacity]
        key = (layer.total, layer.dropped, layer.capacity, queries, *layer.padding, layer.device)
        if key not in self._places:
            self._places = {each: value for each, value in self._places.items() if each[0] == layer.total}
            device, batch = layer.device, len(layer.padding)
            sequences = torch.arange(batch, device=device)
            tokens = torch.arange(layer.total, layer.total + queries, device=device) - layer.starts[:, None]
            slots = (sequences[:, None] * layer.capacity + tokens - layer.dropped).where(tokens >= 0, -1)
            bounds = torch.arange(batch + 1, device=device) * queries
            used = (tokens[:, -1] + 1 - layer.dropped).clamp(min=0)
            self._places[key] = _Places(slots.flatten(), bounds, sequences[:, None], used)
        return self._places[key]

    def forget(self) -> None:
        """Forget the places of the last step."""
        self._places = {}

    def check(self, layer: PackedLayer, mask: Tensor, queries: int) -> None:
        """Raise InvalidInputError unless a mask is causal, of the layer's window and padding."""
        key = (layer.total, layer.window, queries, *layer.padding)
        known = self._checked.get(key)
        if known is not None and known() is mask:
            return
        end = layer.total + queries
        rows = torch.arange(layer.total, end, device=mask.device)[:, None]
        columns = torch.arange(end - mask.shape[-1], end, device=mask.device)
        seen = columns <= rows
        if layer.window is not None:
            seen = seen & (columns > rows - layer.window)
        expected = seen & (columns >= layer.starts[:, None, None])
        if mask.dtype != torch.bool or mask.shape[1] != 1 or not torch.equal(mask[:, 0].expand_as(expected), expected):
            raise _refused("a mask that is not causal with the padding of the prompt")
        self._checked = {key: weakref.ref(mask), **{k: v for k, v in self._checked.items() if k[0] == layer.total}}


class PackedLayer(CacheLayerMixin):
    """The codes of one layer.

    Args:
        dtype: of the codes; None: keys and values stay as they are.
        window: the number of keys that a query sees, its own included, or None for all.
        shared: of the cache.

    Attributes:
        codes: of keys and values, (B, Nk, capacity, D or Dv): the tokens of a head lie one after another.
        scales: of keys and values, (B, Nk, capacity).
        moves: how often the memory was another.
        total: the tokens of a row so far, padding included.
        dropped: the first tokens of each sequence that are no longer kept.
        padding: the tokens of padding before each sequence, and the same as a tensor, ``starts``.
    """

    is_croppable = True

    def __init__(self, dtype: torch.dtype | None, window: int | None, shared: Step) -> None:
        super().__init__()
        self.dtype, self.window, self._shared = dtype, window, shared
        self.is_sliding = window is not None
        self.is_croppable = window is None
        self.reset()

    def reset(self) -> None:
        """Forget all tokens."""
        self.codes: tuple[Tensor, ...] = ()
        self.scales: tuple[Tensor, ...] = ()
        self.moves = self.capacity = 0
        self.empty()

    def empty(self) -> None:
        """Forget all tokens, and keep the memory for others."""
        self.total = self.dropped = 0
        self.padding: list[int] = []
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take over the sizes of the first keys and values; they are written by :meth:`attention`."""
        self.device = key_states.device
        batch, heads = key_states.shape[:2]
        self.padding, self.starts = [0] * batch, torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.is_initialized = True
        dtype = self.dtype or key_states.dtype
        wanted = [(batch, heads, self.capacity, each.shape[3], dtype) for each in (key_states, value_states)]
        if [(*each.shape, each.dtype) for each in self.codes] == wanted:
            return
        self.capacity, self.moves = 0, self.moves + 1
        with torch.inference_mode(False):  # written in other modes too
            self.codes = tuple(
                torch.empty(batch, heads, 0, each.shape[3], dtype=dtype, device=self.device)
                for each in (key_states, value_states)
            )
            if self.dtype is not None:
                self.scales = tuple(torch.empty(batch, heads, 0, device=self.device) for _ in self.codes)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the keys for the attention function, and the new values as they are."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return PackedKeys(self, key_states, value_states), value_states

    def get_seq_length(self) -> int:
        """Return the number of tokens of a row, padding included."""
        return self.total

    def get_max_length(self) -> int:
        """Return the window, or -1."""
        return -1 if self.window is None else self.window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a mask has, and the first of them."""
        first = 0 if self.window is None else max(self.total - self.window + 1, 0)
        return self.total + query_length - first, first

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of each row."""
        if tokens_to_remove > 0:
            raise InvalidInputError(
                f"cache.crop: got {tokens_to_remove}, expected a number of tokens to remove, at most 0; to fix: pass "
                f"{-tokens_to_remove} to remove {tokens_to_remove} tokens"
            )
        if self.window is not None and tokens_to_remove:
            raise _unsupported("a call of crop", "a layer with a window drops the tokens before it")
        self.total = max(self.total + tokens_to_remove, 0)

    def offload(self) -> None:
        """Refuse."""
        raise _unsupported("offloading", "attention reads the codes at each token")

    prefetch = offload

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse."""
        raise _unsupported("beam search", "a sequence has one place in memory, which is not copied at each token")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse."""
        raise _unsupported("another batch", "a sequence has one place in memory")

    batch_select_indices = batch_repeat_interleave

    # -------------------------------------------------------------------------------------------------- attention

    def begin(self, mask: Tensor | None, queries: int) -> None:
        """Take over the padding of a prompt."""
        if mask is None:
            return
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[-1] != queries:
            raise _refused("a mask that is not causal with padding")
        own = mask[:, 0].diagonal(dim1=1, dim2=2).expand(len(self.padding), queries)
        starts = queries - own.sum(1)
        if not torch.equal(own, torch.arange(queries, device=own.device) >= starts[:, None]):
            raise _refused("a prompt that is not padded on the left alone")
        self.starts, self.padding = starts, starts.tolist()

    def check(self, mask: Tensor | None, queries: int) -> None:
        """Raise InvalidInputError unless a mask is causal, of the layer's window and padding."""
        if self._shared.kept is not None:
            return  # the cache has looked at the tokens' mask
        if mask is not None:
            self._shared.check(self, mask, queries)
        elif max(self.padding, default=0) > self.get_mask_sizes(queries)[1]:
            raise _refused("no mask after a prompt with padding")

    def write(self, keys: Tensor, values: Tensor) -> _Places:
        """Write new keys (B, Nk, Sq, D) and values, and return where the tokens are."""
        queries = keys.shape[2]
        self.make_room(queries)
        indices = self._shared.places(self, queries)
        dtype = self.codes[0].dtype if self.dtype is None else keys.dtype  # autocast rounds values, and not keys
        k, v = (each.to(dtype).transpose(1, 2).flatten(0, 1) for each in (keys, values))
        ops.store_kv(k, v, *self.pages(), indices.slots, **self.scales_of_pages())
        self.total += queries
        return indices

    def pages(self) -> tuple[Tensor, Tensor]:
        """Return the caches as pages, one for each sequence: (B, capacity, Nk, D)."""
        keys, values = self.codes
        return keys.transpose(1, 2), values.transpose(1, 2)

    def scales_of_pages(self) -> dict[str, Any]:
        """Return the scales of the pages by the names that the ops have for them."""
        return dict(zip(("k_scale", "v_scale"), (each.transpose(1, 2) for each in self.scales)))

    def unpacked(self, tokens: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """Return keys and values of some tokens, (B, capacity) of booleans, as numbers: (T, Nk, D)."""
        numbers = [codes.transpose(1, 2)[tokens] for codes in self.codes]
        scales = [each.transpose(1, 2)[tokens][..., None] for each in self.scales]
        return [(x.float() * scale).to(dtype) for x, scale in zip(numbers, scales)] if scales else numbers

    def make_room(self, queries: int) -> None:
        """Get memory for new tokens; keys move to it, without those that no window sees any more."""
        held = self.total - min(self.padding) - self.dropped
        if held + queries <= self.capacity:
            return
        drop = 0
        if self.window is not None:  # each sequence keeps its window
            drop = max(self.total - max(self.padding) - self.dropped - self.window + 1, 0)
        kept = max(held, 0) - drop
        needed = kept + queries
        room = needed // 4 if self.window is None else self.window
        self.capacity, self.moves = needed + max(room, _LEAST), self.moves + 1
        self.codes = tuple(self._moved(each, drop, kept) for each in self.codes)
        self.scales = tuple(self._moved(each[..., None], drop, kept)[..., 0] for each in self.scales)
        self.dropped += drop

    def _moved(self, old: Tensor, drop: int, kept: int) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            new = old.new_empty((*old.shape[:2], self.capacity, old.shape[3]))
            new[:, :, :kept] = old[:, :, drop : drop + kept]
        return new


def of_packed_cache(
    query: Tensor,
    keys: PackedKeys,
    values: Tensor,
    scaling: float | None,
    mask: Tensor | None,
    reason: str | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """Write the new keys of a call, and return the attention, (B, Sq, N, Dv); None for a prompt, with its own keys.

    Args:
        query: (B, N, Sq, D).
        keys: of the layer.
        values: the new ones, as the layer returned them.
        scaling: of the scores.
        mask: True where a key is seen, or None.
        reason: what paged_attention has no parameter for, or None.
        sinks: (N,), or None.
    """
    layer, queries = keys.layer, query.shape[2]
    if reason is not None:
        raise _refused(reason)
    if values is not keys.added[1] or keys.is_written:
        raise _refused("values that the model changes after it has stored them, or reads twice")
    keys.is_written = True
    if not layer.total:
        layer.begin(mask, queries)
        layer.write(*keys.added)
        return None
    layer.check(mask, queries)
    written = layer.write(*keys.added)
    q = query.transpose(1, 2).flatten(0, 1)
    window = None if layer.window is None else (layer.window - 1, 0)
    options: dict[str, Any] = {"scale": scaling, "causal": "lower_right", "window": window}
    options["return_lse"] = sinks is not None
    if queries <= FEW_QUERIES:
        cache = (*layer.pages(), written.bounds, written.table, written.used)
        results: Any = ops.paged_attention(q, *cache, **layer.scales_of_pages(), **options)
    else:
        tokens = torch.arange(layer.capacity, device=q.device) < written.used[:, None]
        k, v = layer.unpacked(tokens, q.dtype)
        of_keys = torch.nn.functional.pad(written.used.cumsum(0), (1, 0))
        results = ops.varlen_attention(q, k, v, written.bounds, of_keys, **options)
    out: Tensor = results if sinks is None else packed_with_sinks(results[0], results[1], sinks)
    return out.view(query.shape[0], queries, *out.shape[1:])


def _refused(reason: str) -> InvalidInputError:
    return InvalidInputError(
        f'attention implementation "fusedops": got keys of a quantized or recorded cache with {reason}, expected '
        "causal attention with nothing but windows, sinks and padding on the left; to fix: use the cache that generate "
        "makes"
    )


def _unsupported(what: str, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"quantized_cache: got {what}, expected generate with one sequence for each prompt, as {reason}; to fix: use "
        "the cache that generate makes"
    )
