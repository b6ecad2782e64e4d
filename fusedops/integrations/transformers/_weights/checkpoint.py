"""from_packed: a model of a checkpoint of the Hub whose linear layers keep the packed weights of the files."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from fusedops.errors import InvalidInputError
from fusedops.integrations.transformers._modules.experts import WholeExperts, recognised_whole_experts
from fusedops.integrations.transformers._weights.checkpoint_experts import Mixture, MixturePlan, planned_mixture
from fusedops.integrations.transformers._weights.layouts import (
    LAYOUTS,
    OTHER,
    Layer,
    Plan,
    Stored,
    invalid,
    is_coded,
    planned,
)
from fusedops.integrations.transformers._weights.packed import packed_model
from fusedops.nn import QuantizedLinear

_NAME = "fusedops"  # of the quantizer, in the tables of transformers
_DTYPES = {
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F64": "float64",
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
#: Options of from_pretrained that are set here, or by which tensors are other ones than in the files.
_OWN = (
    "quantization_config", "device_map", "torch_dtype", "config", "use_safetensors", "output_loading_info",
    "state_dict", "gguf_file", "key_mapping", "tp_plan", "distributed_config",
)  # fmt: skip


def from_packed(
    path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32, auto_class: Any = None, **options: Any
) -> Any:
    """Load a model of transformers from a packed checkpoint of the Hub; its linear layers keep the packed weights.

    A packed layer becomes a :class:`fusedops.nn.QuantizedLinear`, on any device, with gradients of its input; norms,
    embeddings and layers that the checkpoint has unpacked are loaded by transformers. No weight is unpacked: the memory
    is that of the files and one layer. By the ``quant_method`` of the checkpoint:

    - "fp8": blocks of 128 * 128 (``weight_block_size``), whole weights or rows; "fbgemm_fp8": rows.
    - "compressed-tensors": "float-quantized" as of "fp8", "pack-quantized" of 4 bits, symmetric or not,
      "nvfp4-pack-quantized", "mxfp4-pack-quantized".
    - "gptq", "awq": 4 bits, ``checkpoint_format`` "gptq" or "gptq_v2", ``version`` "gemm". Codes are turned to rows.
    - "bitsandbytes": "nf4"; doubly quantized scales are unpacked.

    The activation is exact: scales that a checkpoint has for it (``input_scale``) are not read.

    Experts that :func:`apply` would replace keep their packed weights too: those of gpt-oss ("mxfp4"), and those of the
    formats above with a tensor for each expert. Their gate and up need blocks of whole rows, and one global scale.

    Args:
        path: of a folder, or the name of a repository of the Hub, with files of safetensors.
        dtype: of the other parameters; the packed weights are exact in any.
        auto_class: the class that makes the model from its config, such as ``transformers.AutoModel``. None:
            ``transformers.AutoModelForCausalLM``.
        **options: of ``from_pretrained``, such as ``revision``, ``token`` or ``attn_implementation``.

    Returns:
        the model, on the CPU, in evaluation mode.

    Raises:
        InvalidInputError: the checkpoint is not packed, or not as above; a tensor is missing, or contradicts its layer:
            another shape or dtype, columns in another order. Nothing is loaded before all layers are checked.
        OSError: by transformers: there is no such folder or repository.

    Source: transformers, ``quantizers``; compressed-tensors; bitsandbytes, ``QuantState``.

    >>> from fusedops.integrations.transformers import from_packed
    >>> from_packed("folder", device_map="cuda")
    Traceback (most recent call last):
    fusedops.errors.InvalidInputError: from_packed: got device_map, expected options ...; to fix: leave it out, ...
    """
    for name in _OWN:
        if name in options:
            raise invalid(name, "options of from_pretrained beside those that it sets",
                          "leave it out, and call model.to(device), or pass dtype=")  # fmt: skip
    transformers: Any = importlib.import_module("transformers")
    path = os.fspath(path)
    of_config = {name: value for name, value in options.items() if name != "attn_implementation"}
    config = transformers.AutoConfig.from_pretrained(path, **of_config)
    packed = _taken(config)
    if packed is None:
        raise invalid("a config without a quantization_config", "that of a packed checkpoint",
                      "load it by from_pretrained, and pack it by quantize")  # fmt: skip
    _check_method(packed)
    _register()
    config.quantization_config = {"quant_method": _NAME, "checkpoint": packed}
    kind = auto_class or transformers.AutoModelForCausalLM
    with torch.device("cpu"):  # whatever the default device
        model, info = kind.from_pretrained(
            path, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    if info["missing_keys"]:
        raise invalid(f"a checkpoint without {', '.join(sorted(info['missing_keys'])[:3])}",
                      f"every parameter of {type(model).__name__}")  # fmt: skip
    packed_model(model, model.modules())
    return model.train(False)


def _taken(config: Any) -> dict[str, Any] | None:
    """Take the quantization_config of a config, or of the text model in it, away."""
    found: Any = None
    for each in (config.get_text_config(decoder=True), config):
        own: Any = getattr(each, "quantization_config", None)
        if own is not None:
            found = own
            del each.quantization_config
    return found.to_dict() if hasattr(found, "to_dict") else found


def _check_method(packed: dict[str, Any]) -> None:
    method: Any = packed.get("quant_method")
    if packed.get("load_in_8bit"):
        method = "bitsandbytes of 8 bits"
    if method not in LAYOUTS:
        raise invalid(f"quant_method = {method!r}", f"one of {', '.join(map(repr, LAYOUTS))}",
                      OTHER)  # fmt: skip
    for name in ("transform_config", "sparsity_config"):
        values: dict[str, Any] = packed.get(name) or {}
        if values.get("config_groups") or values.get("format", "dense") != "dense":
            raise invalid(f"a quantization_config with {name}", "weights that stand for themselves",
                          OTHER)  # fmt: skip


@cache
def _register() -> None:
    """Register the quantizer that puts packed layers in a model: transformers loads all else around them."""
    auto: Any = importlib.import_module("transformers.quantizers.auto")
    base: Any = importlib.import_module("transformers.quantizers.base").HfQuantizer
    config: Any = importlib.import_module("transformers.utils.quantization_config").QuantizationConfigMixin

    @auto.register_quantization_config(_NAME)
    class PackedConfig(config):  # pyright: ignore[reportUnusedClass]
        dequantize = True  # its name for a model that is not quantized after loading, for Trainer and PEFT

        def __init__(self, checkpoint: dict[str, Any], **_: Any) -> None:
            super().__init__(_NAME)
            self.checkpoint = checkpoint

    @auto.register_quantizer(_NAME)
    class PackedQuantizer(base):  # pyright: ignore[reportUnusedClass]
        is_trainable = True

        def is_serializable(self) -> bool:
            return False

        def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
            self.dtype = dtype
            return dtype

        def _process_model_before_weight_loading(self, model: Any, checkpoint_files: list[str], **_: Any) -> None:
            checkpoint: dict[str, Any] = self.quantization_config.checkpoint  # pyright: ignore
            with torch.device("cpu"):  # the model is on the meta device, values of the files are not
                self.plans, self.mixtures, unread = _plans(model, checkpoint_files, checkpoint)
            for name in self.plans:
                model.set_submodule(name, _Place({"bias": model.get_submodule(name).bias}))
            for name, plan in self.mixtures.items():
                own_parameters = plan.mixture.module._parameters
                weights = plan.mixture.whole.weights
                biases = {each: value for each, value in own_parameters.items() if each not in weights}
                model.set_submodule(name, _Place(biases))
            own: Any = model._keys_to_ignore_on_load_unexpected
            self.ignored = own
            model._keys_to_ignore_on_load_unexpected = {*(own or ()), f"^({'|'.join(map(re.escape, unread))})$"}

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            model._keys_to_ignore_on_load_unexpected = self.ignored
            for name, plan in self.plans.items():
                bias = model.get_submodule(name).bias
                model.set_submodule(name, _loaded(plan, bias, self.dtype))
            for name, plan in self.mixtures.items():
                biases: dict[str, Any] = model.get_submodule(name)._parameters
                model.set_submodule(name, plan.load(biases, self.dtype))
            return model


class _Place(Module):
    """The place of a packed layer, or of packed experts, while transformers loads the rest, with their biases."""

    def __init__(self, biases: dict[str, Any]) -> None:
        super().__init__()
        for name, bias in biases.items():
            self.register_parameter(name, bias)


def _loaded(plan: Plan, bias: Parameter | None, dtype: torch.dtype) -> QuantizedLinear:
    """Return a layer with the tensors of the files."""
    stored = plan.layer.stored.get("bias")
    if bias is None and stored is not None:  # which some write for each layer, of zeros
        value = stored.read()
        bias = Parameter(value.to(dtype)) if bool(value.any()) else None
    return QuantizedLinear.of_packed(plan.load(), bias, dtype=dtype)


def _plans(
    model: Any, files: list[str], checkpoint: dict[str, Any]
) -> tuple[dict[str, Plan], dict[str, MixturePlan], list[str]]:
    """Return the plans of the packed layers and experts, and the names of tensors that transformers does not load."""
    modules: dict[str, Module] = dict(model.named_modules())
    names = _renamed(model, files)
    layers: dict[str, Layer] = {}
    others: list[tuple[str, Stored]] = []
    keys: dict[str, list[str]] = {}
    mixtures: dict[str, Mixture] = {}
    for name, stored in names:
        path, leaf = _place_of(name, modules, model.base_model_prefix)
        module: Any = modules.get(path)
        if type(module) is Linear:
            layer = layers.setdefault(path, Layer(path, (module.out_features, module.in_features), {}, checkpoint))
            layer.stored[leaf] = stored
            keys.setdefault(path, []).append(name)
        elif "experts" in path and (mixture := _mixture(path, module, mixtures)) is not None:
            if leaf not in mixture.whole.biases:
                mixture.stored[stored.key] = stored
                keys.setdefault(path, []).append(name)
        elif is_coded(stored.dtype):
            others.append((name, stored))
    _check_others(model, others)
    plans = {path: plan for path, layer in layers.items() if (plan := planned(layer, checkpoint["quant_method"]))}
    packed = {path: planned_mixture(each, checkpoint) for path, each in mixtures.items() if each.is_packed}
    if not plans and not packed:
        raise invalid(f"files without a packed layer of quant_method {checkpoint['quant_method']!r}",
                      f"packed linear layers of {type(model).__name__}")  # fmt: skip
    tied: dict[str, str] = model.all_tied_weights_keys
    for name in (*tied.keys(), *tied.values()):
        path = name.removesuffix(".weight")
        if path in plans:
            raise invalid(
                f"{plans[path].layer.key(plans[path].parts['codes'])}, packed, of a weight that the config ties",
                "a weight of its own", "set tie_word_embeddings to false in its config.json",
            )  # fmt: skip
    biased = {path for path in plans if dict(modules[path].named_parameters()).get("bias") is not None}
    unread = [name for path in plans for name in keys[path] if path not in biased or not name.endswith(".bias")]
    return plans, packed, [*unread, *(name for path in packed for name in keys[path])]


def _mixture(path: str, module: Any, known: dict[str, Mixture]) -> Mixture | None:
    """Return the experts of a path, or None for another module."""
    if path not in known:
        whole = recognised_whole_experts(module)
        if not isinstance(whole, WholeExperts):
            return None
        known[path] = Mixture(path, module, whole, {})
    return known[path]


def _renamed(model: Any, files: list[str]) -> list[tuple[str, Stored]]:
    """Return the tensors of the files by the names that transformers has for them."""
    loading: Any = importlib.import_module("transformers.core_model_loading")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    safetensors: Any = importlib.import_module("safetensors")
    conversions = mapping.get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
    found: list[tuple[str, Stored]] = []
    for path in files:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            for key in file.keys():  # noqa: SIM118
                part = file.get_slice(key)
                dtype = getattr(torch, _DTYPES.get(part.get_dtype(), ""), None)
                if dtype is None:
                    raise invalid(f"{key} of {part.get_dtype()}", f"one of {', '.join(_DTYPES)}")
                name, _ = loading.rename_source_key(key, renamings, converters)
                found.append((name, Stored(key, tuple(part.get_shape()), dtype, partial(_read, path, key))))
    return found


def _read(path: str, key: str) -> Tensor:
    """Return a tensor of a file, which has memory of its own: the file is mapped for this one alone."""
    safetensors: Any = importlib.import_module("safetensors")
    with safetensors.safe_open(path, framework="pt", device="cpu") as file:
        return file.get_tensor(key).clone()


def _place_of(name: str, modules: dict[str, Module], prefix: str) -> tuple[str, str]:
    """Return the module that a tensor is of, the deepest one that its name begins with, and the rest of the name."""
    first: tuple[str, str] | None = None
    for each in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        path = each
        while path and path not in modules:
            path = path.rpartition(".")[0]
        split = path, each[len(path) + 1 :] if path else each
        if type(modules.get(path)) is Linear:
            return split
        first = first or split
    assert first is not None
    return first


def _check_others(model: Any, others: Iterable[tuple[str, Stored]]) -> None:
    """Raise for codes that are of no linear layer, and that the model does not ignore."""
    own: Any = model.state_dict()
    ignored: Any = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]
    for name, stored in others:
        if any(each.search(name) for each in ignored):
            continue
        if name in own and not own[name].is_floating_point():  # a buffer of integers
            continue
        if "experts" in stored.key:
            raise _of_experts(stored.key)
        raise invalid(f"{stored.key} of {str(stored.dtype).removeprefix('torch.')}, which is of no linear layer",
                      f"packed linear layers of {type(model).__name__}",
                      OTHER)  # fmt: skip


def _of_experts(key: str) -> InvalidInputError:
    return invalid(f"{key}, packed experts", "experts that apply replaces as a whole, with a tensor for each expert",
                   OTHER)  # fmt: skip
