"""Cross entropy of ``x @ weight.T + bias`` without the logits in memory, the last layer of a language model. Replaces
torch's chain, Liger's fused linear cross entropy, and quack's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.constraints import Count, Dim, Floating, Rank, SameDevice, SameSize
from fusedops.ops.losses import arguments, formulas
from fusedops.ops.losses import linear_formulas as linear
from fusedops.ops.losses.linear_sharding import SHARDING


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

    The logits of all rows never exist at once. The gradients are computed in forward, chunk by chunk, and backward
    multiplies them by the incoming one; with ``reduction="none"``, backward computes those of weight and bias by the
    chunks again.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        weight: (V, H), any of the same dtypes; that of ``x`` is fastest.
        target: (...), int64, the class of each row in [0, V), or ``ignore_index``.
        bias: (V,), any of the same dtypes, or None.
        ignore_index: rows with this target have loss 0 and no gradient.
        label_smoothing: in [0, 1], as torch's.
        z_loss: adds ``z_loss * logsumexp(logits)**2`` to each row; at least 0.
        softcap: c > 0 replaces the logits by ``c * tanh(logits / c)`` first. None: as they are.
        reduction: "mean", "sum", or "none" for the loss of each row.
        denominator: what "mean" divides by, a number or a tensor of one element. None: the number of rows that are not
            ignored, at least 1.
        chunk: rows of a chunk. None: such that its logits take about the size of ``x``, or 256 rows.
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


def checked(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments; InvalidInputError for a target out of range on a CPU."""
    arguments.check_targets("linear_cross_entropy", args[2], args[4], args[1].shape[0])
    return args


def reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    chunk: int | None,
) -> Tensor:
    """Compute the op in plain torch."""
    z = linear.capped_logits(x, weight, target, bias, ignore_index, softcap)
    losses = formulas.row_losses(z, target, ignore_index, label_smoothing, z_loss)
    return formulas.reduced(losses, target, ignore_index, reduction, denominator)


def empty(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    denominator: Tensor | None,
    chunk: int | None,
) -> Tensor:
    """Return an empty output."""
    return x.new_empty(target.shape if reduction == "none" else (), dtype=linear.arithmetic(x, weight))


OP = Op(
    linear_cross_entropy,
    constraints=[
        Floating("x"),
        Rank("x", at_least=1),
        Floating("weight"),
        SameDevice("weight", "x"),
        Rank("weight", 2),
        Dim("weight", (0,), at_least=1),
        SameSize("weight", -1, "x", -1),
        *arguments.tensor_constraints("x", "weight", 0),
        Floating("bias"),
        SameDevice("bias", "x"),
        Rank("bias", 1),
        SameSize("bias", 0, "weight", 0),
        *arguments.OPTIONS,
        Count("chunk"),
    ],
    reference=reference,
    backward=linear.backward,
    differentiable=("x", "weight", "bias"),
    outputs=("loss",),
    empty=empty,
    complete=checked,
    saved=(
        Saved("x_grad", linear.x_grad, gradient_of="x"),
        Saved("weight_grad", linear.weight_grad, gradient_of="weight"),
        Saved("bias_grad", linear.bias_grad, gradient_of="bias"),
    ),
    sharding=SHARDING,
    evidence="fusedops.ops.losses.linear_evidence:LINEAR_CROSS_ENTROPY",
)
