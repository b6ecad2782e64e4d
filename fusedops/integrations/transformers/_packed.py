"""quantize: packed weights for the linear layers and embeddings of a model."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Embedding, Linear, Module, Parameter

from fusedops import quantization
from fusedops._report.suggestion import unknown_name
from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations._applied import Applied, Row
from fusedops.nn import QuantizedEmbedding, QuantizedLinear
from fusedops.quantization import FORMATS

_NOTHING = "no module is a linear layer or an embedding whose rows are whole blocks"
_PACKED: dict[type[Module], type[Module]] = {Linear: QuantizedLinear, Embedding: QuantizedEmbedding}
_OPS: dict[type[Module], str] = {QuantizedLinear: "quantized_linear", QuantizedEmbedding: "dequantize"}


def quantize(model: Module, *, format: str = "Q8_0", skip: Iterable[str] = ()) -> Applied:
    """Pack the weights of a model's linear layers and embeddings.

    A layer becomes a :class:`fusedops.nn.QuantizedLinear` or :class:`fusedops.nn.QuantizedEmbedding`: its place, name,
    hooks and bias stay, and its ``weight`` is the packed one, of uint8. Tied weights stay one. Layers whose class has
    a forward of its own are left. One weight is packed after another, and the unpacked one is freed. ``apply`` may be
    called before or after.

    Args:
        model: a model of transformers, or any torch module, with its weights loaded.
        format: one of ``fusedops.quantization.FORMATS``.
        skip: patterns of the names of modules that are left, such as ``lm_head`` or ``*.q_proj``.

    Returns:
        the outcome for each class of modules. :meth:`Applied.remove` unpacks the weights again: the values are those of
        the packed weights, since the original ones are freed.

    Raises:
        InvalidInputError: an argument is not as above.

    Warns:
        FusedOpsWarning: no weight is packed.

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
    if format not in FORMATS:
        raise InvalidInputError(f"quantize: {unknown_name('format', format, tuple(FORMATS))}")
    if isinstance(skip, str):
        raise InvalidInputError(
            f"quantize: got skip = {skip!r}, expected a list of names; to fix: write skip=[{skip!r}]"
        )
    applied = Applied(
        type(model).__name__, _pack_all(model, format, tuple(skip)), lambda: unpack(model), nothing=_NOTHING
    )
    if not applied.ops:
        warnings.warn(f"quantize: {applied!r}", FusedOpsWarning, stacklevel=2)
    return applied


def _pack_all(model: Module, format: str, patterns: tuple[str, ...]) -> list[Row]:
    """Pack the weights of the layers that can be packed; return the outcomes."""
    modules: dict[str, Any] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
    layers = {name: each for name, each in modules.items() if isinstance(each, (Linear, Embedding))}
    reasons = {name: _reason_to_leave(name, each, format, patterns) for name, each in layers.items()}
    kept = _weights_of_others(model, [each for name, each in layers.items() if not reasons[name]])
    outcomes: Counter[tuple[str, str, str]] = Counter()
    tied: dict[int, list[Linear | Embedding]] = {}  # by the id of the weight: a reference would keep it
    for name, layer in layers.items():
        reason = reasons[name] or ("a module that is left has the same weight" if id(layer.weight) in kept else "")
        packed = _PACKED.get(type(layer), type(layer))
        outcomes[type(layer).__name__, "" if reason else _OPS[packed], reason] += 1
        if not reason and type(layer) not in _OPS:
            tied.setdefault(id(layer.weight), []).append(layer)
    for group in tied.values():
        weight = Parameter(quantization.quantize(group[0].weight, format), requires_grad=False)
        for layer in group:
            pack(layer, weight, format)
    return [Row(name, op, count, reason) for (name, op, reason), count in outcomes.items()]


def _reason_to_leave(name: str, layer: Linear | Embedding, format: str, patterns: tuple[str, ...]) -> str:
    """Return why a layer stays as it is; empty where it can be packed, or is packed."""
    if type(layer) in _OPS:
        return ""
    if any(fnmatchcase(name, pattern) for pattern in patterns):
        return "skip has its name"
    if type(layer) not in _PACKED:
        return "its class has a forward of its own"
    if isinstance(layer, Embedding) and layer.max_norm is not None:
        return "max_norm changes its weight"
    if type(layer.weight) is not Parameter or not layer.weight.is_floating_point() or layer.weight.dim() != 2:
        return "its weight is no plain parameter of floating numbers"
    if layer.weight.is_meta or not bool(layer.weight.detach().isfinite().all()):
        return "its weight is not loaded" if layer.weight.is_meta else "its weight has inf or NaN"
    columns, block = layer.weight.shape[1], FORMATS[format].weights
    return f"a row has {columns} weights, no multiple of {block}, the block of {format}" if columns % block else ""


def _weights_of_others(model: Module, chosen: list[Linear | Embedding]) -> set[int]:
    """Return the ids of a model's parameters besides the weights of the chosen layers."""
    weights = {id(module) for module in chosen}
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(module) not in weights or name != "weight"
    }


def pack(layer: Any, weight: Parameter, format: str) -> None:
    """Give a linear layer or an embedding a packed weight in place of its own, which may be on the meta device."""
    layer.weight_dtype = layer.weight.dtype
    layer.__class__ = _PACKED[type(layer)]
    layer.format = format
    layer.weight = weight


def unpack(model: Module) -> None:
    """Give every packed layer of a model its unpacked weight."""
    layers: list[Any] = [each for each in model.modules() if type(each) in _OPS]
    tied: dict[int, list[Any]] = {}
    for layer in layers:
        tied.setdefault(id(layer.weight), []).append(layer)
    for group in tied.values():
        weight = Parameter(group[0].dequantize())
        for layer in group:
            del layer.format, layer.weight_dtype
            layer.__class__ = next(plain for plain, packed in _PACKED.items() if packed is type(layer))
            layer.weight = weight
