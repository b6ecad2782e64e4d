"""The packed experts of a checkpoint: a tensor for each weight of each expert, or, as gpt-oss has them, for all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from fusedops.integrations._replacement import replace
from fusedops.integrations.transformers._modules.experts import WholeExperts
from fusedops.integrations.transformers._weights.layouts import (
    OTHER,
    Layer,
    Plan,
    Stored,
    invalid,
    is_coded,
    planned,
)
from fusedops.integrations.transformers._weights.packed_experts import PackedExperts, hold
from fusedops.quantization import Packed, check_parts

_EACH = re.compile(r"experts\.(\d+)\.(\w+)\.(.+)$")  # the number of an expert, its layer, the rest
_NAMES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_BLOCK = 128  # rows of a scale


class Mixture(NamedTuple):
    """The experts of a model, and the tensors of the checkpoint that are theirs, by their names there."""

    path: str
    module: Any
    whole: WholeExperts
    stored: dict[str, Stored]

    @property
    def is_packed(self) -> bool:
        """True where one of the tensors has codes."""
        return any(is_coded(each.dtype) for each in self.stored.values())


class MixturePlan(NamedTuple):
    """Packed experts that are to be loaded.

    Attributes:
        mixture: the experts.
        weights: for each of both weights, of each expert the layers that are one after another in it; of one that is
            stored whole, its codes and scales.
    """

    mixture: Mixture
    weights: tuple[list[list[Plan]] | tuple[Stored, Stored], ...]

    def load(self, biases: Mapping[str, Any], dtype: torch.dtype) -> Module:
        """Read the tensors, and return the experts with them."""
        module, whole = self.mixture.module, self.mixture.whole
        formats: list[str] = []
        for name, plans in zip(whole.weights, self.weights):
            packed = _whole(plans, shape_of(self.mixture, name)) if isinstance(plans, tuple) else _stacked(plans)
            module._parameters.pop(name, None)
            hold(module, name, packed)
            formats.append(packed.format)
        module._parameters.update(biases)
        if formats[0] != formats[1]:
            raise invalid(f"experts of {formats[0]} and {formats[1]} in {self.mixture.path}", "one format", OTHER)
        replace(module, PackedExperts(whole, False, formats[0], dtype, (True, True)))
        return module


def shape_of(mixture: Mixture, name: str) -> tuple[int, ...]:
    """Return (E, outputs, columns) of a weight of the model."""
    shape = tuple(getattr(mixture.module, name).shape)
    return (shape[0], shape[2], shape[1]) if mixture.whole.transposed else shape


def planned_mixture(mixture: Mixture, config: Mapping[str, Any]) -> MixturePlan:
    """Return the plan of packed experts.

    Raises:
        InvalidInputError: a tensor is missing, is of no format of the checkpoint, or contradicts the others.
    """
    up, down = mixture.whole.weights
    if config["quant_method"] == "mxfp4":
        return MixturePlan(mixture, (_stored(mixture, up), _stored(mixture, down)))
    if mixture.whole.activation.interleaved:
        raise invalid(f"{mixture.path}, whose gate and up alternate", "experts with gate, then up", OTHER)
    layers: dict[tuple[int, str], dict[str, Stored]] = {}
    for key, stored in mixture.stored.items():
        found = _EACH.search(key)
        if found is None or found[2] not in _NAMES:
            raise invalid(f"{key}, packed experts", "a tensor for each expert", OTHER)
        layers.setdefault((int(found[1]), _NAMES[found[2]]), {})[found[3]] = stored
    names = ("gate", "up") if mixture.whole.activation.gated else ("up",)
    return MixturePlan(
        mixture,
        (
            [_of_expert(mixture, layers, e, names, up, config) for e in range(shape_of(mixture, up)[0])],
            [_of_expert(mixture, layers, e, ("down",), down, config) for e in range(shape_of(mixture, up)[0])],
        ),
    )


def _stored(mixture: Mixture, name: str) -> tuple[Stored, Stored]:
    """Return the codes and scales of a weight that is stored whole."""
    parts: list[Stored] = []
    for leaf in ("blocks", "scales"):
        found = next((each for key, each in mixture.stored.items() if key.endswith(f".{name}_{leaf}")), None)
        if found is None:
            raise invalid(f"a checkpoint without {mixture.path}.{name}_{leaf}", "the codes and scales of MXFP4")
        parts.append(found)
    given = [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in parts]
    keys = {"codes": parts[0].key, "scales": parts[1].key}
    check_parts("from_packed", "MXFP4", shape_of(mixture, name), dict(zip(keys, given)), keys)
    return parts[0], parts[1]


def _of_expert(
    mixture: Mixture,
    layers: Mapping[tuple[int, str], dict[str, Stored]],
    expert: int,
    names: tuple[str, ...],
    weight: str,
    config: Mapping[str, Any],
) -> list[Plan]:
    """Return the plans of the layers that are one after another in a weight of an expert."""
    _, outputs, columns = shape_of(mixture, weight)
    rows, plans = outputs // len(names), list[Plan]()
    for name in names:
        full = f"{mixture.path}.{expert}.{name}"
        layer = Layer(full, (rows, columns), layers.get((expert, name), {}), config)
        plan = planned(layer, config["quant_method"])
        if plan is None:
            raise invalid(f"{full} that is not packed, or missing", "the codes of each expert")
        if len(names) > 1 and plan.format == "FP8_BLOCK" and rows % _BLOCK:
            raise invalid(f"{layer.key('weight')} of {rows} rows", f"a multiple of {_BLOCK} beside another", OTHER)
        plans.append(plan)
    leaf = plans[0].parts.get("global_scale", "")
    scales = [each.layer.stored[leaf] for each in plans if leaf in each.layer.stored]
    numbers = [each.read().item() for each in scales if len(scales) > 1]
    if len(set(numbers)) > 1:
        named = " and ".join(f"{each.key} = {number:g}" for each, number in zip(scales, numbers))
        raise invalid(named, "one global scale of gate and up, which are one weight", OTHER)
    return plans


def _whole(parts: tuple[Stored, Stored], shape: tuple[int, ...]) -> Packed:
    return Packed("MXFP4", parts[0].read(), parts[1].read(), shape=shape)


def _stacked(experts: list[list[Plan]]) -> Packed:
    """Read the layers of all experts into one weight, (E, outputs, columns)."""
    result: dict[str, Tensor] = {}
    format, shape = "", (0, 0)
    for e, plans in enumerate(experts):
        packed = [each.load() for each in plans]
        one, shape = packed[0].format, (sum(each.shape[0] for each in packed), packed[0].shape[1])
        for part, tensors in _parts(packed):
            joined = torch.cat(tensors)
            if not e:
                result[part] = joined.new_empty((len(experts), *joined.shape))
            if part not in result or one != (format or one) or result[part].shape[1:] != joined.shape:
                raise invalid(f"{plans[0].layer.name} of another format or group", "experts that are alike", OTHER)
            result[part][e] = joined
        format = one
    if format == "FP8_TENSOR":  # of which gate and up have one scale each
        format = "FP8_ROW"
    if "global_scale" in result:
        result["global_scale"] = result["global_scale"][:, 0]
    return Packed(format, **result, shape=(len(experts), *shape))


def _parts(packed: list[Packed]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the parts of layers that are one after another, each with as many rows as the weight, or as its blocks."""
    for part in packed[0].tensors():
        tensors = [each.tensors().get(part) for each in packed]
        given = [each for each in tensors if each is not None]
        if len(given) < len(packed):
            raise invalid(f"experts of {packed[0].format} of which some have no {part}", "layers that are alike", OTHER)
        if part == "global_scale":
            given = [given[0].reshape(1)]  # of both, as planned
        elif part == "scales" and packed[0].format == "FP8_TENSOR":
            given = [each.reshape(1, 1).expand(of.shape[0], 1) for each, of in zip(given, packed)]
        yield part, given
