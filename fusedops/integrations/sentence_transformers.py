"""fusedops in encoders: models of sentence-transformers, and those of transformers in a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import Module, Sequential

from fusedops._policy.use import use
from fusedops.integrations import transformers
from fusedops.integrations._applied import Applied, Row
from fusedops.integrations._modules.linear import recognised_linear
from fusedops.integrations._replacement import Replacement, own_class, replace, replacement_of, restore
from fusedops.integrations._trial.twin import Raised, called, near
from fusedops.integrations.transformers._attention.implementation import roots_of
from fusedops.integrations.transformers._attention.unpadded import (
    PROMISED,
    OfRows,
    Pooled,
    Rows,
    in_evaluation,
    recognised_unpadded,
)

__all__ = ["apply"]
_OP = "varlen_attention"


def apply(model: Module, *, rows: Rows = "independent") -> Applied:
    """Run an encoder without padding: on the tokens of a batch packed one after the other, their attention by
    :func:`fusedops.varlen_attention`, and all else as :func:`fusedops.integrations.transformers.apply` has it.

    The model gets and returns what it did, with 0 where it computed something for padding. A model is recognised by its
    results: it runs on a few packed tokens. Others are left, with the reason in the table. A batch that is padded on
    the left, a call that asks for the probabilities of attention, and training with dropout in attention run padded, as
    before.

    Args:
        model: a SentenceTransformer, CrossEncoder or SparseEncoder, or an encoder of transformers, with its weights.
        rows: "independent": in float32 on a CPU, a sentence has the same bits alone and in any batch. Linear layers
            run on the kernel of :func:`fusedops.linear`, also where torch's is faster on this processor; a sum that
            another module computes, over padded tokens or layers, may still depend on the batch. "any": such layers run
            on torch's kernel, and the bits depend on the batch.

    Returns:
        the outcome for each class of modules; ``remove()`` undoes all of it.

    Raises:
        InvalidInputError: ``model`` is no module.
        PolicyError: ``rows`` is another word.

    Warns:
        FusedOpsWarning: nothing is recognised; the model is left as it was.

    >>> import transformers
    >>> from fusedops.integrations.sentence_transformers import apply
    >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    >>> apply(transformers.RobertaModel(transformers.RobertaConfig(**sizes, vocab_size=64))).ops["varlen_attention"]
    1
    """
    policy = use(rows=rows)
    applied = transformers.apply(model)
    for module in model.modules():
        if isinstance(replacement_of(module), OfRows):  # of another call, with other rows
            restore(module)
    with in_evaluation(model):
        found = list(_unpadded(model, rows))
    notes: list[str] = []
    if rows == "independent" and any(row.op for row in found):
        _replace_around(model, rows)
        with policy:  # with which more linear layers are recognised
            applied = transformers.apply(model)
            found += _heads(model)
        floats = {(each.dtype, each.device.type) for each in model.parameters() if each.is_floating_point()}
        notes = [
            f"on {device} in {dtype}, the bits of a sentence may depend on its batch"
            for dtype, device in sorted(floats, key=str)
            if (dtype, device) != PROMISED
        ]
    return Applied(
        applied.model,
        [*(row for row in applied.rows if row.op != _OP), *found],
        applied.remove,
        notes=lambda: [*applied.notes, *notes],
        measure=(model, lambda: apply(model, rows=rows)),
    )


def _unpadded(model: Module, rows: Rows) -> Iterator[Row]:
    """Replace the forward of each model of transformers in a module; yield what happened."""
    for root in roots_of(model):
        recognised = recognised_unpadded(root, rows)
        if not isinstance(recognised, str) and _reads_padding(model, recognised[0]):
            recognised = "a module behind it, such as a convolution, reads what it computes for padding"
        if isinstance(recognised, str):
            yield Row(own_class(root).__name__, "", 1, recognised, _OP)
        else:
            replace(*recognised)
            yield Row(own_class(recognised[0]).__name__, _OP, 1)


def _reads_padding(model: Module, encoder: Any) -> bool:
    """Return True where the modules behind an encoder give a sentence other results with other numbers in its padding.

    They are those of a model of sentence-transformers, which take and return a dict. Others are not asked.
    """
    if not isinstance(model, Sequential):
        return False
    _, *after = model
    weight = next(encoder.parameters())
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], device=weight.device)
    numbers = torch.arange(10 * int(encoder.config.hidden_size)).view(2, 5, -1).to(weight).sin()

    def embedding(padding: float) -> Any:
        features: Any = {"attention_mask": mask, "token_embeddings": numbers.masked_fill(mask[..., None] == 0, padding)}
        for module in after:
            features = module(features)
        return features["sentence_embedding"]

    first, second = called(embedding, 0.0), called(embedding, 1.0)
    if isinstance(first, Raised) or isinstance(second, Raised):  # one wants what else the encoder gives
        return False
    return not near(first, second, 1e-3)


def _replace_around(model: Any, rows: Rows) -> None:
    """Replace what pools tokens, and the forward of the whole.

    Of a Sequential, as the models of sentence-transformers are, that of each module: their pools of processes pickle
    the class of the whole, and Python pickles a class by its name.
    """
    for module in model.modules():
        if hasattr(module, "_forward_flattened"):  # of sentence-transformers
            replace(module, Pooled(rows))
    for module in model.children() if isinstance(model, Sequential) else (model,):
        if replacement_of(module) is None:
            replace(module, OfRows(rows))


def _heads(model: Module) -> Iterator[Row]:
    """Replace the linear layers that transformers' apply leaves to a fused loss; yield what happened."""
    for module in model.modules():
        recognised = recognised_linear(module) if replacement_of(module) is None else None
        if isinstance(recognised, Replacement):
            replace(module, recognised)
            yield Row(own_class(module).__name__, recognised.op, 1)
