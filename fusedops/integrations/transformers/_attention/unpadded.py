"""Encoders on packed sentences: the tokens of a padded batch run as one row, and the results are padded again.

So heads, pooling and the caller's code get what they got before. What a model computes for padding is 0 in its results.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Module

from fusedops._policy.use import use
from fusedops._torch import dispatch_modes, is_traced
from fusedops.integrations._replacement import Replacement, own_class
from fusedops.integrations._trial.twin import Raised, called, is_replaced_elsewhere, near, parameters_of
from fusedops.integrations.transformers._attention.functions import ATTENTION
from fusedops.integrations.transformers._attention.implementation import dropouts_of
from fusedops.integrations.transformers._attention.packed_mask import PackedMask, Sequences

Rows = Literal["any", "independent"]
PROMISED = torch.float32, "cpu"  # where a sentence has the same bits in any batch
_TOKENS = {"input_ids", "attention_mask", "token_type_ids"}
_FLAGS = {"return_dict", "output_hidden_states", "output_attentions", "use_cache"}
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}  # of a trial; another position gives more than 0.25
_signature = lru_cache(maxsize=64)(inspect.signature)  # by function: each call of a model asks for it


class _Batch(NamedTuple):
    """A padded batch: (B, S) token ids and what goes with each token, the lengths (B,), the options of the call."""

    tokens: dict[str, Tensor]
    lengths: Tensor
    options: dict[str, Any]


@dataclass(frozen=True)
class OfRows(Replacement):
    """A module whose own forward, and all that it calls, runs with a policy for rows; "any" changes nothing.

    Another dtype or device than those of the promise runs without: it may have no kernel with independent rows.
    """

    rows: Rows
    op: str = "linear"
    runs_own_code = True

    @property
    def ops(self) -> tuple[str, ...]:
        """Return no names: the modules inside have rows of their own in the table."""
        return ()

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        floats = (each for each in module.parameters() if each.is_floating_point())
        if self.rows == "any" or any((each.dtype, each.device.type) != PROMISED for each in islice(floats, 1)):
            return self.run(module, *args, **kwargs)
        with use(rows=self.rows):
            return self.run(module, *args, **kwargs)

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        return own_class(module).forward(module, *args, **kwargs)


@dataclass(frozen=True)
class Unpadded(OfRows):
    """A model whose own forward runs on the packed tokens of a batch.

    ``padding`` is the id whose tokens are not counted in positions, which then begin at ``padding + 1``, as in RoBERTa;
    None where positions are columns. Another call than one of token ids that are padded on the right, one that asks for
    the probabilities, and training with dropout in attention run as before.
    """

    padding: int | None = None
    op: str = "varlen_attention"

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the op that computes the attention."""
        return (self.op,)

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on packed tokens, or where that is not possible as it is called."""
        batch = None if is_traced() or dispatch_modes() else _batch(module, args, kwargs)
        if batch is None or (self.rows == "any" and bool((batch.lengths == batch.tokens["input_ids"].shape[1]).all())):
            return super().run(module, *args, **kwargs)
        results, _ = packed(module, batch, self.padding)
        as_dict = batch.options.get("return_dict", module.config.return_dict)
        return results if as_dict else results.to_tuple()


def _batch(module: Any, args: Any, kwargs: Any) -> _Batch | None:
    """Return the padded batch of a call, or None for a call that is not of this kind."""
    bound = _signature(own_class(module).forward).bind(module, *args, **kwargs)
    given: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        given |= value if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    given = {name: value for name, value in given.items() if value is not None}
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    config = module.config
    if config._attn_implementation != ATTENTION:  # it was set since; transformers' eager attention adds a boolean mask
        return None
    if not given.keys() <= _TOKENS | _FLAGS or given.get("output_attentions", config.output_attentions):
        return None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or (module.training and dropouts_of(config)):
        return None
    mask = torch.ones_like(ids) if mask is None else mask
    tokens = {name: value for name, value in given.items() if name in _TOKENS and name != "attention_mask"}
    if any(not isinstance(value, Tensor) or value.shape != ids.shape for value in (mask, *tokens.values())):
        return None
    seen = mask.bool()
    if not seen.any() or bool((seen[:, 1:] & ~seen[:, :-1]).any()):  # padded on the left, with holes, or all of it
        return None
    return _Batch(tokens, seen.sum(1), {name: value for name, value in given.items() if name in _FLAGS})


def packed(module: Any, batch: _Batch, padding: int | None) -> tuple[Any, PackedMask]:
    """Return a model's results for a padded batch, computed from its tokens alone, and the mask that it got."""
    ids = batch.tokens["input_ids"]
    column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    indices = (column < batch.lengths[:, None]).flatten().nonzero().flatten()
    bounds = torch.nn.functional.pad(batch.lengths.cumsum(0), (1, 0))
    count = len(indices)

    def make() -> Tensor:
        sentence = torch.div(indices, max(ids.shape[1], 1), rounding_mode="floor")
        return (sentence[:, None] == sentence)[None, None]

    mask = PackedMask(Sequences(bounds, causal=False), (1, 1, count, count), make)
    tokens = {name: value.flatten()[indices][None] for name, value in batch.tokens.items()}
    positions = column
    if padding is not None:
        counted = ids != padding
        positions = counted.cumsum(1) * counted + padding
    positions = positions.flatten()[indices][None]
    options = {**batch.options, "return_dict": True}
    results = own_class(module).forward(module, **tokens, attention_mask=mask, position_ids=positions, **options)

    def padded(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(padded, cast("tuple[Any, ...]", value)))
        if not isinstance(value, Tensor) or value.dim() < 3 or value.shape[:2] != (1, count):
            return value
        empty = value.new_zeros(ids.numel(), *value.shape[2:])
        return empty.index_copy(0, indices, value[0]).view(*ids.shape, *value.shape[2:])

    for name, value in list(results.items()):
        results[name] = padded(value)
    if results.get("pooler_output") is not None:  # of the first token of each sentence
        results["pooler_output"] = module.pooler(results["last_hidden_state"])
    return results, mask


@contextmanager
def in_evaluation(model: Module) -> Generator[None]:
    """Let the modules of a model run in evaluation, without train(), which a class may have for itself."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def recognised_unpadded(root: Any, rows: Rows) -> tuple[Module, Unpadded] | str:
    """Return the module of a model that runs on packed tokens, with its replacement; or why the model is left.

    It runs on a few tokens, with its weights, padded and packed; see :func:`in_evaluation`.
    """
    if root.config._attn_implementation != ATTENTION:
        return "its attention is not computed by fusedops.attention"
    reason = "its forward has no input_ids, attention_mask and position_ids, or another library has replaced it"
    for module in dict.fromkeys((root, root.base_model)):
        names = {each.name for each in parameters_of(own_class(module).forward) or ()}
        if not {"input_ids", "attention_mask", "position_ids"} <= names or is_replaced_elsewhere(module):
            continue
        reason = "it does not have the results of padded sentences for packed ones"
        for padding in (None, module.config.pad_token_id or 0):
            if _agrees(module, padding):
                return module, Unpadded(rows, padding=padding)
    return reason


def _agrees(module: Any, padding: int | None) -> bool:
    """Return True where a model has the same results for three sentences packed and padded, without a boolean mask."""
    config, device = module.config, next(module.parameters()).device
    longest = 2 * (getattr(config, "sliding_window", None) or 4)
    lengths = torch.tensor([3, longest, 5], device=device)
    ids = (torch.arange(3 * longest, device=device) * 7 % max(config.vocab_size - 4, 1) + 3).view(3, longest)
    ids = ids + (ids == config.pad_token_id)
    ids[1, 1] = config.pad_token_id or 0  # positions may follow from it, also where a sentence has it
    seen = torch.arange(longest, device=device) < lengths[:, None]
    expected = called(own_class(module).forward, module, input_ids=ids, attention_mask=seen.long(), return_dict=True)
    results = called(packed, module, _Batch({"input_ids": ids}, lengths, {}), padding)
    if isinstance(expected, Raised) or isinstance(results, Raised):
        return False
    found, mask = results

    def is_near(got: Any, want: Any) -> bool:
        if not isinstance(want, Tensor) or not isinstance(got, Tensor):
            return False
        if got.shape == want.shape and want.shape[:2] == seen.shape:
            got, want = got[seen], want[seen]
        return near(got, want, _TOLERANCES.get(want.dtype, 0.25))

    return (
        mask.is_unread and found.keys() == expected.keys() and all(is_near(found[key], expected[key]) for key in found)
    )


class Pooled(OfRows):
    """A module of sentence-transformers that pools tokens: it gets them packed.

    Its own sums over packed tokens are in order; those over padded ones depend on how many there are.
    """

    def run(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        features, *_ = args
        tokens, others = features["token_embeddings"], {"cu_seq_lens_q", "token_weights_sum"}
        is_padded = "attention_mask" in features and tokens.shape[:2] == features["attention_mask"].shape
        if not is_padded or not others.isdisjoint(features) or is_traced() or dispatch_modes():
            return super().run(module, *args, **kwargs)
        mask = features["attention_mask"]
        bounds = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        alone = {**features, "token_embeddings": tokens[mask.bool()][None], "cu_seq_lens_q": bounds}
        results = super().run(module, alone, **kwargs)
        del results["cu_seq_lens_q"]
        features.update(results, token_embeddings=tokens)
        return features
