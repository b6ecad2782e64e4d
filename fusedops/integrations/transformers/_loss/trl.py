"""The log probabilities of trl's trainers, computed by an op for the heads of applied models.

trl gives a model a forward of its own, which hands the hidden states and the head to one autograd Function. That
Function is replaced in trl's module while a model is applied, and computes the heads of other models as before.

Source: trl, ``trainer/utils.py``, ``add_fused_lm_head``; ``kernels/chunked_logprob.py``.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Module

from fusedops import ops
from fusedops._torch import autocasts
from fusedops.integrations._trial.twin import is_replaced_elsewhere
from fusedops.integrations.transformers._loss.losses import loss_of
from fusedops.nn._packed_weight import PackedWeight

LOG_PROBS = "linear_log_probs"  # the name of the op
_MODULE, _NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
_CHUNK = 2**24  # logits of the statistics that exist at a time

_heads = WeakSet[Module]()


class LogProbs:
    """The Function of trl, with ``apply`` replaced for the weights of the heads that are applied."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> Any:
        """Return log probabilities and entropies, then the statistics; None for what ``outputs`` does not name."""
        if not any(getattr(head, "weight", None) is weight for head in _heads):
            return self.own.apply(hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs)
        if autocasts(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if scale != 1.0:
            hidden, bias = hidden * scale, None if bias is None else bias * scale
        found: Any = ops.linear_log_probs(
            hidden, weight, targets, bias,
            temperature=temperature, softcap=softcap, return_entropy="entropy" in outputs,
        )  # fmt: skip
        logp, entropy = found if "entropy" in outputs else (found, None)
        statistics = _statistics(hidden, weight, bias, targets, temperature, softcap, outputs)
        return logp.float(), None if entropy is None else entropy.float(), *statistics


@torch.no_grad()
def _statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    outputs: tuple[str, ...],
) -> tuple[Tensor | None, ...]:
    """Return what trl shows: the log of the sum of squared probabilities, the mean logit, is the target first."""
    names = ("log_sum_sq_probs", "mean_logits", "is_top1")
    parts: dict[str, list[Tensor]] = {name: [] for name in names if name in outputs}
    rows = max(1, _CHUNK // weight.shape[0])
    for start in range(0, len(targets), rows) if parts else ():
        x, target = hidden[start : start + rows], targets[start : start + rows]
        offset = None if bias is None else bias.to(x.dtype)
        logits = torch.nn.functional.linear(x, weight.to(x.dtype), offset).float()
        logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
        if "log_sum_sq_probs" in parts:
            parts["log_sum_sq_probs"].append((2 * logits.log_softmax(-1)).logsumexp(-1))
        if "mean_logits" in parts:
            parts["mean_logits"].append(logits.mean(-1))
        if "is_top1" in parts:
            parts["is_top1"].append(logits.argmax(-1) == target)
    return tuple(torch.cat(parts[name]) if parts.get(name) else None for name in names)


def serve_head(head: Module) -> str | None:
    """Let trl's trainers compute a head by the op; return why it is left, or "".

    None where trl is not imported, or has no such Function.
    """
    if "trl" not in sys.modules:
        return None
    try:
        module: Any = importlib.import_module(_MODULE)  # trl imports its modules on first use
    except ImportError:  # another release, or a package that its trainers need is missing
        return None
    own = getattr(module, _NAME, None)
    if own is None:
        return None
    if isinstance(getattr(head, "weight", None), PackedWeight):
        return "the head's weight is packed; to fix: leave the head out of quantization"
    if not isinstance(own, LogProbs):
        setattr(module, _NAME, LogProbs(own))
    _heads.add(head)
    return ""


def restore_head(head: Module) -> None:
    """Undo :func:`serve_head`; with the last head, trl's module has its own Function again."""
    _heads.discard(head)
    module: Any = sys.modules.get(_MODULE)
    if isinstance(own := getattr(module, _NAME, None), LogProbs) and not _heads:
        setattr(module, _NAME, own.own)


def replaced_forwards(model: Module) -> list[str]:
    """Return a sentence for each model whose loss is replaced, and whose forward another library replaced since.

    Such a forward, as those of trl's trainers, may compute the loss without the model's loss function.
    """
    return [
        f"{type(module).__name__}.forward was replaced by another library: its {loss.op} runs only if that calls the "
        f"model's loss function; to fix: for the trainers of trl, import trl before apply"
        for module in model.modules()
        if (loss := loss_of(module)) is not None
        and is_replaced_elsewhere(module)
        and cast("Any", module).get_output_embeddings() not in _heads
    ]
