"""Cross entropy of ``x @ weight.T + bias`` without the logits in memory, the last layer of a language model. Replaces
torch's chain, Liger's fused linear cross entropy, and quack's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.constraints import Count
from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.losses import arguments, formulas
from fusedops.ops.losses.arguments import LinearCrossEntropyArgs, LinearCrossEntropyGradArgs
from fusedops.ops.losses.formulas import LossOptions


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    denominator: float | Tensor | None = None,
    chunk: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute the cross entropy of the logits ``x @ weight.T + bias``, in chunks of rows.

    The logits of all rows do not exist at once, except where they take no more memory than the sum of the gradient of
    weight: on Triton up to 2 H rows of 16 bits. The gradients are computed in forward, chunk by chunk, and backward
    multiplies them by the incoming one; with ``reduction="none"``, backward computes the gradients of weight and
    bias from the logits again.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        weight: (V, H), any of the same dtypes; the dtype of ``x`` is fastest.
        target: (...), int64, the class of each row in [0, V), or ``ignore_index``.
        bias: (V,), any of the same dtypes, or None.
        ignore_index: rows with this target have loss 0 and no gradient.
        label_smoothing: in [0, 1], as torch's.
        z_loss: adds ``z_loss * logsumexp(logits)**2`` to each row; at least 0.
        softcap: c > 0 replaces the logits by ``c * tanh(logits / c)`` first. None: as they are.
        reduction: "mean", "sum", or "none" for the loss of each row.
        denominator: what "mean" divides by, a number or a tensor of one element. None: the number of rows that are not
            ignored, at least 1.
        chunk: rows of a chunk. None: such that its logits take about the size of ``x``, or at least 192 rows. On Triton
            more, where the gradient of a 16-bit ``weight`` takes as much.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        (), or (...) for "none"; float32 (float64 if ``x`` or ``weight`` is). 0 if all rows are ignored. The gradient of
        ``weight`` is summed in float32.

    Raises:
        InvalidInputError: an argument is not as above; on a CPU, a target out of range. On other devices the loss of
            such a row is NaN.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: Liger, ``LigerFusedLinearCrossEntropyLoss``; torch, ``torch.nn.functional.cross_entropy``.

    >>> import torch, fusedops
    >>> x, weight = torch.ones(2, 3), torch.zeros(4, 3, requires_grad=True)
    >>> fusedops.linear_cross_entropy(x, weight, torch.tensor([0, 3]))
    tensor(1.3863, grad_fn=...)
    """
    denominator = arguments.denominator_tensor("linear_cross_entropy", denominator, x)
    args = (x, weight, target, bias, ignore_index, label_smoothing, z_loss, softcap, reduction, denominator, chunk)
    return call(OP, args, backend)


def reference(a: LinearCrossEntropyArgs) -> Tensor:
    """Compute the op in plain torch."""
    options = a.options
    losses = formulas.row_losses(formulas.linear_logits(a.x, a.weight, a.target, a.bias, options), a.target, options)
    return formulas.reduced(losses, a.target, options)


def x_grad(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """Compute the saved value of x: the gradient of the sum of the losses, whatever the reduction.

    Backward multiplies it by the incoming gradient, and "mean" divides there: the numbers of a mean over many rows may
    be too small for float16.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, "sum", None)
    dz = _gradient_of_sum(x, weight, target, bias, options)
    return formulas.product(dz, weight.to(dz.dtype)).to(x.dtype)


def weight_grad(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> Tensor:
    """Compute the saved value of weight, in float32 or float64. Empty for "none", whose rows are scaled first."""
    if reduction == "none":
        return x.new_empty(0, dtype=compute_dtype(promoted(x, weight)))
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, "sum", None)
    return formulas.weight_sums(_gradient_of_sum(x, weight, target, bias, options), x, target, ignore_index)


def bias_grad(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> Tensor:
    """Compute the saved value of bias, as :func:`weight_grad`. Empty without a bias too."""
    if reduction == "none" or bias is None:
        return x.new_empty(0, dtype=compute_dtype(promoted(x, weight)))
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, "sum", None)
    return formulas.bias_sums(_gradient_of_sum(x, weight, target, bias, options), target)


def logits_grad(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> Tensor:
    """Compute the saved value of the logits, (N, V), the dtype of x and weight, in place of which others are None.

    Where a kernel saves it, the product for the gradient of weight is left to backward.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, "sum", None)
    dz = _gradient_of_sum(x, weight, target, bias, options)
    return dz.reshape(target.numel(), weight.shape[0]).to(promoted(x, weight))


def _gradient_of_sum(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: LossOptions) -> Tensor:
    """Return the gradient of the sum of the losses with respect to the logits: (..., V)."""
    one = torch.ones_like(target, dtype=compute_dtype(promoted(x, weight)))
    scale = formulas.row_scales(one, target, weight.shape[0], options)
    return formulas.linear_logit_gradient(scale, x, weight, target, bias, options)


def backward(a: LinearCrossEntropyGradArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias. A gradient that forward did not save is computed from the logits."""
    options = a.options
    wide, summed = compute_dtype(promoted(a.x, a.weight)), a.reduction != "none"
    scale = formulas.row_scales(a.grad.to(wide), a.target, a.weight.shape[0], options)
    dx = dweight = dbias = None
    if a.needs[0] and a.x_grad is not None:
        dx = (a.x_grad.to(wide) * scale[..., None]).to(a.x.dtype)
    if summed and (a.weight_grad is not None or a.bias_grad is not None):
        factor = (
            a.grad.to(wide) if a.reduction == "sum" else a.grad.to(wide) / formulas.divisor(a.target, options, wide)
        )
        factor = factor.masked_fill((a.target == a.ignore_index).all(), 0)  # 0 times infinity is NaN
        if a.needs[1] and a.weight_grad is not None:
            dweight = (a.weight_grad * factor).to(a.weight.dtype)
        if a.needs[2] and a.bias_grad is not None and a.bias is not None:
            dbias = (a.bias_grad * factor).to(a.bias.dtype)
    lacking = (
        a.needs[0] and dx is None,
        a.needs[1] and dweight is None,
        a.needs[2] and dbias is None and a.bias is not None,
    )
    if any(lacking):
        dz = formulas.linear_logit_gradient(scale, a.x, a.weight, a.target, a.bias, options)
        if lacking[0]:
            dx = formulas.product(dz, a.weight.to(wide)).to(a.x.dtype)
        if lacking[1]:
            dweight = formulas.weight_sums(dz, a.x, a.target, a.ignore_index).to(a.weight.dtype)
        if lacking[2] and a.bias is not None:
            dbias = formulas.bias_sums(dz, a.target).to(a.bias.dtype)
    return dx, dweight, dbias


def empty(a: LinearCrossEntropyArgs) -> Tensor:
    """Return an empty output."""
    return a.x.new_empty(a.target.shape if a.reduction == "none" else (), dtype=compute_dtype(promoted(a.x, a.weight)))


OP = Op(
    linear_cross_entropy,
    constraints=[
        *arguments.linear_constraints(*arguments.denominator_constraints("x")),
        *arguments.OPTIONS,
        Count("chunk"),
    ],
    reference=reference,
    backward=backward,
    differentiable=("x", "weight", "bias"),
    outputs=("loss",),
    empty=empty,
    saved=(
        Saved("x_grad", x_grad, gradient_of="x"),
        Saved("weight_grad", weight_grad, gradient_of="weight"),
        Saved("bias_grad", bias_grad, gradient_of="bias"),
        Saved("logits_grad", logits_grad, optional=True, gradient_of="weight"),
    ),
    sharding="fusedops.ops.losses.sharding:LINEAR_CROSS_ENTROPY",
    evidence="fusedops.ops.losses.evidence:LINEAR_CROSS_ENTROPY",
)
