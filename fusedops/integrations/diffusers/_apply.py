"""apply: the replacement of what a model of diffusers computes by ops."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from reprlib import repr as shortened
from typing import Any, cast

from torch.nn import GroupNorm, Module, SiLU

from fusedops._report.suggestion import unknown_name
from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations._applied import Applied, Row
from fusedops.integrations._applying import Outcome, Recogniser, forward_applied, is_large, outcomes_of, recognised_by
from fusedops.integrations._modules.activations import recognised_activation
from fusedops.integrations._modules.gated import recognised_gated
from fusedops.integrations._modules.linear import recognised_linear, served_linear
from fusedops.integrations._modules.norms import Norm, recognised_norm
from fusedops.integrations._modules.projection import recognised_projection
from fusedops.integrations._not_looked_at import sentences_of
from fusedops.integrations._replacement import Replacement, own_class, replacement_of, restore
from fusedops.integrations._trial.twin import is_replaced_elsewhere, key_of
from fusedops.integrations.diffusers._forwards.conditions import is_reached
from fusedops.integrations.diffusers._forwards.patterns import Site
from fusedops.integrations.diffusers._forwards.replacement import Changed, Rewritten, changed_function
from fusedops.integrations.diffusers._gguf import recognised_gguf
from fusedops.integrations.diffusers._group_norm import recognised_group_norm
from fusedops.integrations.diffusers._processors import apply_processors, restore_processors

_NOTHING = "found no norm, gated MLP, attention or rotary embedding that it supports"
_IN_FORWARDS = (
    "attention",
    "rotary_embedding",
    "modulated_norm",
    "gated_add",
    "gated_add_modulated_norm",
    "group_norm",
)
_OPS = ("rms_norm", "layer_norm", "swiglu", "geglu", "bias_gelu", "quantized_linear", *_IN_FORWARDS, "linear")


def apply(model: Any, *, ops: Iterable[str] | None = None) -> Applied:
    """Replace what a model of diffusers computes by ops: norms, adaptive norms, gated residuals, group norms with SiLU,
    gated MLPs, rotary embeddings, attention, linear layers of a GGUF file.

    Norms, MLPs and rotary functions are recognised by their results on small random numbers. What a forward writes out
    is replaced in a copy of it, and computed as it was where an op does not take the call: under autocast or
    torch.compile, with hooks, or with other shapes and dtypes. Parameters, names, hooks and state dicts stay as they
    are. A second call changes nothing more.

    Args:
        model: a model of diffusers, a pipeline, whose models are replaced but for its text encoders, or any torch
            module.
        ops: the names of the ops to use; None: all of them. What modulates a norm needs the op of the norm too.

    Returns:
        the outcome for each class of modules and processors, and :meth:`Applied.remove`.

    Raises:
        InvalidInputError: ``model`` is neither, or ``ops`` has a name that apply does not use.

    Warns:
        FusedOpsWarning: nothing is recognised; the model is left as it was.

    Source: diffusers, ``AdaLayerNormZero``, ``FeedForward`` and ``dispatch_attention_fn``.

    >>> from diffusers.models.attention import FeedForward
    >>> from fusedops.integrations.diffusers import apply
    >>> apply(FeedForward(8, activation_fn="geglu"))
    fusedops in FeedForward: 1 geglu
      module  op     count  left, because
      GEGLU   geglu  1
    """
    models = _models(model)
    chosen = _chosen(ops)
    known: dict[Any, Any] = {}  # of this call: what a module's code computes may change after it
    outcomes = Counter[Outcome]()
    for each in models:
        outcomes.update(_applied(each, chosen, known, has_linear=ops is not None))
    rows = [Row(name, op, count, left, family, when) for (name, op, left, family, when), count in outcomes.items()]
    unseen = [sentence for each in models for sentence in sentences_of(each, rows)]
    measure = (models[0], lambda: apply(model, ops=ops)) if len(models) == 1 else None

    def remove() -> None:
        for each in models:
            _remove(each)

    name = type(getattr(model, "_orig_mod", model)).__name__
    applied = Applied(name, rows, remove, nothing=_NOTHING, notes=lambda: unseen, measure=measure)
    if not applied.ops:
        warnings.warn(f"apply: {applied!r}", FusedOpsWarning, stacklevel=2)
    return applied


def _models(model: Any) -> list[Module]:
    """Return the modules of diffusers in a pipeline, or the module that is given."""
    if isinstance(model, Module):
        return [model]
    components = getattr(model, "components", None)
    if isinstance(components, dict):
        values = cast("dict[str, Any]", components).values()
        found = [each for each in values if isinstance(each, Module) and not _is_of_transformers(each)]
        if found:
            return found
    raise InvalidInputError(
        f"apply: got model = {shortened(model)}, expected a model or a pipeline of diffusers; to fix: load it first, "
        "as in DiffusionPipeline.from_pretrained(...)"
    )


def _is_of_transformers(module: Module) -> bool:
    """Return True for a text encoder, which fusedops.integrations.transformers recognises."""
    return any(each.__module__.startswith("transformers.") for each in type(module).__mro__)


def _chosen(ops: Iterable[str] | None) -> frozenset[str]:
    if isinstance(ops, str):
        raise InvalidInputError(f"apply: got ops = {ops!r}, expected a list of names; to fix: write ops=[{ops!r}]")
    chosen = frozenset(_OPS if ops is None else ops)
    for name in sorted(map(str, chosen.difference(_OPS))):
        raise InvalidInputError(f"apply: {unknown_name('op in ops', name, _OPS)}")
    return chosen


def _applied(model: Module, chosen: frozenset[str], known: dict[Any, Any], has_linear: bool) -> Iterator[Outcome]:
    recognisers: dict[str, Recogniser] = {
        "quantized_linear": recognised_gguf,
        "group_norm": recognised_group_norm,
        "norm": recognised_norm,
        "geglu": recognised_projection,
        "gated MLP": recognised_gated,
        "bias_gelu": recognised_activation,
    }
    if "linear" in chosen:
        recognisers["linear"] = recognised_linear if has_linear else served_linear
    shared: dict[Replacement, Replacement] = known.setdefault("shared", {})
    inside = set[Module]()
    modules = list(model.modules())
    for module in modules:
        already = replacement_of(module)
        if already is not None:
            yield from outcomes_of(own_class(module).__name__, already)
        elif module not in inside and not is_large(module):
            key = "module", key_of(module)
            if key not in known:
                known[key] = recognised_by(module, recognisers)
            family, recognised = known[key]
            yield from forward_applied(module, set(chosen), family, recognised, shared)
        replacement = replacement_of(module)
        if replacement is not None and replacement.has_activation:
            inside.update(module.children())
    for module in modules:  # after the norms, by which it is seen what a forward modulates
        if replacement_of(module) is None and not is_replaced_elsewhere(module):
            yield from _forward_changed(module, chosen, known, shared, is_root=module is model)
    yield from apply_processors(model, chosen, known.setdefault("processors", {}))


def _forward_changed(
    module: Module, chosen: frozenset[str], known: dict[Any, Any], shared: dict[Any, Any], is_root: bool
) -> list[Outcome]:
    """Change the forward of a module where it computes what an op does; return the outcomes."""
    cls = own_class(module)
    key = "forward", cls
    if key not in known:
        known[key] = changed_function(cls.forward, chosen)
    made: Changed | str | None = known[key]
    if not isinstance(made, Changed):
        return []
    called, left = list[str](), list(made.left)
    for site in made.sites:
        reason = _reason_of(site, module)
        if reason:
            left.append((site.op, reason))
        elif reason is None:
            called.append(site.op)
    if not called and not is_root:
        return [(cls.__name__, "", reason, op, "") for op, reason in dict.fromkeys(left)]
    ops, reasons = tuple(dict.fromkeys(called)), tuple(dict.fromkeys(left))
    replacement = Rewritten(
        original=cls, chosen=chosen, called=ops, left=reasons, is_root=is_root, function=made.function
    )
    return forward_applied(module, set(chosen), "", replacement, shared)


def _reason_of(site: Site, module: Module) -> str | None:
    """Return why a module has no op at a place of its forward; empty where its config has no such place."""
    if not is_reached(module, site.conditions):
        return ""
    if site.op == "group_norm":
        outer, inner = (_attribute(module, path) for path in site.path)
        return None if type(outer) is SiLU and isinstance(inner, Module) and own_class(inner) is GroupNorm else ""
    if "norm" not in site.op:
        return None
    norm = _attribute(module, site.path[0])
    if not isinstance(norm, Module) or own_class(norm) is GroupNorm:
        return ""
    found = replacement_of(norm)
    return None if isinstance(found, Norm) else f"{site.path[0]} is no norm that an op computes"


def _attribute(module: Module, path: str) -> Any:
    value: Any = module
    for name in path.split(".")[1:]:
        value = getattr(value, name, None)
    return value


def _remove(model: Module) -> None:
    for module in model.modules():
        restore(module)
    restore_processors(model)
