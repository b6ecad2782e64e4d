"""The attention implementation of a model: fusedops', and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import BuiltinFunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from fusedops.integrations._replacement import own_body, own_class
from fusedops.integrations._trial.source import home_of
from fusedops.integrations._trial.twin import called, near, numbers, parameters_of, twin
from fusedops.integrations.transformers._attention.functions import (
    ATTENTION,
    SOFTMAX,
    attention_forward,
    softmax_forward,
)
from fusedops.integrations.transformers._attention.guards import Guards
from fusedops.integrations.transformers._attention.own_attention import (
    has_hooks,
    is_own,
    keywords_of,
    left_out,
    names_in,
    own_names,
)
from fusedops.integrations.transformers._attention.packed_mask import packed_or_boolean_mask

_BEFORE = "_fusedops_attention_before"
_OPS = {ATTENTION: "attention", SOFTMAX: "scaled_masked_softmax"}
_GUARDS = Guards(_OPS, ATTENTION)
_TOLERANCE = 1e-5
_ALWAYS = (
    "projection_attentions"  # of Kosmos-2 and 2.5: other weights are returned where output_attentions asks for them
)
_OF_ITS_OWN = "its attention does not go through transformers' AttentionInterface"
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")  # of the configs of transformers


def register_attention() -> None:
    """Register the attention implementations and, so that masks arrive, their mask function.

    What transformers refuses for an implementation that is not its own is served after ``apply``, see ``guards.py``.
    """
    masks: dict[str, Any] = {ATTENTION: packed_or_boolean_mask, SOFTMAX: masking_utils.sdpa_mask}
    for name, function in ((ATTENTION, attention_forward), (SOFTMAX, softmax_forward)):
        AttentionInterface.register(name, function)  # pyright: ignore[reportUnknownMemberType]
        AttentionMaskInterface.register(name, masks[name])  # pyright: ignore[reportUnknownMemberType]


def apply_attention(model: Module, chosen: set[str]) -> Counter[tuple[str, str, str, str, str]]:
    """Set the attention implementation of each model in a module. Return (class, op, reason if left, op) and counts."""
    outcomes: Counter[tuple[str, str, str, str, str]] = Counter()
    own = own_names(model.modules())
    for root in roots_of(model):
        towers = _towers(root)
        for tower in towers:
            outcomes[own_class(tower).__name__, "", _OF_ITS_OWN, "attention", ""] += 1
        inside = {module for tower in towers for module in tower.modules()}
        modules = [module for module in root.modules() if _calls_the_interface(module) and module not in inside]
        name = own_class(root).__name__
        if not (root._can_set_attn_implementation() and modules):
            if any("attention" in type(module).__name__.lower() for module in root.modules()):
                outcomes[name, "", _OF_ITS_OWN, "attention", ""] += 1
            continue
        implementation = _implementation(root, modules, own)
        current = root.config._attn_implementation
        for module in modules:
            kind = own_class(module).__name__
            if current in _OPS:
                outcomes.update(_outcomes(module, current))
            elif implementation not in _OPS:
                outcomes[kind, "", implementation, "attention", ""] += 1
            elif _OPS[implementation] not in chosen:
                outcomes[kind, "", f"ops has no {_OPS[implementation]}", _OPS[implementation], ""] += 1
            else:
                outcomes.update(_outcomes(module, implementation))
        if modules and current not in _OPS and implementation in _OPS and _OPS[implementation] in chosen:
            root.__dict__[_BEFORE] = [(config, config._attn_implementation) for config in _configs(root)]
            kept = [(tower.config, tower.config._attn_implementation) for tower in towers]
            root.set_attn_implementation(implementation)
            for config, before in kept:
                config._attn_implementation_internal = before  # as restore_attention
        if any(config._attn_implementation in _OPS for config in _configs(root)):
            _GUARDS.hold(root)
    return outcomes


def _outcomes(module: Any, implementation: str) -> list[tuple[str, str, str, str, str]]:
    """Return what computes the attention of a module: one outcome, or with dropout one for each mode."""
    kind, op = own_class(module).__name__, _OPS[implementation]
    dropouts = dropouts_of(getattr(module, "config", None)) if implementation == ATTENTION else {}
    if not dropouts:
        return [(kind, op, "", "", "")]
    (name, value), *_ = dropouts.items()
    return [(kind, op, "", "", "evaluation"), (kind, "", f"in training, for its {name} = {value:g}", op, "")]


def dropouts_of(config: Any) -> dict[str, float]:
    """Return the dropouts of attention weights that a config has, by name."""
    values = {name: getattr(config, name, None) or 0.0 for name in _DROPOUTS}
    return {name: value for name, value in values.items() if value > 0}


def attention_notes(model: Module) -> list[str]:
    """Return a sentence for each dropout of attention weights, which :func:`fusedops.attention` does not have."""
    dropouts = {
        each
        for root in roots_of(model)
        for config in _configs(root)
        if config._attn_implementation == ATTENTION
        for each in dropouts_of(config).items()
    }
    return [
        f"{name} = {value:g}: in training, attention is computed by scaled_masked_softmax between two matmuls, on a "
        f"GPU by torch's scaled_dot_product_attention; with {name} = 0, by attention"
        for name, value in sorted(dropouts)
    ]


def restore_attention(model: Module) -> None:
    """Give the models in a module the attention implementation that they had."""
    for root in filter(_is_model, model.modules()):  # an inner one may have been applied first
        for config, before in root.__dict__.pop(_BEFORE, ()):
            if config._attn_implementation in _OPS:  # else it was set since
                config._attn_implementation_internal = before  # not checked again: the model had it
        _GUARDS.release(root)


def roots_of(module: Any) -> Iterator[Any]:
    """Yield the outermost models of transformers in a module."""
    if _is_model(module):
        yield module
        return
    for child in module.children():
        yield from roots_of(child)


def _is_model(module: Any) -> bool:
    return hasattr(cast("Any", type(module)), "set_attn_implementation")


def _configs(root: Any) -> list[Any]:
    """Return the configs that the implementation of a model is kept in, each once."""
    found: dict[int, Any] = {}
    waiting = [module.config for module in root.modules() if _is_model(module)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


def _calls_the_interface(module: Module) -> bool:
    code = getattr(own_body(module), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _towers(root: Any) -> list[Any]:
    """Return the models in a model whose attention does not go through the interface, with a config of their own.

    transformers sets an implementation for them too, and masks would then be of the form that it takes.
    """
    models = [module for module in root.modules() if _is_model(module)]
    calling = {id(model.config) for model in models if any(map(_calls_the_interface, model.modules()))}
    others = {id(model.config): model for model in reversed(models) if id(model.config) not in calling}
    towers = [each for each in others.values() if any("Attention" in type(part).__name__ for part in each.modules())]
    return towers if calling else []


def _implementation(root: Any, modules: list[Module], own: set[str]) -> str:
    """Return the implementation for a model, or the reason why it keeps its own; ``own`` are names in user's code."""
    implementations = {config._attn_implementation for config in _configs(root)}
    others = implementations - {"sdpa", "eager", None, *_OPS}
    if others:
        return f"its implementation {sorted(others)[0]} was chosen for it"
    for name in ("eager", "sdpa"):
        other = _other_function(name, modules) if name in implementations else None
        if other is not None:
            return f"its implementation {name} calls {other}'s function"
    if "_attn_implementation" in own and implementations & own:
        return f"code of its own asks for its implementation {sorted(map(str, implementations & own))[0]}"
    caller = _own_caller(root, modules) if "eager" in implementations else None
    if caller is not None:
        return f'{caller} gets the probabilities of eager; to fix: set_attn_implementation("sdpa") before'
    if any(config.output_attentions for config in _configs(root)):
        return "its config has output_attentions"
    if "eager" in implementations and any(_ALWAYS in names_in(each) for each in {*map(type, root.modules())}):
        return f"it always returns {_ALWAYS}, which eager computes"
    reason = next(filter(None, map(left_out, modules if "sdpa" in implementations else ())), None)
    if reason is not None:
        return reason
    beyond = any(keywords_of(module) & {"softcap", "position_bias"} for module in modules)
    beyond = beyond or ("eager" in implementations and any(map(has_hooks, modules)))
    if not getattr(root, "_supports_sdpa", False) and not all(_agrees(module) for module in modules):
        return "it does not support transformers' sdpa, and its own attention does not compute the same"
    reason = None if getattr(root, "_supports_sdpa", False) else _reason_of_masks(root, modules)
    if reason is not None:
        return f"it does not support transformers' sdpa, and {reason}"
    return SOFTMAX if beyond else ATTENTION


def _other_function(name: str, modules: list[Module]) -> str | None:
    """Return whose function is called in an implementation, where it is not transformers' or torch's, or None."""
    used: list[Any] = [masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(name)]
    for module in modules:
        names = own_body(module).__globals__
        used.append(names["ALL_ATTENTION_FUNCTIONS"].get(name) or names.get("eager_attention_forward"))
    patched = torch.nn.functional.scaled_dot_product_attention
    others = [each for each in used if each is not None and not home_of(each).startswith("transformers.")]
    others += [patched] if name == "sdpa" and not isinstance(patched, BuiltinFunctionType) else []
    return home_of(others[0]) if others else None


def _own_caller(root: Any, modules: list[Module]) -> str | None:
    """Return the first class of the user's that attention returns to, up to the innermost model around it, or None."""
    for each in (each for each in root.modules() if is_own(own_body(each))):
        models = [model for model in each.modules() if model is not each and _is_model(model)]
        if not {*each.modules()}.difference(*(model.modules() for model in models)).isdisjoint(modules):
            return own_class(each).__name__
    return None


def _reason_of_masks(root: Any, modules: list[Module]) -> str | None:
    """Return why a model cannot take sdpa's masks: boolean ones, or none where is_causal of the module is enough."""
    for module in root.modules():
        kind, inside = own_class(module), {*module.modules()}
        takes = [parameter.name for parameter in parameters_of(kind.forward) or ()]
        if "attention" in kind.__name__.lower() and "attention_mask" in takes and inside.isdisjoint(modules):
            return f"{kind.__name__} reads the masks itself"
    bodies = (getattr(own_body(module), "__code__", None) for module in root.modules())
    masks = any(code is not None and "create_causal_mask" in code.co_names for code in bodies)
    if masks and not any(getattr(module, "is_causal", True) for module in modules):
        return "none of its causal attention has is_causal = True"
    return None


def _agrees(module: Module) -> bool:
    """Return True where the attention function of a module's file computes what "fusedops_softmax" computes."""
    own: Any = own_body(module).__globals__.get("eager_attention_forward")
    if own is None:
        return False
    sinks = numbers(4, 4)
    parameters: dict[str, Tensor] = {name: sinks for name, _ in module.named_parameters(recurse=False)}
    same = twin(module, parameters)
    same.num_key_value_groups = 2
    heads = 2 if hasattr(module, "num_key_value_groups") else 4
    query, key, value = (numbers(seed, 2, each, 5, 8) for seed, each in ((1, 4), (2, heads), (3, heads)))
    mask = torch.full((1, 1, 5, 5), -1e30, dtype=torch.float32, device="cpu").triu(1)
    options: dict[str, Any] = {"softcap": 1.5} if "softcap" in keywords_of(module) else {}
    if "s_aux" in keywords_of(module):
        options["s_aux"] = sinks if parameters else None  # MiMo-V2-Flash has them in some layers
    if "position_bias" in keywords_of(module):
        options["position_bias"] = numbers(5, 1, 4, 5, 5)
    results = called(own, same, query, key, value, mask, scaling=0.3, dropout=0.0, **options)
    expected = called(softmax_forward, same, query, key, value, mask, scaling=0.3, **options)
    return isinstance(results, tuple) and near(cast("Any", results)[0], expected[0], _TOLERANCE)
