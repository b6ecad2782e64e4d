"""apply: the replacement of what a model computes by ops."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from reprlib import repr as shortened
from typing import Any

from torch.nn import Linear, Module

from fusedops._report.suggestion import unknown_name
from fusedops.errors import FusedOpsWarning, InvalidInputError
from fusedops.integrations._applied import Applied, Row
from fusedops.integrations._applying import Outcome, Recogniser, forward_applied, is_large, outcomes_of, recognised_by
from fusedops.integrations._modules.activated import recognised_activated
from fusedops.integrations._modules.activations import recognised_activation
from fusedops.integrations._modules.gated import recognised_gated
from fusedops.integrations._modules.linear import recognised_linear, served_linear
from fusedops.integrations._modules.norms import recognised_norm
from fusedops.integrations._not_looked_at import sentences_of
from fusedops.integrations._replacement import Replacement, own_class, replacement_of, restore
from fusedops.integrations._trial.twin import key_of
from fusedops.integrations.transformers._attention.implementation import (
    apply_attention,
    attention_notes,
    restore_attention,
)
from fusedops.integrations.transformers._loss.head import has_fused_loss, heads_of, recognised_head
from fusedops.integrations.transformers._loss.losses import loss_of, recognised_loss, replace_loss, restore_loss
from fusedops.integrations.transformers._loss.trl import LOG_PROBS, replaced_forwards, restore_head, serve_head
from fusedops.integrations.transformers._mixers.recognition import recognised_mixer
from fusedops.integrations.transformers._modules.expert_adapters import recognised_adapter
from fusedops.integrations.transformers._modules.experts import recognised_experts
from fusedops.integrations.transformers._modules.gated_norms import recognised_gated_norm
from fusedops.integrations.transformers._modules.indexers import recognised_indexer
from fusedops.integrations.transformers._rotary.layouts import layouts_of
from fusedops.integrations.transformers._rotary.modules import recognised_rotary
from fusedops.integrations.transformers._routers.recognition import recognised_router

_NOTHING = "found no norm, gated MLP, GELU, rotary embedding or loss that it supports"
_OPS = (
    "rms_norm",
    "layer_norm",
    "gated_rms_norm",
    "swiglu",
    "geglu",
    "bias_gelu",
    "experts",
    "top_k_routing",
    "rotary_embedding",
    "select_keys",
    "causal_conv1d",
    "linear_attention",
    "cross_entropy",
    "linear_log_probs",
    "attention",
    "scaled_masked_softmax",
    "linear",
)
_FUSED_LOSS = "linear_cross_entropy"  # by fused_loss=True, or by its name
_LINEAR = "linear"


def apply(model: Module, *, ops: Iterable[str] | None = None, fused_loss: bool = False) -> Applied:
    """Replace what a model computes by ops: norms, gated MLPs, GELU, experts and their routers, rotary embeddings,
    attention, the short convolution and the recurrence of hybrid models, the loss; linear layers of float32 on a CPU,
    and the activation behind them, where the kernel is faster than torch's.

    A module is recognised by its results: its own forward runs on small random numbers, on the CPU, and an op replaces
    it only where the op computes the same. So the weights are not read: they may be on a meta device, sharded or
    quantized. Parameters, names, hooks and state dicts stay as they are. A second call changes nothing more.

    Args:
        model: a model of transformers, or any torch module. It may be wrapped, compiled or sharded, before or after.
        ops: the names of the ops to use; None: all of them. With the name "linear", the table has the layers that it
            leaves too.
        fused_loss: a training step computes the loss by ``linear_cross_entropy`` and never makes the logits of all
            tokens. ``outputs.logits`` is then made on its first use, with a FusedOpsWarning: a step that uses it saves
            nothing. Under torch.compile the logits are made, with a FusedOpsWarning.

    Returns:
        the outcome for each class of modules, and :meth:`Applied.remove`.

    Raises:
        InvalidInputError: ``model`` is no module, or ``ops`` has a name that apply does not use.

    Warns:
        FusedOpsWarning: nothing is recognised; the model is left as it was.

    >>> import transformers
    >>> from fusedops.integrations.transformers import apply
    >>> config = transformers.OPTConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
    >>> apply(transformers.OPTModel(config))
    fusedops in OPTModel: 5 layer_norm, 2 attention
      module        op          count  left, because
      LayerNorm     layer_norm  5
      OPTAttention  attention   2
    """
    if not isinstance(model, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        shown = shortened(model)
        raise InvalidInputError(
            f"apply: got model = {shown}, expected a torch.nn.Module; to fix: load it first, as in "
            f"AutoModelForCausalLM.from_pretrained(...)"
        )
    chosen = _chosen(ops, fused_loss)
    all_heads = heads_of(model)
    heads = all_heads if chosen & {_FUSED_LOSS, _LINEAR} else {}
    outcomes, losses = Counter[Any](), Counter[Any]()  # of Outcome; losses also of None, for modules without one
    layouts = layouts_of(model.modules())
    recognisers: dict[str, Recogniser] = {
        "gated norm": recognised_gated_norm,
        "norm": recognised_norm,
        "gated MLP": recognised_gated,
        "adapter of experts": lambda module: recognised_adapter(module) if "experts" in chosen else None,
        "experts": lambda module: recognised_experts(module, whole="experts" in chosen),
        "linear_attention": recognised_mixer,
        "select_keys": lambda module: recognised_indexer(module, lambda each: recognised_rotary(each, layouts)),
        "rotary_embedding": lambda module: recognised_rotary(module, layouts),
        "top_k_routing": recognised_router,
        "bias_gelu": lambda module: None if module in inside else recognised_activation(module),
    }
    if _LINEAR in chosen:
        recognisers[_LINEAR] = recognised_linear if ops is not None else served_linear
    inside = set[Module]()  # activations that a replaced module does not call
    shared: dict[Replacement, Replacement] = {}
    known: dict[Any, Any] = {}  # the layers of a model are alike

    def recognise(module: Module) -> tuple[str, Replacement | str | None]:
        if module in heads:  # which a second call may give the fused loss
            return (_FUSED_LOSS, recognised_head(module, heads[module])) if _FUSED_LOSS in chosen else ("", None)
        if is_large(module):
            return recognised_by(module, recognisers)
        key = key_of(module), module in inside
        if key not in known:
            known[key] = recognised_by(module, recognisers)
        return known[key]

    def activated(module: Module) -> Replacement | None:
        if not any(own_class(child) is Linear for child in module.children()) or is_large(module):
            return None
        key = key_of(module), _LINEAR
        if key not in known:
            known[key] = recognised_activated(module)
        return known[key]

    for module in model.modules():
        already = replacement_of(module)
        if already is not None:
            outcomes.update(outcomes_of(own_class(module).__name__, already))
        else:
            recognised = recognise(module)
            outcomes.update(forward_applied(module, chosen, *recognised, shared))
            if _LINEAR in chosen and replacement_of(module) is None and module not in heads:
                outcomes.update(forward_applied(module, chosen, _LINEAR, activated(module), shared))
        replacement = replacement_of(module)
        if replacement is not None and replacement.has_activation:
            inside.update(module.children())
    for module in model.modules():  # after the heads
        losses[_loss_applied(module, chosen)] += 1
    del losses[None]
    outcomes = losses + outcomes
    if LOG_PROBS in chosen:
        for head in all_heads:
            left = serve_head(head)
            if left is not None:
                outcome = ("", left, LOG_PROBS, "") if left else (LOG_PROBS, "", "", "in trl")
                outcomes[(type(head).__name__, *outcome)] += 1
    outcomes += apply_attention(model, chosen)
    rows = [Row(name, op, count, left, family, when) for (name, op, left, family, when), count in outcomes.items()]
    about_attention, unseen = attention_notes(model), sentences_of(model, rows)

    no_head = [] if heads or _FUSED_LOSS not in chosen else [f"{_FUSED_LOSS}: the model has no output embedding"]

    def notes() -> list[str]:
        return [*about_attention, *replaced_forwards(model), *no_head, *unseen]

    measure = model, lambda: apply(model, ops=chosen)
    applied = Applied(_name(model), rows, lambda: _remove(model), nothing=_NOTHING, notes=notes, measure=measure)
    if not applied.ops:
        warnings.warn(f"apply: {applied!r}", FusedOpsWarning, stacklevel=2)
    return applied


def _chosen(ops: Iterable[str] | None, fused_loss: bool) -> set[str]:
    if isinstance(ops, str):
        raise InvalidInputError(f"apply: got ops = {ops!r}, expected a list of names; to fix: write ops=[{ops!r}]")
    chosen = set(_OPS if ops is None else ops)
    names = (*_OPS, _FUSED_LOSS)
    for name in sorted(map(str, chosen.difference(names))):
        raise InvalidInputError(f"apply: {unknown_name('op in ops', name, names)}")
    return chosen | ({_FUSED_LOSS} if fused_loss else set())


def _name(model: Module) -> str:
    """Return the name of a model's class, below the wrapper of torch.compile."""
    return type(getattr(model, "_orig_mod", model)).__name__


def _loss_applied(module: Module, chosen: set[str]) -> Outcome | None:
    """Replace the loss function of a model; return what happened."""
    name, already = type(module).__name__, loss_of(module)
    if already is not None:
        return name, already.op, "", "", _when(module)
    loss = recognised_loss(module)
    if loss is None or isinstance(loss, str):
        return None if loss is None else (name, "", loss, "cross_entropy", "")
    if loss.op not in chosen:
        return name, "", f"ops has no {loss.op}", loss.op, ""
    replace_loss(module, loss)
    return name, loss.op, "", "", _when(module)


def _when(model: Module) -> str:
    """Return the mode in which the loss of a model calls cross_entropy."""
    return "evaluation" if any(has_fused_loss(head) for head in heads_of(model)) else ""


def _remove(model: Module) -> None:
    for module in model.modules():
        replacement = replacement_of(module)
        if replacement is None or not replacement.stays:
            restore(module)
        restore_loss(module)
        restore_head(module)
    restore_attention(model)
