"""Group relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its variants."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusedops.dtypes import upcast
from fusedops.errors import InvalidInputError
from fusedops.losses._checks import check_choice, check_number, check_present, check_shapes

TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
_LEAST_LOG, _MOST_LOG = math.log(1e-8), 20.0  # bounds of the logarithm of a weight of "vespo"


def grpo_loss(
    logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logp: Tensor | None = None,
    ref_logp: Tensor | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    sampling_ratio: Tensor | None = None,
    max_completion_length: int | None = None,
    num_items: float | Tensor | None = None,
    sapo_temperatures: tuple[float, float] = (1.0, 1.05),
    vespo_positive: tuple[float, float] = (2.0, 3.0),
    vespo_negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """Compute the loss of a policy from the log probabilities of the tokens that it sampled.

    With ``ratio = exp(logp - old_logp)``, a token's loss is ``-min(ratio * a, clip(ratio) * a)``, with the advantage a.
    :doc:`The page of the losses <../losses>` has the formulas and the divisors of all types.

    Args:
        logp: (B, T), floating, such as ``linear_log_probs(x, weight, tokens, temperature=...)``.
        advantages: (B,) or (B, T), floating.
        mask: (B, T), bool or a number: 1 for tokens that count. Others have no effect, whatever their numbers.
        old_logp: (B, T), ``logp`` of the policy that sampled, without gradient. None: ``logp`` itself, detached.
        ref_logp: (B, T), ``logp`` of the reference model, for ``beta``.
        loss_type: "grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo" or "vespo".
        importance_sampling_level: "token", or "sequence" for the geometric mean of a sequence's ratios, as in GSPO. Not
            of "cispo", "sapo" and "vespo".
        epsilon_low: ratios are clipped below ``1 - epsilon_low``.
        epsilon_high: and above ``1 + epsilon_high``; of "cispo" above ``epsilon_high`` alone.
        delta: the largest ratio that is not clipped either, or None. Not of "cispo", "sapo" and "vespo".
        beta: the weight of the estimate k3 of KL(policy | reference), at least 0.
        use_bias_correction_kl: multiply that by the ratio.
        sampling_ratio: (B, T) or (B, 1), a correction of each token's loss for an engine that sampled by other numbers,
            or None.
        max_completion_length: what "dr_grpo" divides by, beside B.
        num_items: what "dapo", "cispo" and "vespo" divide by, a number or a tensor of one element: the tokens of all
            batches of a step. None: those of ``mask``, at least 1.
        sapo_temperatures: of "sapo", for positive advantages and for others, above 0.
        vespo_positive: of "vespo", the exponent k and the rate lambda of a sequence's weight, for advantages that are
            not negative.
        vespo_negative: the same for negative advantages.

    Returns:
        (), float32, or float64 for float64, computed in that.

    Raises:
        InvalidInputError: an argument is not as above.

    Source: trl, ``GRPOTrainer``; Liger, ``LigerFusedLinearGRPOLoss``.

    >>> import torch
    >>> from fusedops.losses import grpo_loss
    >>> logp = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
    >>> grpo_loss(logp, torch.tensor([1.0, -1.0]), torch.tensor([[1, 1], [1, 0]]), old_logp=logp - 0.1)
    tensor(-0.3684)
    """
    name, shape = "grpo_loss", tuple(logp.shape)
    check_choice(name, "loss_type", loss_type, TYPES)
    check_choice(name, "importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    if importance_sampling_level == "sequence" and loss_type in ("cispo", "sapo", "vespo"):
        raise InvalidInputError(
            f"{name}: got importance_sampling_level = 'sequence' with loss_type = {loss_type!r}, expected 'token'; to "
            f"fix: pass importance_sampling_level='token'"
        )
    if logp.dim() != 2:
        raise InvalidInputError(f"{name}: got logp of shape {shape}, expected (B, T); to fix: pass 2 dims")
    check_shapes(name, (shape,), "that of logp", mask=mask, old_logp=old_logp, ref_logp=ref_logp)
    check_shapes(name, (shape[:1], shape), "(B,) or (B, T) of logp", advantages=advantages)
    check_shapes(name, (shape, (shape[0], 1)), "(B, T) or (B, 1) of logp", sampling_ratio=sampling_ratio)
    check_number(name, "beta", beta, 0.0, math.inf)
    for at, each in enumerate(sapo_temperatures):
        check_number(name, f"sapo_temperatures[{at}]", each, 0.0, math.inf, low_allowed=False)
    if beta:
        check_present(name, "for beta", ref_logp=ref_logp)
    if loss_type == "dr_grpo":
        check_present(name, "by which dr_grpo divides", max_completion_length=max_completion_length)
    kept = mask != 0
    weights = mask.to(upcast(logp).dtype)
    wide = upcast(logp).masked_fill(~kept, 0.0)  # a NaN at a masked token reaches nothing
    old = wide.detach() if old_logp is None else upcast(old_logp).masked_fill(~kept, 0.0)
    a = upcast(advantages).view(*advantages.shape, *[1] * (2 - advantages.dim()))
    log_ratio = wide - old
    ratio = log_ratio
    if importance_sampling_level == "sequence":
        ratio = (log_ratio * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True).clamp(min=1.0)
    ratio = torch.exp(ratio)
    correction = None if sampling_ratio is None else upcast(sampling_ratio)
    if loss_type == "cispo":
        losses = -ratio.clamp(max=epsilon_high).detach() * a * wide
    elif loss_type == "sapo":
        positive, other = sapo_temperatures
        temperature = torch.full_like(a, other).masked_fill(a > 0, positive)
        losses = -torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature) * a
    elif loss_type == "vespo":
        scale = _gamma_weights(log_ratio, a, weights, correction, vespo_positive, vespo_negative)
        losses = -scale * a * wide
    else:
        clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
        largest = ratio if delta is None else ratio.clamp(max=delta)
        losses = -torch.minimum(largest * a, clipped * a)
    if correction is not None and loss_type != "vespo":
        losses = losses * correction
    if beta and ref_logp is not None:
        difference = upcast(ref_logp).masked_fill(~kept, 0.0) - wide
        k3 = torch.exp(difference) - difference - 1
        losses = losses + beta * (k3 * ratio if use_bias_correction_kl else k3)
    each = losses.expand(shape).masked_fill(~kept, 0.0) * weights
    if loss_type in ("grpo", "sapo"):
        return (each.sum(-1) / weights.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "luspo":
        return each.sum(-1).mean()
    if loss_type == "dr_grpo" and max_completion_length is not None:
        return each.sum() / (shape[0] * max_completion_length)
    count = weights.sum() if num_items is None or loss_type == "bnpo" else num_items
    if isinstance(count, Tensor):
        return each.sum() / count.to(each.dtype).reshape(()).clamp(min=1.0)
    return each.sum() / max(float(count), 1.0)


@torch.no_grad()
def _gamma_weights(
    log_ratio: Tensor,
    a: Tensor,
    weights: Tensor,
    correction: Tensor | None,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Tensor:
    """Return ``exp(lambda) * w**k * exp(-lambda * w)`` of the ratio w of each sequence: (B, 1), or (B, T) as ``a``."""
    log_w = (log_ratio.clamp(-_MOST_LOG, _MOST_LOG) * weights).sum(-1, keepdim=True)
    if correction is not None:
        log_w = log_w + correction.log().clamp(_LEAST_LOG, _MOST_LOG).sum(-1, keepdim=True)
    log_w = log_w.clamp(_LEAST_LOG, _MOST_LOG)
    at_least_0 = a >= 0
    k, rate = (torch.full_like(a, other).masked_fill(at_least_0, own) for own, other in zip(positive, negative))
    rate = rate.clamp(min=1e-4)
    return torch.exp(rate + k * log_w - rate * torch.exp(log_w)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
