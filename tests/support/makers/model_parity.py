"""The log probabilities of a family's model in two ways: plain and applied, padded and packed, and others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from model_family import Family, encoder_inputs, narrowed
from torch import Tensor

from fusedops.integrations.transformers import apply
from fusedops.testing import ModelComparison, compare_models

WAYS = ("applied", "applied, bfloat16", "packed", "decode", "bfloat16")
CACHES = ("cache_params", "past_key_values")  # the names by which models return and take one
PREFILL = 3  # tokens
SAME = 1e-6  # what a plain model may give for packed sequences; a state that goes on into the next one gives 2e-5


def has_tokens(family: Family) -> bool:
    """Return True where a model gives the log probability of each token of its input."""
    inputs = family.inputs()
    return (family.generates or "MaskedLM" in family.model) and "pixel_values" not in inputs


@torch.no_grad()
def parity(family: Family) -> dict[str, ModelComparison | None]:
    """Compare the models of a family in each of the ``WAYS``; None where it has no such way.

    - applied: with fusedops, from the plain model; in float32, and both in bfloat16.
    - packed: with fusedops, sequences in one row with their positions, from a batch padded on the right. None where the
      plain model does not keep sequences apart by their positions.
    - decode: with fusedops, one token after another behind a prompt of ``PREFILL``, from all at once. None where the
      model returns no cache.
    - bfloat16: with fusedops, from float32.
    """
    plain, fused, narrow, narrow_fused = (family.build() for _ in range(4))
    narrowed(narrow), narrowed(narrow_fused)
    apply(fused), apply(narrow_fused)
    inputs = family.inputs()
    others: Mapping[str, Tensor] = {}
    if "decoder_input_ids" in inputs:
        others = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
        inputs = {"input_ids": inputs["decoder_input_ids"]}
    at_once = partial(_at_once, others)
    ids = {"input_ids": inputs["input_ids"].clamp(min=1)}  # no token that a model may take for padding
    found = {
        "applied": compare_models(plain, fused, [inputs], run=at_once),
        "applied, bfloat16": compare_models(narrow, narrow_fused, [inputs], run=at_once),
        "packed": None,
        "decode": None,
        "bfloat16": compare_models(fused, narrow_fused, [inputs], run=at_once),
    }
    if family.generates and _cache(_called(fused, others, **ids)):
        found["decode"] = compare_models(fused, fused, [ids], run=(at_once, partial(_steps, others)))
    if family.generates and not others and "position_ids" in inspect.signature(plain.forward).parameters:
        padded, ways = [encoder_inputs()], (at_once, _packed)
        if compare_models(plain, plain, padded, run=ways).largest <= SAME:
            found["packed"] = compare_models(fused, fused, padded, run=ways)
    return {way: found[way] for way in WAYS}


def _called(model: Any, others: Mapping[str, Tensor], **inputs: Any) -> Any:
    dtype = next(model.parameters()).dtype
    given = {name: each.to(dtype) if each.is_floating_point() else each for name, each in others.items()}
    if others:
        inputs["decoder_input_ids"] = inputs.pop("input_ids")
    return model(**given, **inputs)


def _cache(output: Any) -> dict[str, Any]:
    return {name: output[name] for name in CACHES if output.get(name) is not None}


def _at_once(others: Mapping[str, Tensor], model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return _called(model, others, **batch).logits


def _steps(others: Mapping[str, Tensor], model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    cache: dict[str, Any] = {}
    parts: list[Tensor] = []
    for step in (ids[:, :PREFILL], *ids[:, PREFILL:].split(1, dim=1)):
        output = _called(model, others, input_ids=step, **cache)
        cache = _cache(output)
        parts.append(output.logits)
    return torch.cat(parts, 1)


def _packed(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"].bool()
    positions = batch["attention_mask"].cumsum(1) - 1
    logits = model(input_ids=batch["input_ids"][mask][None], position_ids=positions[mask][None], use_cache=False).logits
    whole = logits.new_zeros(*mask.shape, logits.shape[-1])
    whole[mask] = logits[0]
    return whole
