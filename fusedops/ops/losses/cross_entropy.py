"""Cross entropy of logits and classes, the loss of language models. Replaces torch's cross_entropy, the fused losses of
Liger and Megatron, and torch_npu's npu_cross_entropy_loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.constraints import Dim, Floating, Rank
from fusedops.dtypes import compute_dtype
from fusedops.ops.losses import formulas
from fusedops.ops.losses.arguments import (
    OPTIONS,
    CrossEntropyArgs,
    CrossEntropyGradArgs,
    denominator_constraints,
    denominator_tensor,
    target_constraints,
)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    denominator: float | Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute the cross entropy of logits and target classes.

    The loss of a row is ``lse - (1 - label_smoothing) * z[target] - label_smoothing * mean(z) + z_loss * lse**2``, with
    ``z = softcap * tanh(logits / softcap)`` (without softcap the logits) and ``lse = logsumexp(z)``.

    Args:
        logits: (..., V), float16, bfloat16, float32 or float64, V at least 1. Never written. The classes are the last
            dim, also above two dims, where torch has them in dim 1.
        target: (...), int64, in [0, V) or ``ignore_index``.
        ignore_index: rows with this target have loss 0 and gradient 0, whatever their logits.
        label_smoothing: in [0, 1], the share of the target that is spread evenly over all classes, as in torch.
        z_loss: at least 0, the weight of ``lse**2``.
        softcap: a positive number, the bound of z, or None.
        reduction: "mean", "sum" or "none".
        denominator: what "mean" divides the sum by: a number, or a tensor of one element on the device of ``logits``,
            such as the number of targets of all the batches of a step. None: the number of targets that are not
            ignored, at least 1, so that the loss is 0 where all are (torch: NaN).
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        () for "mean" and "sum", (...) for "none". float32 (float64 for float64), computed in that. The loss of a row
        whose target is out of range is NaN on a device other than the CPU: to raise there would wait for the device.

    Raises:
        InvalidInputError: an argument is not as above; on a CPU also a target out of range.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: torch, ``torch.nn.functional.cross_entropy``; z_loss: Chowdhery et al. 2022, arXiv:2204.02311, section 5;
    softcap: Gemma 2, arXiv:2408.00118.

    >>> import torch, fusedops
    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 0.0], [5.0, 1.0]])
    >>> fusedops.cross_entropy(logits, torch.tensor([0, 1, -100]), reduction="none")
    tensor([0.1269, 0.6931, 0.0000])
    """
    if denominator is not None:
        denominator = denominator_tensor("cross_entropy", denominator, logits)
    args = (logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction, denominator)
    return call(OP, args, backend)


def reference(a: CrossEntropyArgs) -> Tensor:
    """Compute the op in plain torch."""
    options = a.options
    known = a.logits.masked_fill((a.target == a.ignore_index)[..., None], 0.0)  # NaN in an ignored row reaches nothing
    losses = formulas.row_losses(formulas.capped(known, a.softcap), a.target, options)
    return formulas.reduced(losses, a.target, options)


def lse(logits: Tensor, target: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """Compute a saved value: logsumexp(z), 0 for an ignored row, (...)."""
    return formulas.logsumexp(formulas.capped(logits, softcap)).masked_fill(target == ignore_index, 0.0)


def log_prob(logits: Tensor, softcap: float | None) -> Tensor:
    """Compute a saved value: log_softmax(z), (..., V). A kernel that has it need not read the logits again."""
    return torch.log_softmax(formulas.capped(logits, softcap), -1)


def backward(a: CrossEntropyGradArgs) -> Tensor:
    """Compute the gradient of the logits. softmax(z) is exp(log_prob), or exp(z - lse) where log_prob is None."""
    options = a.options
    z = formulas.capped(a.logits, a.softcap)
    scale = formulas.row_scales(a.grad, a.target, a.logits.shape[-1], options)
    return formulas.logit_gradient(scale, z, a.lse, a.target, options).to(a.logits.dtype)


def prepare_args(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the denominator as a tensor."""
    denominator = args[-1]
    divisor = denominator_tensor("cross_entropy", denominator, args[0])
    return args if divisor is denominator else (*args[:-1], divisor)


def loss_dtype(logits: Tensor, *rest: Any) -> torch.dtype:
    """Return the dtype of the loss."""
    return compute_dtype(logits.dtype)


def empty(logits: Tensor, target: Tensor, *rest: Any) -> Tensor:
    """Return an empty output."""
    shape = logits.shape[:-1] if rest[-2] == "none" else ()
    return logits.new_empty(shape, dtype=compute_dtype(logits.dtype))


OP = Op(
    cross_entropy,
    constraints=[
        Floating("logits"),
        Rank("logits", at_least=1),
        Dim("logits", (-1,), at_least=1),
        *OPTIONS,
        *target_constraints("logits"),
        *denominator_constraints("logits"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("logits",),
    outputs=("loss",),
    output_dtype=loss_dtype,
    empty=empty,
    saved=(Saved("lse", lse), Saved("log_prob", log_prob, optional=True)),
    sharding="fusedops.ops.losses.sharding:CROSS_ENTROPY",
    prepare_args=prepare_args,
    evidence="fusedops.ops.losses.evidence:CROSS_ENTROPY",
)
