"""The log probabilities of targets under a language model's last layer, and the entropy, without the logits in memory:
what losses of preferences and of reinforcement learning are made of. Replaces the chunked functions of trl, Liger,
prime-rl and verl.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from fusedops._contract.op import Op
from fusedops._contract.values import Saved
from fusedops._dispatch.call import call
from fusedops.constraints import Flag
from fusedops.dtypes import compute_dtype, promoted
from fusedops.ops.losses import arguments, formulas
from fusedops.ops.losses.arguments import LinearLogProbsArgs, LinearLogProbsGradArgs
from fusedops.ops.losses.formulas import LossOptions


def linear_log_probs(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    backend: str | None = None,
) -> Any:
    """Compute the log probability of each target under ``softmax(softcap(x @ weight.T + bias) / temperature)``.

    The rows are computed in chunks, and again in backward. The logits of all rows do not exist at once, except where
    they take no more memory than the sum of the gradient of weight: on Triton up to 2 H rows of 16 bits.

    Args:
        x: (..., H), float16, bfloat16, float32 or float64.
        weight: (V, H), any of the same dtypes; the dtype of ``x`` is fastest.
        target: (...), int64, the class of each row in [0, V), or ``ignore_index``.
        bias: (V,), any of the same dtypes, or None. -inf leaves a class out.
        temperature: above 0; the logits are divided by it, after the softcap.
        softcap: c > 0 replaces the logits by ``c * tanh(logits / c)`` first. None: as they are.
        ignore_index: rows with this target have results 0 and no gradient.
        return_entropy: also return the entropy of each row's distribution.
        backend: a policy for this call alone, such as "triton" or "npu,eager". None: the policy in effect.

    Returns:
        logp (...); with ``return_entropy`` the pair (logp, entropy), entropy (...). Both are differentiable and
        contiguous, float32 (float64 if ``x`` or ``weight`` is), computed in that. The gradient of ``weight`` is summed
        in float32. A class that is left out adds 0 to the entropy, and has the log probability -inf.

    Raises:
        InvalidInputError: an argument is not as above; on a CPU, a target out of range. On other devices the results of
            such a row are NaN.
        NoBackendError: the policy forbids a fallback and its backend does not take the call.

    Source: trl, ``selective_log_softmax`` and ``entropy_from_logits``; Liger, ``LigerFusedLinearGRPOLoss``.

    >>> import torch, fusedops
    >>> x, weight = torch.ones(2, 3), torch.zeros(4, 3, requires_grad=True)
    >>> fusedops.linear_log_probs(x, weight, torch.tensor([0, -100]))
    tensor([-1.3863,  0.0000], grad_fn=...)
    >>> logp, entropy = fusedops.linear_log_probs(x, weight, torch.tensor([0, -100]), return_entropy=True)
    >>> entropy.detach()
    tensor([1.3863, 0.0000])
    """
    results = call(OP, (x, weight, target, bias, temperature, softcap, ignore_index, return_entropy), backend)
    # under torch.fx.symbolic_trace the results are one proxy
    return results if return_entropy or type(results) is not tuple else cast("Any", results)[0]


def reference(a: LinearLogProbsArgs) -> tuple[Tensor, Tensor]:
    """Compute the op in plain torch."""
    logits = _logits(a.x, a.weight, a.target, a.bias, a.softcap, a.ignore_index)
    logp, entropy = formulas.log_probs(logits / a.temperature, a.target, a.ignore_index)
    return logp, entropy if a.return_entropy else torch.zeros_like(entropy)


def lse(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    ignore_index: int,
) -> Tensor:
    """Compute the saved value: logsumexp of the logits after softcap and temperature, 0 for an ignored row, (...)."""
    z = _logits(x, weight, target, bias, softcap, ignore_index) / temperature
    return formulas.logsumexp(z).masked_fill(target == ignore_index, 0.0)


def backward(a: LinearLogProbsGradArgs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight and bias from the logits, which are computed again."""
    logits = _logits(a.x, a.weight, a.target, a.bias, a.softcap, a.ignore_index)
    of_entropy = a.grad_entropy.to(logits.dtype) if a.return_entropy else None
    dz = formulas.log_prob_gradient(
        a.grad_logp.to(logits.dtype), of_entropy, logits, a.lse, a.target, a.temperature, a.softcap, a.ignore_index
    )
    dx = formulas.product(dz, a.weight.to(dz.dtype)).to(a.x.dtype) if a.needs[0] else None
    dweight = formulas.weight_sums(dz, a.x, a.target, a.ignore_index).to(a.weight.dtype) if a.needs[1] else None
    dbias = formulas.bias_sums(dz, a.target).to(a.bias.dtype) if a.needs[2] and a.bias is not None else None
    return dx, dweight, dbias


def empty(x: Tensor, weight: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return empty outputs."""
    dtype = compute_dtype(promoted(x, weight))
    return x.new_empty(target.shape, dtype=dtype), x.new_empty(target.shape, dtype=dtype)


def _logits(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, softcap: float | None, ignore_index: int
) -> Tensor:
    """Return the logits after the softcap: (..., V). An ignored row of x counts as 0."""
    return formulas.linear_logits(x, weight, target, bias, LossOptions(ignore_index, 0.0, 0.0, softcap, "none", None))


OP = Op(
    linear_log_probs,
    constraints=[*arguments.linear_constraints(), *arguments.LOG_PROB_OPTIONS, Flag("return_entropy")],
    reference=reference,
    backward=backward,
    differentiable=("x", "weight", "bias"),
    outputs=("logp", "entropy"),
    empty=empty,
    saved=(Saved("lse", lse),),
    sharding="fusedops.ops.losses.sharding:LINEAR_LOG_PROBS",
    evidence="fusedops.ops.losses.evidence:LINEAR_LOG_PROBS",
)
