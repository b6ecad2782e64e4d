"""The patch: Megatron's functions are replaced by name, in every module that holds them, and brought back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

from fusedops.integrations._applied import Applied, Row
from fusedops.integrations.megatron import _experts as experts
from fusedops.integrations.megatron import _functions as functions
from fusedops.integrations.megatron import _losses as losses
from fusedops.integrations.megatron._core import core, version
from fusedops.integrations.megatron._left import refusal


class Target(NamedTuple):
    """A function or module of Megatron, the op in its place, and what makes the replacement from Megatron's own."""

    op: str
    module: str
    name: str
    make: Callable[[Any], Any]


class Kept(NamedTuple):
    """A function of Megatron that is left, and why."""

    module: str
    name: str
    why: str


_TARGETS = (
    Target("scaled_masked_softmax", "fusions.fused_softmax", "FusedScaleMaskSoftmax", functions.dropin),
    Target("scaled_masked_softmax", "fusions.fused_softmax", "ScaledMaskedSoftmax", functions.dropin),
    Target("scaled_masked_softmax", "fusions.fused_softmax", "ScaledUpperTriangMaskedSoftmax", functions.dropin),
    Target("scaled_masked_softmax", "fusions.fused_softmax", "ScaledSoftmax", functions.dropin),
    Target("scaled_masked_softmax", "fusions.fused_softmax", "SoftmaxOne", functions.dropin),
    Target("bias_gelu", "fusions.fused_bias_gelu", "bias_gelu_impl", functions.gelu),
    Target("bias_dropout_add", "fusions.fused_bias_dropout", "get_bias_dropout_add", functions.dropout),
    Target("swiglu", "fusions.fused_bias_swiglu", "bias_swiglu_impl", functions.swiglu),
    Target("geglu", "fusions.fused_bias_geglu", "bias_geglu_impl", functions.geglu),
    Target("rotary_embedding", "models.common.embeddings.rope_utils", "apply_rotary_pos_emb", functions.rope),
    Target("cross_entropy", "tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy", losses.cross_entropy),
    Target(
        "cross_entropy",
        "fusions.fused_cross_entropy",
        "fused_vocab_parallel_cross_entropy",
        losses.fused_cross_entropy,
    ),
    Target("top_k_routing", "transformer.moe.moe_utils", "topk_routing_with_score_function", experts.routing),
    Target("grouped_matmul", "transformer.moe", "grouped_gemm_util", experts.grouped),
)
_WEIGHTS = "it multiplies by a weight of each token, which the op does not take"
_KEPT = (
    Kept("fusions.fused_bias_swiglu", "weighted_bias_swiglu_impl", _WEIGHTS),
    Kept("fusions.fused_bias_geglu", "weighted_bias_quick_geglu_impl", _WEIGHTS),
    Kept(
        "models.common.embeddings.rope_utils",
        "apply_rotary_pos_emb_with_cos_sin",
        "it is for flash_decode, whose attention is flash-attn's",
    ),
    Kept(
        "transformer.moe.moe_utils",
        "compute_routing_scores_for_aux_loss",
        "it needs the scores of all experts, and the op returns those of the chosen",
    ),
    Kept("transformer.moe.experts", "TEGroupedMLP", "its products and activation are Transformer Engine's"),
)
# the callers of the functions that Megatron imports late: they are imported first, so that the counts are the same
_CALLERS = (
    "models.gpt",
    "transformer.moe.experts",
    "transformer.moe.router",
    "transformer.moe.shared_experts",
    "models.common.language_module.language_module",
)

# replacement and original of each function that is replaced, by its place
_replaced: dict[tuple[str, str], tuple[Any, Any]] = {}
# the names that are bound to an object: each with the variables of its module
_Holders = list[tuple[dict[str, Any], str]]


def patch(*, ops: Iterable[str] | None = None) -> Applied:
    """Replace Megatron's fused functions by ops, in every module that holds them: for models of any spec.

    Call it before the model and its specs are built: they hold the softmax and the dropout with which they were built.
    The other functions are looked up at each call. A second call changes nothing more.

    Args:
        ops: the names of the ops to use; None: all of them.

    Returns:
        the outcome for each function, and :meth:`Applied.remove`, which brings Megatron's own back everywhere.

    Raises:
        InvalidInputError: ``ops`` has a name that the patch does not use.
        ModuleNotFoundError: megatron-core is not installed.

    Source: Megatron-LM, ``megatron/core/fusions``, ``megatron/core/models/common/embeddings/rope_utils.py``,
    ``megatron/core/tensor_parallel/cross_entropy.py``, ``megatron/core/transformer/moe``.

    >>> patched = patch(ops=["geglu"])
    >>> [(row.module, row.op) for row in patched.rows if row.op]
    [('bias_geglu_impl', 'geglu')]
    >>> patched.remove()
    """
    chosen = _chosen(ops)
    for name in _CALLERS:
        core(name)
    found = [(of, _own(of)) for of in (*_TARGETS, *_KEPT)]
    holders = _holders(own for _, own in found if own is not None)
    rows: list[Row] = []
    for of, own in found:
        bound = holders.get(id(own), [])
        if isinstance(of, Target):
            rows.append(_outcome(of, own, bound, chosen))
        elif own is not None:
            rows.append(Row(of.name, "", len(bound), of.why))
    return Applied(f"megatron-core {version()}", rows, remove, kind="function")


def remove() -> None:
    """Bring back Megatron's own functions, also in the modules that were imported since.

    >>> remove()
    """
    holders = _holders(replacement for replacement, _ in _replaced.values())
    for replacement, own in _replaced.values():
        _rebind(holders[id(replacement)], own)
    _replaced.clear()


def _chosen(ops: Iterable[str] | None) -> set[str]:
    known = {target.op for target in _TARGETS}
    chosen = known if ops is None else set(ops)
    unknown = sorted(chosen - known)
    if unknown:
        raise refusal(
            "patch", f"ops = {unknown}", f"names from {', '.join(sorted(known))}", f"leave out {unknown[0]!r}"
        )
    return chosen


def _own(target: Target | Kept) -> Any:
    """Return what Megatron's module holds, None where this version has no such function."""
    try:
        return getattr(core(target.module), target.name, None)
    except ModuleNotFoundError:
        return None


def _outcome(target: Target, own: Any, holders: _Holders, chosen: set[str]) -> Row:
    """Replace a function, if it is Megatron's own and chosen, and return the row of the table."""
    key = (target.module, target.name)
    replacement, _ = _replaced.get(key, (None, None))
    if replacement is not None and own is replacement:
        return Row(target.name, target.op, len(holders))
    if own is None:
        return Row(target.name, "", 0, f"megatron-core {version()} does not have it")
    if _module_of(own) != f"megatron.core.{target.module}":
        return Row(target.name, "", len(holders), f"{_module_of(own)} has replaced it")
    if target.op not in chosen:
        return Row(target.name, "", len(holders), f"ops has no {target.op}")
    replacement = target.make(own)
    _replaced[key] = replacement, own
    _rebind(holders, replacement)
    return Row(target.name, target.op, len(holders))


def _module_of(function: Any) -> str:
    """Return the module that defines a function, a class, or the class of a bound method; of a module its package."""
    if isinstance(function, ModuleType):
        return function.__name__.rpartition(".")[0]
    owner = getattr(function, "__self__", None)
    return getattr(owner if isinstance(owner, type) else function, "__module__", "another library")


def _holders(values: Iterable[Any]) -> dict[int, _Holders]:
    """Return the names of all modules that are bound to each of these very objects, by ``id``.

    One pass for all of them: a process that has imported Megatron has thousands of modules.
    """
    found: dict[int, _Holders] = {id(value): [] for value in values}
    modules: list[Any] = list(sys.modules.values())  # programs put other objects there too
    for names in [vars(module) for module in modules if isinstance(module, ModuleType)]:
        for name, held in list(names.items()):
            if id(held) in found:
                found[id(held)].append((names, name))
    return found


def _rebind(holders: _Holders, new: Any) -> None:
    for names, name in holders:
        names[name] = new
