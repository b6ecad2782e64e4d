"""Megatron's losses with :func:`fusedops.cross_entropy`, of logits whose classes may be divided over ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusedops import ops
from fusedops.integrations.megatron._core import core
from fusedops.integrations.megatron._left import warn_left

_Function = Callable[..., Any]
_IGNORED = -100


def cross_entropy(own: _Function) -> _Function:
    """Return vocab_parallel_cross_entropy with the op."""

    @wraps(own)
    def vocab_parallel_cross_entropy(
        vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
    ) -> Any:
        group = core("parallel_state").get_tensor_model_parallel_group(False) if tp_group is None else tp_group
        classes = vocab_parallel_logits.shape[-1] * (1 if group is None else group.size())
        # Megatron spreads the share over the other classes, the op, as torch, over all
        smoothing = label_smoothing * classes / (classes - 1) if label_smoothing and classes > 1 else 0.0
        if smoothing > 1:
            given = f"label_smoothing = {label_smoothing:g} of {classes} classes"
            fix = f"pass at most {(classes - 1) / classes:g}"
            warn_left("vocab_parallel_cross_entropy", given, "a share of the other classes of at most 1", fix)
            rest = () if tp_group is None else (tp_group,)  # a parameter since megatron-core 0.17
            return own(vocab_parallel_logits, target, label_smoothing, *rest)
        return token_losses(vocab_parallel_logits, target, smoothing, group)

    return vocab_parallel_cross_entropy


def fused_cross_entropy(own: _Function) -> _Function:
    """Return fused_vocab_parallel_cross_entropy with the op."""

    @wraps(own)
    def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Any:
        return token_losses(vocab_parallel_logits, target, 0.0, tp_group)

    return fused_vocab_parallel_cross_entropy


def token_losses(logits: Tensor, target: Tensor, smoothing: float, group: Any = None) -> Tensor:
    """Return the loss of each token.

    Args:
        logits: (..., V / ranks), float16, bfloat16 or float32: this rank's part of the classes. Not written.
        target: (...), int64, the same on all ranks. A token whose target is no class has loss 0: Megatron computes a
            number that its loss mask removes.
        smoothing: the share of the target that is spread over all classes.
        group: the ranks, which have one part of the classes each, in order. None: one rank.

    Returns:
        (...), float32, the same on all ranks. No logits are gathered.

    >>> token_losses(torch.zeros(2, 2), torch.tensor([0, -1]), 0.0)
    tensor([0.6931, 0.0000])
    """
    ranks = 1 if group is None else int(group.size())
    known = (target >= 0) & (target < logits.shape[-1] * ranks)
    target = torch.where(known, target, _IGNORED)
    if ranks == 1:
        return ops.cross_entropy(logits, target, label_smoothing=smoothing, reduction="none")
    mesh = _mesh(group, logits.device.type)
    parts = DTensor.from_local(logits, mesh, [Shard(logits.dim() - 1)], run_check=False)
    targets = DTensor.from_local(target, mesh, [Replicate()], run_check=False)
    loss: Any = ops.cross_entropy(parts, targets, label_smoothing=smoothing, reduction="none")
    return loss.redistribute(placements=[Replicate()]).to_local()


@lru_cache(maxsize=8)
def _mesh(group: Any, device_type: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device_type)
