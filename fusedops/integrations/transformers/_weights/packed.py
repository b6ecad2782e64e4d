"""quantize: packed weights for the linear layers and embeddings of a model."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.nn import Embedding, Linear, Module, Parameter

from fusedops import quantization
from fusedops._report.suggestion import unknown_name
from fusedops._report.threads import log_spinning_threads
from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations._applied import Applied, Row
from fusedops.integrations._modules.linear import Dense
from fusedops.integrations._replacement import own_class, replacement_of, restore
from fusedops.integrations.transformers._modules.experts import WholeExperts, experts_of
from fusedops.integrations.transformers._weights.packed_experts import (
    FORMATS_OF_EXPERTS,
    PackedExperts,
    pack_experts,
    reason_to_leave,
    replace_adapters,
    unpack_experts,
)
from fusedops.nn import QuantizedEmbedding, QuantizedLinear
from fusedops.nn._packed_weight import UNPACK
from fusedops.nn._quantized import KEYS, packed_value, weight_state
from fusedops.ops.quantized.int8_linear import MOST_TERMS
from fusedops.quantization import INT8, SCALED, block_of

_NOTHING = "found no linear layer or embedding whose rows are whole blocks"
_PACKED: dict[type[Module], type[Module]] = {Linear: QuantizedLinear, Embedding: QuantizedEmbedding}
_OPS: dict[type[Module], str] = {QuantizedLinear: "quantized_linear", QuantizedEmbedding: "dequantize"}


def _op_of(packed: type[Module], format: str) -> str:
    """Return the op of a packed layer."""
    return "int8_linear" if packed is QuantizedLinear and format == INT8 else _OPS[packed]


def quantize(model: Module, *, format: str = "Q8_0", skip: Iterable[str] = (), experts: bool | str = False) -> Applied:
    """Pack the weights of a model's linear layers and embeddings, and of the experts of its mixtures if asked.

    A layer becomes a :class:`fusedops.nn.QuantizedLinear` or :class:`fusedops.nn.QuantizedEmbedding`: its place, name,
    hooks and bias stay, and the packed weight is its parameter ``packed_<format>``, of uint8, such as ``packed_Q8_0``;
    scales that are a tensor of their own are a buffer, such as ``packed_MXFP4_scales``.
    Its ``weight`` can be read, and is unpacked for each use of its numbers; a write to it is an error. Tied weights
    stay one: a layer of a part of a model is left where the rest has its weight. Layers whose class has a forward of
    its own are left. One weight is packed after another, and the unpacked one is freed. ``apply`` may be called before
    or after.

    ``load_state_dict`` takes the state dict of a model that is packed in the same format. ``save_pretrained`` raises:
    ``from_pretrained`` cannot read packed weights. To write one, such as by ``resize_token_embeddings``, unpack first.

    Args:
        model: a model of transformers, or any torch module, with its weights loaded.
        format: one of ``fusedops.quantization.FORMATS``; one of the Hub by row, "MXFP4", "NVFP4", "FP8_BLOCK",
            "FP8_ROW", "FP8_TENSOR", "FP4_GROUP32", "INT4_GROUP", "NF4"; or "INT8", of which the linear layers round
            their input to 8 bits too.
        skip: patterns of the names of modules that are left, such as ``lm_head`` or ``*.q_proj``.
        experts: True to pack the experts of mixtures in ``format`` too, whose stacked weights
            :func:`fusedops.experts` then reads packed; or a format of their own, such as "MXFP4". Their packed weights
            are ``gate_up_proj_packed_<format>`` and the like.

    Returns:
        the outcome for each class of modules. :meth:`Applied.remove` unpacks the weights again: the values are those of
        the packed weights, since the original ones are freed.

    Raises:
        InvalidInputError: an argument is not as above.

    Warns:
        FusedOpsWarning: no weight is packed, or ``skip`` has a pattern of no layer.

    >>> import transformers
    >>> from fusedops.integrations.transformers import quantize
    >>> sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 64}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, intermediate_size=80, pad_token_id=0))
    >>> quantize(model, format="Q4_0", skip=["lm_head"])
    fusedops in LlamaForCausalLM: 1 dequantize, 12 quantized_linear
      module     op                count  left, because
      Embedding  dequantize        1
      Linear     quantized_linear  12
      Linear     -                 2      a row has 80 weights, no multiple of 32, the block of Q4_0
      Linear     -                 1      skip has its name
    """
    if format not in KEYS:
        raise InvalidInputError(f"quantize: {unknown_name('format', format, tuple(KEYS))}")
    of_experts = format if experts is True else experts or ""
    if of_experts and of_experts not in FORMATS_OF_EXPERTS:
        raise InvalidInputError(f"quantize: {unknown_name('experts', of_experts, FORMATS_OF_EXPERTS)}")
    if isinstance(skip, str):
        raise InvalidInputError(
            f"quantize: got skip = {skip!r}, expected a list of names; to fix: write skip=[{skip!r}]"
        )
    patterns = tuple(skip)
    modules: dict[str, Any] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    mixtures: dict[str, Any] = {name: experts_of(each) for name, each in modules.items()} if of_experts else {}
    mixtures = {name: each for name, each in mixtures.items() if isinstance(each, (WholeExperts, PackedExperts, str))}
    names = [name for name, each in modules.items() if name in mixtures or isinstance(each, (Linear, Embedding))]
    for pattern in patterns:
        if not matching(names, pattern):
            near = [each for each in (f"*{pattern}", f"{pattern}.*") if matching(names, each)]
            fix = f"write {near[0]!r}" if near else "see model.named_modules()"
            text = f"quantize: got skip = {pattern!r}, expected the name of a linear layer or embedding; to fix: {fix}"
            warnings.warn(text, FusedOpsWarning, stacklevel=2)
    whole = _whole(model)
    rows = [*_pack_all(model, whole, format, patterns), *_pack_experts(modules, mixtures, of_experts, patterns)]
    applied = Applied(type(model).__name__, rows, lambda: unpack(model), nothing=_NOTHING)
    if applied.ops:
        packed_model(model, whole)
    else:
        warnings.warn(f"quantize: {applied!r}", FusedOpsWarning, stacklevel=2)
    return applied


@torch.inference_mode(False)  # gradients pass through the layers later
def _pack_all(model: Module, whole: list[Any], format: str, patterns: tuple[str, ...]) -> list[Row]:
    """Pack the weights of the layers that can be packed; return the outcomes."""
    modules: dict[str, Any] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    layers = {name: each for name, each in modules.items() if isinstance(each, (Linear, Embedding))}
    reasons = {name: _reason_to_leave(name, each, format, patterns) for name, each in layers.items()}
    kept = _weights_of_others(whole, [each for name, each in layers.items() if not reasons[name]])
    outcomes: Counter[tuple[str, str, str]] = Counter()
    tied: dict[int, list[Linear | Embedding]] = {}  # by the id of the weight: a reference would keep it
    for name, layer in layers.items():
        reason = reasons[name]
        if type(layer) in _OPS:
            before = "" if layer.format == format else f"it is packed in {layer.format}"
            outcomes[type(layer).__name__, _op_of(type(layer), str(layer.format)), before] += 1
            continue
        if not reason and id(layer.weight) in kept:
            reason = "a module that is left has the same weight"
        outcomes[type(layer).__name__, "" if reason else _op_of(_PACKED[_class_of(layer)], format), reason] += 1
        if not reason:
            tied.setdefault(id(layer.weight), []).append(layer)
    for group in tied.values():
        parts: dict[str, torch.Tensor] = {}
        if format in SCALED:
            parts = packed_value(group[0].weight, format).tensors()
        codes = parts.pop("codes") if parts else quantization.quantize(group[0].weight, format)
        weight = Parameter(codes, requires_grad=False)
        for layer in group:
            pack(layer, weight, format, parts)
    return [Row(name, op, count, reason) for (name, op, reason), count in outcomes.items()]


def _pack_experts(
    modules: dict[str, Any],
    mixtures: dict[str, WholeExperts | PackedExperts | str],
    format: str,
    patterns: tuple[str, ...],
) -> list[Row]:
    """Pack the experts that can be packed; return the outcomes."""
    outcomes: Counter[tuple[str, str, str]] = Counter()
    for name, found in mixtures.items():
        kind, reason = own_class(modules[name]).__name__, found if isinstance(found, str) else ""
        if isinstance(found, PackedExperts):
            outcomes[kind, found.op, "" if found.format == format else f"it is packed in {found.format}"] += 1
            continue
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            reason = "skip has its name"
        elif isinstance(found, WholeExperts):
            reason = reason_to_leave(modules[name], found, format)
            if not reason:
                pack_experts(modules[name], found, format)
        outcomes[kind, "" if reason else "quantized_experts", reason] += 1
    replace_adapters(modules.values())
    return [Row(name, op, count, reason) for (name, op, reason), count in outcomes.items()]


def _reason_to_leave(name: str, layer: Linear | Embedding, format: str, patterns: tuple[str, ...]) -> str:
    """Return why a layer stays as it is; empty where it can be packed, or is packed."""
    if type(layer) in _OPS:
        return ""
    if any(fnmatchcase(name, pattern) for pattern in patterns):
        return "skip has its name"
    if any(part.startswith("lora_") for part in name.split(".")):
        return "it is an adapter of PEFT"
    if _class_of(layer) not in _PACKED:
        return "its class has a forward of its own"
    if isinstance(layer, Embedding) and layer.max_norm is not None:
        return "max_norm changes its weight"
    if type(layer.weight) is not Parameter or not layer.weight.is_floating_point() or layer.weight.dim() != 2:
        return "its weight is no plain parameter of floating numbers"
    hooked: Any = layer.weight
    if hooked._backward_hooks or hooked._post_accumulate_grad_hooks:
        return "its weight has hooks of its gradient"
    if layer.weight.is_meta:
        return "its weight is not loaded"
    columns, block = layer.weight.shape[1], block_of(format)
    if columns % block:
        return f"a row has {columns} weights, no multiple of {block}, the block of {format}"
    if format == INT8 and isinstance(layer, Linear) and columns > MOST_TERMS:
        return f"a row has {columns} weights, more than the {MOST_TERMS} products of INT8 whose sum is exact"
    beyond = quantization.beyond_range(layer.weight, format)
    return f"its weight has {beyond}" if beyond else ""


def _class_of(layer: Linear | Embedding) -> type[Module]:
    """Return the class of a layer, also where ``apply`` has replaced its forward."""
    return own_class(layer) if isinstance(replacement_of(layer), Dense) else type(layer)


def _whole(model: Module) -> list[Any]:
    """Return the modules of a model and of those that it is a part of, to which it has no reference."""
    parents: dict[int, list[Any]] = {}
    for each in gc.get_objects():
        if issubclass(type(each), Module):  # not isinstance, which runs code of lazy objects
            own = cast("dict[str, dict[str, Any]]", vars(each))
            for child in list(own.get("_modules", {}).values()):  # a list: another thread may be making the module
                parents.setdefault(id(child), []).append(each)
    found: dict[int, Any] = {}
    rest: list[Any] = [model]
    while rest:
        module = rest.pop()
        if id(module) not in found:
            found[id(module)] = module
            rest += [*module.children(), *parents.get(id(module), [])]
    return list(found.values())


def _weights_of_others(whole: list[Any], chosen: list[Linear | Embedding]) -> set[int]:
    """Return the ids of parameters besides the weights of the chosen layers."""
    weights = {id(module) for module in chosen}
    return {
        id(parameter)
        for module in whole
        for name, parameter in module._parameters.items()
        if id(module) not in weights or name != "weight"
    }


def pack(layer: Any, packed: Parameter, format: str, parts: Mapping[str, torch.Tensor] = MappingProxyType({})) -> None:
    """Give a linear layer or an embedding a packed weight in place of its own, which may be on the meta device.

    parts: what is beside the codes, by the names of a ``Packed``.
    """
    if _class_of(layer) is not type(layer):
        restore(layer)
    layer.weight_dtype, layer.weight_state = layer.weight.dtype, weight_state(layer.weight)
    _exchange(layer, "weight", KEYS[format], packed)
    for name, part in parts.items():
        layer.register_buffer(f"{KEYS[format]}_{name}", part)
    layer.format = format
    layer.__class__ = _PACKED[type(layer)]


def _exchange(layer: Any, old: str, new: str, parameter: Parameter) -> None:
    """Put a parameter in the place of another one, of another name."""
    own: dict[str, Any] = layer._parameters
    parameters = {new if name == old else name: parameter if name == old else each for name, each in own.items()}
    own.clear()
    own.update(parameters)


def _named_layers(model: Module, remove_duplicate: bool = True) -> list[tuple[str, Any]]:
    """Return the packed layers of a model by their names."""
    named: Iterable[tuple[str, Any]] = cast("Any", model).named_modules(remove_duplicate=remove_duplicate)
    return [(name, each) for name, each in named if type(each) in _OPS]


def _layers(model: Module) -> list[Any]:
    """Return the packed layers of a model."""
    return [each for _, each in _named_layers(model)]


def _is_packed(model: Module) -> bool:
    """Return True for a model with a packed layer, or packed experts."""
    return bool(_layers(model)) or any(isinstance(replacement_of(each), PackedExperts) for each in model.modules())


class _Method:
    """A method of one model with packed weights. It holds the model weakly: an attribute must not keep it."""

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    def __reduce__(self) -> Any:
        return type(self), (self._model(),)  # a copy of the model holds the copy


class _SavePretrained(_Method):
    """The ``save_pretrained`` of a model with packed weights, which ``from_pretrained`` could not read."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Save the adapter of a model that has one; raise for another model."""
        model: Any = self._model()  # None: of from_gguf(path).save_pretrained(folder)
        if model is None or (not getattr(model, "_hf_peft_config_loaded", False) and _is_packed(model)):
            raise InvalidInputError(
                f"save_pretrained: got a model with packed weights, which from_pretrained cannot read, expected "
                f"unpacked weights; to fix: torch.save(model.state_dict(), path), which loads after quantize with the "
                f"same format; or {UNPACK}"
            )
        kind = cast("Any", type(model))
        return kind.save_pretrained(model, *args, **kwargs)


class _GetSubmodule(_Method):
    """The ``get_submodule`` of a model, which takes the name of packed bytes for that of their layer.

    PEFT finds the embedding by the name of a parameter with a row for each token, without its ``.weight``.
    """

    def __call__(self, target: str) -> Any:
        model: Any = self._model()
        if model is None:
            raise InvalidInputError("get_submodule: got a model that is freed, expected one; to fix: keep the model")
        path, _, leaf = target.rpartition(".")
        kind = cast("Any", type(model))
        return kind.get_submodule(model, path if leaf in KEYS.values() else target)


_METHODS: dict[str, type[_Method]] = {"save_pretrained": _SavePretrained, "get_submodule": _GetSubmodule}


def packed_model(model: Module, whole: Iterable[Module]) -> None:
    """Finish a model whose weights are packed: a save that could not be read is refused, and slow threads are named."""
    _declare(whole)
    for name, layer in _named_layers(model):
        layer.name_gradient(name)
    if next(model.parameters()).is_cpu:
        log_spinning_threads()  # each token waits for them at each layer


def _declare(modules: Iterable[Any]) -> None:
    """Let models of transformers refuse a save and name their ties, as their layers are now."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    for model in modules:
        if modeling is not None and isinstance(model, modeling.PreTrainedModel):
            packed = _is_packed(model)
            for name, method in _METHODS.items():
                if packed:
                    setattr(model, name, method(model))
                elif isinstance(vars(model).get(name), method):
                    delattr(model, name)
            _name_ties(model)


def _name_ties(model: Any) -> None:
    """Name tied weights as they are named now: PEFT finds them by the names that a model declares."""
    declared: Any = model._tied_weights_keys
    if not isinstance(declared, dict):
        return
    layers = dict(_named_layers(model, remove_duplicate=False))
    ties = dict(_tie(target, source, layers) for target, source in cast("dict[str, str]", declared).items())
    if ties == type(model)._tied_weights_keys:
        vars(model).pop("_tied_weights_keys", None)
    elif ties != declared:
        model._tied_weights_keys = ties


def _tie(target: str, source: str, layers: dict[str, Any]) -> tuple[str, str]:
    """Return the names of two tied parameters; only weights change theirs."""
    (path, dot, leaf), (other, _, leaf_of_other) = target.rpartition("."), source.rpartition(".")
    if not {leaf, leaf_of_other} <= {"weight", *KEYS.values()}:
        return target, source
    key, layer, tied = "weight", layers.get(path), layers.get(other)
    if layer is not None and tied is not None and layer.packed is tied.packed:
        key = KEYS[layer.format]
    return f"{path}{dot}{key}", f"{other}.{key}"


@torch.inference_mode(False)  # the weights may be trained
def unpack(model: Module) -> None:
    """Give every packed layer of a model its unpacked weight."""
    whole, packed = _whole(model), {id(each.packed) for each in _layers(model)}
    # PEFT freezes every weight below an adapter, also those that it does not adapt
    adapted = {id(each) for top in whole if getattr(top, "peft_config", None) for each in top.modules()}
    tied: dict[int, list[Any]] = {}
    for layer in whole:
        if type(layer) in _OPS and id(layer.packed) in packed:
            tied.setdefault(id(layer.packed), []).append(layer)
    for group in tied.values():
        weight = Parameter(group[0].dequantize())
        for name, value in group[0].weight_state.items():
            setattr(weight, name, value)
        if any(id(layer) in adapted for layer in group):
            weight.requires_grad = False
        for layer in group:
            for name in layer.parts:
                del layer._buffers[f"{KEYS[layer.format]}_{name}"]
            _exchange(layer, KEYS[layer.format], "weight", weight)
            layer.__class__ = next(plain for plain, packed in _PACKED.items() if packed is type(layer))
            for name in ("format", "weight_dtype", "weight_state", "full_name"):
                vars(layer).pop(name, None)
    unpack_experts(model.modules())
    replace_adapters(model.modules())
    _declare(whole)
